"""Which settings of a run can change an answer, and why each of the others cannot.

A run resumes an output only if every judged setting is what it was (manifest.py). A setting is
judged unless it is listed here with the reason why it need not be: one that is added later is
judged until somebody writes that reason, and a test fails until it is in one of the two lists.

A setting can change an answer if it changes what is computed, or whether a line is refused. It
cannot if it only changes which rows share a step, where a step runs, or in which order it adds:
then tokens are equal in float32, which the tests hold, and in bf16 a near tie may turn, as it may
with any other batch.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jpaged.config import EngineConfig

_SAME_TOKENS = "decides which rows and tokens share a step; tokens are those of any other batch"
_DEVICES = "decides which devices compute; sums are added in another order"
_POOL = "sizes the KV pool; a prompt that does not fit is an error line, see --retry-failed"
_TABLES = "sizes the tables of adapters; one that does not fit ends the run before its first line"
_OUTSIDE = "decides what the run reports beside its answers"
_ENDING = "decides when a run ends, not what a line is answered"

JUDGED_ENGINE = frozenset(
    {
        "attention",
        "deterministic",
        "dtype",
        "kv_cache_dtype",
        "max_logit_bias",
        "max_logprobs",
        "max_model_len",
        "max_n",
        "max_stop_ids",
        "quantization",
        "quantized_activations",
        "strict",
        "structured_output",
    }
)
NOT_JUDGED_ENGINE: Mapping[str, str] = {
    "block_size": _POOL,
    "compilation_cache_dir": "keeps compiled steps between processes",
    "data_parallel_size": _DEVICES,
    "decode_steps": "decides how often the host looks; the device draws the same tokens",
    "enable_prefix_caching": _SAME_TOKENS,
    "lora_extra": _TABLES,
    "max_lora_rank": _TABLES,
    "max_loras": _TABLES,
    "max_num_batched_tokens": _SAME_TOKENS,
    "max_num_seqs": _SAME_TOKENS,
    "memory_utilization": _POOL,
    "mixed": _SAME_TOKENS,
    "num_blocks": _POOL,
    "num_states": _POOL,
    "peer_timeout_s": "decides when a silent process ends the run",
    "separate_draw": "compiles the model and the draw apart; they draw the same tokens",
    "seq_buckets": _SAME_TOKENS,
    "speculative": "drafts are verified: tokens are those without them, whatever model drafts",
    "swap_min_tokens": "decides whether KV is kept or computed again; the values are the same",
    "swap_space_gib": "decides whether KV is kept or computed again; the values are the same",
    "tensor_axis": _DEVICES,
    "tensor_parallel_size": _DEVICES,
    "token_buckets": _SAME_TOKENS,
}

# Flags of serve_batch beside the engine's: those that stand in the manifest's `run` by their value,
# those that stand in it by what they lead to, and those that need not.
JUDGED_FLAGS = frozenset(
    {
        "error_style",
        "format",
        "ignore_unknown",
        "max_line_bytes",
        "max_tokens",
        "seed",
        "temperature",
        "top_p",
    }
)
JUDGED_BY_CONTENT: Mapping[str, str] = {
    "adapter": "adapters: names, and size and digest of every file",
    "columns": "input: the columns that are read",
    "input": "input: size and digest, or the fingerprint of a data set",
    "model": "model: size and digest of every file, the tokenizer's and the template's too",
    "shard": "shard",
    "split": "input: the split that is read",
}
NOT_JUDGED_FLAGS: Mapping[str, str] = {
    "check": "runs nothing",
    "config": "each flag of the file is judged as if it were given",
    "coordinator": _DEVICES,
    "existing": "decides what happens to an output that is there",
    "grace": _ENDING,
    "help": "runs nothing",
    "max_error_rate": _ENDING,
    "metrics_host": _OUTSIDE,
    "metrics_port": _OUTSIDE,
    "num_processes": _DEVICES,
    "ordered": "decides the order of rows, which a resumed run puts right",
    "output": "the file that the manifest lies beside",
    "process_id": _DEVICES,
    "rates": "runs nothing",
    "ray": _DEVICES,
    "replica_hosts": _DEVICES,
    "replica_resources": _DEVICES,
    "replica_retries": "a line that lost its engines is an error line, see --retry-failed",
    "replicas": _DEVICES,
    "report": _OUTSIDE,
    "retry_failed": "decides which lines are run again",
    "summary": _OUTSIDE,
    "window": _SAME_TOKENS,
}


def judged_engine(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of EngineConfig that can change an answer, by name.

    settings: the fields that were set. A field that is left at its default, or set to it, is None:
    an output that was begun before a field existed can then be resumed.
    """
    judged = {}
    for name in (field.name for field in dataclasses.fields(EngineConfig)):
        if name not in NOT_JUDGED_ENGINE:
            value = settings.get(name)
            judged[name] = None if value == getattr(EngineConfig, name) else value
    return judged


def judged_flags(names: Iterable[str]) -> list[str]:
    """Return those of the flags that are judged by their value. names: of all flags, the engine's
    not among them.
    """
    return sorted(set(names) - set(JUDGED_BY_CONTENT) - set(NOT_JUDGED_FLAGS))


def not_judged() -> list[str]:
    """Return every setting that a manifest leaves out: when one of them is judged later, outputs
    that were begun without it cannot be resumed.
    """
    return sorted({*NOT_JUDGED_ENGINE, *NOT_JUDGED_FLAGS})
