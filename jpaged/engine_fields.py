"""EngineFields: EngineConfig's fields as the keyword arguments that LLM takes, with their types."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

from jpaged.config import Quantization, Speculative
from jpaged.errors import ConfigError
from kernels_pallas.paged_attention import Name


class EngineFields(TypedDict, total=False):
    """For editors and type checkers; what each means and its default stands at EngineConfig."""

    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int | None
    num_states: int | None
    memory_utilization: float
    enable_prefix_caching: bool
    max_n: int
    swap_space_gib: float
    swap_min_tokens: int
    dtype: str | None
    quantization: Quantization | None
    quantized_activations: Literal["auto", "plain", "int8", "int16"]
    max_loras: int
    max_lora_rank: int
    lora_extra: tuple[Literal["embedding", "head", "experts"], ...]
    kv_cache_dtype: Literal["int8", "fp8"] | None
    attention: Literal["auto", Name]
    token_buckets: tuple[int, ...] | None
    seq_buckets: tuple[int, ...] | None
    decode_steps: int | None
    separate_draw: bool | None
    max_logprobs: int
    max_logit_bias: int
    max_stop_ids: int
    strict: bool
    structured_output: bool
    deterministic: bool | None
    speculative: Speculative | Mapping[str, Any] | None
    mixed: bool
    tensor_parallel_size: int | None
    data_parallel_size: int | None
    tensor_axis: str | tuple[str, ...] | None
    peer_timeout_s: float
    compilation_cache_dir: str | None


def check_fields(names: Iterable[str]) -> None:
    """ConfigError for the first name that is none of EngineConfig's, with the nearest that is."""
    known = list(EngineFields.__annotations__)
    if not (unknown := sorted(set(names) - set(known))):
        return
    near = difflib.get_close_matches(unknown[0], known, n=1)
    meant = f": did you mean {near[0]!r}?" if near else ";"
    raise ConfigError(
        f"{unknown[0]!r} is not a setting of LLM{meant} EngineConfig has {', '.join(known)}"
    )
