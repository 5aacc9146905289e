"""Clients run as they would in their own programs: standard promotion in every thread, and their
warnings are theirs.

`make test-clients` has the packages; where one is missing, the tests of it are not collected.
"""

import importlib
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import jax
import pytest

# What each file imports of others.
MODULES = {
    "test_tunix.py": (
        "tunix.rl.grpo.grpo_learner",
        "tunix.rl.rl_cluster",
        "tunix.rl.rollout.vanilla_rollout",
        "tunix.models.qwen3.model",
        "qwix",
    ),
    "test_tunix_agentic.py": ("tunix.rl.agentic.agentic_grpo_learner", "qwix"),
    "test_tunix_models.py": ("tunix.models.gemma4.model", "tunix.models.llama3.model"),
    "test_tunix_sampler.py": ("tunix.experimental.rollout.sampler", "qwix"),
    "test_lm_eval.py": ("lm_eval.evaluator", "lm_eval.tasks"),
    "test_openai.py": ("openai", "starlette", "uvicorn"),
    "test_anthropic.py": ("anthropic", "starlette", "uvicorn"),
    "test_litellm.py": ("litellm", "starlette", "uvicorn"),
    "test_langchain.py": ("langchain_openai", "starlette", "uvicorn"),
    "test_instructor.py": ("instructor", "openai", "starlette", "uvicorn"),
    "test_llm_command.py": ("llm", "starlette", "uvicorn"),
    "test_local_completions.py": ("lm_eval.models.api_models", "aiohttp", "starlette", "uvicorn"),
}

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub when it is imported


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what these say when they are imported
    # tunix has `experimental` from 0.1.8 on; of the others the package says enough.
    collect_ignore = [
        file
        for file, (name, *_) in MODULES.items()
        if not _is_there(name if "experimental" in name else name.partition(".")[0])
    ]
SETTINGS = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what these say when they are imported
    for name in (
        name for file, names in MODULES.items() if file not in collect_ignore for name in names
    ):
        importlib.import_module(name)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """The clients have threads of their own, which a context manager's settings would not reach."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in SETTINGS.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
