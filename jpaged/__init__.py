"""jpaged: LLM generation for JAX with a paged KV cache.

Shape suffixes in names, everywhere: T packed tokens, S rows (sequences), M blocks a row, L layers,
N pool blocks, P block size, H query heads, K KV heads, G = H/K, D head dim, E embed, F ffn, V
vocab, R device slots, X experts, A choices of a token, I width of an expert: `q_THD`,
`block_table_SM`.
"""

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
    PeerError,
    RequestError,
    UnsupportedError,
)
from jpaged.llm import LLM
from jpaged.models.config import ModelConfig
from jpaged.models.lora import Adapter, initial_lora, merged
from jpaged.models.params import Params
from jpaged.request.arrays import score_arrays, to_arrays
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
    "EngineConfig",
    "GenerationError",
    "JpagedError",
    "Limits",
    "Logprob",
    "MemoryPlan",
    "ModelConfig",
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
