"""The share of a GPU's memory that jax takes. XLA's allocator takes that much once, when jax first
uses the GPU, and an environment variable that is read then says how much.
"""

import os

VARIABLE = "XLA_CLIENT_MEM_FRACTION"
OLD_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # jax refuses to start where both are set
DEFAULT = 0.75  # what jax takes where neither is set
# What a process takes that does nothing but serve. Outside of the allocator lie CUDA's context, the
# code of kernels and the graphs of steps.
SERVING = 0.95


def is_set() -> bool:
    """Return whether the user has decided on the share."""
    return any(os.environ.get(name) for name in (VARIABLE, OLD_VARIABLE))


def share() -> float:
    """Return the share that jax takes, or has taken if the variables have not changed since."""
    text = os.environ.get(VARIABLE) or os.environ.get(OLD_VARIABLE)
    return float(text) if text else DEFAULT


def take_most() -> None:
    """Have jax take nearly all of a GPU, unless the user has decided. An entry point whose process
    only serves calls this before jax first uses a device; later it has no effect.
    """
    if not is_set():
        os.environ[VARIABLE] = str(SERVING)


def how_to_raise() -> str:
    """Return what a user does to give jax, and so the pool, more of a GPU."""
    return f"set {VARIABLE}={SERVING} in the environment before jax starts: it is {share():g} now"
