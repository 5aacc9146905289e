"""The experts of a mixture by the C++ kernels of the CPU: what is special to them beside
test_experts.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_cpu import experts, library
from kernels_pallas.experts.interface import Shapes
from tests.kernels.test_experts import GLU, exact, make

pytestmark = pytest.mark.skipif(
    library.unavailable() is not None, reason=f"the CPU kernels: {library.unavailable()}"
)

run = functools.partial(jax.jit, static_argnames="glu")(experts.experts)


# Tokens, experts, choices: one of everything, padding, experts of more tokens than are few.
@pytest.mark.parametrize(
    ("T", "X", "A"), [(1, 4, 2), (8, 6, 3), (40, 4, 1), (24, 3, 3), (300, 3, 2)], ids=str
)
def test_it_is_the_loop(T: int, X: int, A: int) -> None:
    """Within the rounding of what goes down to bf16."""
    args = make(T, X, A, jnp.bfloat16, bias=A != 1)
    found, wanted = run(*args, GLU), exact(*args)
    assert found.dtype == jnp.float32 and found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 0.004 * np.abs(wanted).max()
    assert T < 3 or not np.asarray(found)[-1].any()


@pytest.mark.parametrize("expert", [0, 4])
def test_no_token_is_dropped(expert: int) -> None:
    x, chosen, weight, weights = make(150, 5, 1, jnp.bfloat16, bias=False)
    args = (x, jnp.full_like(chosen, expert), weight, weights)
    wanted = exact(*args)
    assert np.abs(run(*args, GLU) - wanted).max() < 0.004 * np.abs(wanted).max()


def test_it_reads_drawn_experts_alone() -> None:
    x, _, weight, weights = make(8, 6, 2, jnp.bfloat16, bias=False)
    chosen = jnp.tile(jnp.asarray([[1, 4]], jnp.int32), (8, 1))
    drawn = jnp.zeros(6, bool).at[jnp.asarray([1, 4])].set(True)
    broken = jax.tree.map(
        lambda w: jnp.where(drawn.reshape((6,) + (1,) * (w.ndim - 1)), w, jnp.nan), weights
    )
    found = run(x, chosen, weight, broken, GLU)
    np.testing.assert_array_equal(found, run(x, chosen, weight, weights, GLU))


def test_a_rows_bits_do_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any batch, of few tokens an expert or many, and computed a few pairs at a time."""
    x, chosen, weight, weights = make(290, 3, 2, jnp.bfloat16)
    whole = np.asarray(run(x, chosen, weight, weights, GLU))
    for rows in (slice(0, 1), slice(20, 44), slice(100, 287)):
        part = run(x[rows], chosen[rows], weight[rows], weights, GLU)
        np.testing.assert_array_equal(part, whole[rows])
    monkeypatch.setattr(experts, "MOST_PAIRS", 50)
    found = jax.jit(functools.partial(experts.experts, glu=GLU))(x, chosen, weight, weights)
    np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float32"}, "dtype float32: only bfloat16"),
        ({"hidden_size": 1000}, "hidden_size 1000: only multiples of 32"),
        ({"expert_size": 48}, "expert_size 48: only multiples of 32"),
    ],
)
def test_what_cannot_run_says_why(change: dict[str, Any], said: str) -> None:
    shapes = Shapes(dtype="bfloat16", hidden_size=64, expert_size=32)
    assert experts.unsupported(shapes, None) is None
    assert experts.unsupported(dataclasses.replace(shapes, **change), None) == said
