"""jpaged: LLM generation for JAX with a paged KV cache.

Shape suffixes in names, everywhere: T packed tokens, S rows (sequences), M blocks a row, L layers,
N pool blocks, P block size, H query heads, K KV heads, G = H/K, D head dim, E embed, F ffn, V
vocab, R device slots, X experts, A choices of a token, I width of an expert: `q_THD`,
`block_table_SM`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged.api import (
        beam_search,
        classify,
        embed,
        generate,
        hidden,
        logits,
        pool,
        release,
        score,
        warmup,
    )
    from jpaged.async_llm import AsyncLLM
    from jpaged.checkpoint import load_params, lora_from, params_from, save_params
    from jpaged.config import EngineConfig
    from jpaged.dialog import Dialog, Turn, dialog_arrays
    from jpaged.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        GenerationError,
        JpagedError,
        NotFiniteError,
        PeerError,
        RequestError,
        UnsupportedError,
    )
    from jpaged.images.limits import ImageLimits
    from jpaged.llm import LLM
    from jpaged.models.config import ModelConfig
    from jpaged.models.lora import Adapter, initial_lora, merged
    from jpaged.models.params import Params
    from jpaged.request.arrays import score_arrays, to_arrays
    from jpaged.request.embeddings import EmbeddingSpan
    from jpaged.request.image_arrays import ImageArrays, image_arrays
    from jpaged.request.outputs import (
        CompletionChunk,
        CompletionOutput,
        Logprob,
        RequestOutput,
        WeightSpan,
    )
    from jpaged.request.scores import Scores
    from jpaged.runtime.footprint import plan_memory
    from jpaged.runtime.memory import Limits, MemoryPlan
    from jpaged.runtime.processes import broadcast
    from jpaged.runtime.step_table import BucketReport
    from jpaged.sampling_params import SamplingParams
    from jpaged.session import Snapshot
    from jpaged.trainer import logprobs, masked_logprobs

__all__ = [
    "LLM",
    "Adapter",
    "AsyncLLM",
    "BucketReport",
    "CapacityError",
    "CheckpointError",
    "CompletionChunk",
    "CompletionOutput",
    "ConfigError",
    "Dialog",
    "EmbeddingSpan",
    "EngineConfig",
    "GenerationError",
    "ImageArrays",
    "ImageLimits",
    "JpagedError",
    "Limits",
    "Logprob",
    "MemoryPlan",
    "ModelConfig",
    "NotFiniteError",
    "Params",
    "PeerError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Scores",
    "Snapshot",
    "Turn",
    "UnsupportedError",
    "WeightSpan",
    "beam_search",
    "broadcast",
    "classify",
    "dialog_arrays",
    "embed",
    "generate",
    "hidden",
    "image_arrays",
    "initial_lora",
    "load_params",
    "logits",
    "logprobs",
    "lora_from",
    "masked_logprobs",
    "merged",
    "params_from",
    "plan_memory",
    "pool",
    "release",
    "save_params",
    "score",
    "score_arrays",
    "to_arrays",
    "warmup",
]

# Public names by their module, which is imported when a name of it is first used: so the command
# line answers --help without jax, and a program that reads a config needs no device.
_NAMES = {
    "jpaged.api": (
        "beam_search",
        "classify",
        "embed",
        "generate",
        "hidden",
        "logits",
        "pool",
        "release",
        "score",
        "warmup",
    ),
    "jpaged.async_llm": ("AsyncLLM",),
    "jpaged.checkpoint": (
        "load_params",
        "lora_from",
        "params_from",
        "save_params",
    ),
    "jpaged.config": ("EngineConfig",),
    "jpaged.dialog": (
        "Dialog",
        "Turn",
        "dialog_arrays",
    ),
    "jpaged.errors": (
        "CapacityError",
        "CheckpointError",
        "ConfigError",
        "GenerationError",
        "JpagedError",
        "NotFiniteError",
        "PeerError",
        "RequestError",
        "UnsupportedError",
    ),
    "jpaged.images.limits": ("ImageLimits",),
    "jpaged.llm": ("LLM",),
    "jpaged.models.config": ("ModelConfig",),
    "jpaged.models.lora": (
        "Adapter",
        "initial_lora",
        "merged",
    ),
    "jpaged.models.params": ("Params",),
    "jpaged.request.arrays": (
        "score_arrays",
        "to_arrays",
    ),
    "jpaged.request.embeddings": ("EmbeddingSpan",),
    "jpaged.request.image_arrays": (
        "ImageArrays",
        "image_arrays",
    ),
    "jpaged.request.outputs": (
        "CompletionChunk",
        "CompletionOutput",
        "Logprob",
        "RequestOutput",
        "WeightSpan",
    ),
    "jpaged.request.scores": ("Scores",),
    "jpaged.runtime.footprint": ("plan_memory",),
    "jpaged.runtime.memory": (
        "Limits",
        "MemoryPlan",
    ),
    "jpaged.runtime.processes": ("broadcast",),
    "jpaged.runtime.step_table": ("BucketReport",),
    "jpaged.sampling_params": ("SamplingParams",),
    "jpaged.session": ("Snapshot",),
    "jpaged.trainer": (
        "logprobs",
        "masked_logprobs",
    ),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Return a public name, or a module of this package, at its first use."""
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as e:
            if e.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
