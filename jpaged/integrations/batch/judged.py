"""Which settings of a run can change an answer, and why each of the others cannot.

A run resumes an output only if every judged setting is what it was (manifest.py). A setting is
judged unless there is a reason why it need not be, which for the engine's stands beside the field
(`same_answers` in config.py): one that is added later is judged until somebody writes that reason.

A setting can change an answer if it changes what is computed, or whether a line is refused. It
cannot if it only changes which rows share a step, where a step runs, or in which order it adds:
then tokens are equal in float32, which the tests hold, and in bf16 a near tie may turn, as it may
with any other batch.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jpaged.config import OTHER_DEVICES, SAME_TOKENS, EngineConfig

_OUTSIDE = "decides what the run reports beside its answers"
_IMAGES = "decides which images are read; another is an error line, see --retry-failed"
_ENDING = "decides when a run ends, not what a line is answered"

_REASONS: Mapping[str, str | None] = {
    field.name: field.metadata["same_answers"] for field in dataclasses.fields(EngineConfig)
}
JUDGED_ENGINE = frozenset(name for name, reason in _REASONS.items() if reason is None)
NOT_JUDGED_ENGINE: Mapping[str, str] = {
    name: reason for name, reason in _REASONS.items() if reason is not None
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
    "coordinator": OTHER_DEVICES,
    "existing": "decides what happens to an output that is there",
    "grace": _ENDING,
    "help": "runs nothing",
    "image_hosts": _IMAGES,
    "image_paths": _IMAGES,
    "max_error_rate": _ENDING,
    "metrics_host": _OUTSIDE,
    "metrics_port": _OUTSIDE,
    "num_processes": OTHER_DEVICES,
    "ordered": "decides the order of rows, which a resumed run puts right",
    "output": "the file that the manifest lies beside",
    "process_id": OTHER_DEVICES,
    "rates": "runs nothing",
    "ray": OTHER_DEVICES,
    "replica_hosts": OTHER_DEVICES,
    "replica_resources": OTHER_DEVICES,
    "replica_retries": "a line that lost its engines is an error line, see --retry-failed",
    "replicas": OTHER_DEVICES,
    "report": _OUTSIDE,
    "retry_failed": "decides which lines are run again",
    "summary": _OUTSIDE,
    "window": SAME_TOKENS,
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
