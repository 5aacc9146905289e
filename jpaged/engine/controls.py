"""CONTROLS: the table of numbers that each row of a draw has; a new one is a line of it, a field of
runtime/sampler.py's Controls or FullControls with its name, and the arithmetic there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jpaged.engine.sequence import Sequence
from jpaged.sampling_params import LOGPROBS_MODES

INT32_MAX = int(np.iinfo(np.int32).max)


class Control(NamedTuple):
    """A column of int32, packed once a request and then copied row by row.

    dtype: what its 32 bits are. read: its value for a sequence.
    """

    name: str
    dtype: Any
    read: Callable[[Sequence], Any]


CONTROLS = (
    Control("temperature", np.float32, lambda seq: seq.sampling_params.divisor),
    Control("top_p", np.float32, lambda seq: seq.sampling_params.top_p),
    Control("min_p", np.float32, lambda seq: seq.sampling_params.min_p),
    Control("top_k", np.int32, lambda seq: min(max(seq.sampling_params.top_k, 0), INT32_MAX)),
    Control("key_hi", np.uint32, lambda seq: seq.key[0]),
    Control("key_lo", np.uint32, lambda seq: seq.key[1]),
    Control("sample_index", np.int32, lambda seq: seq.index),
    Control(
        "logprobs_mode",
        np.int32,
        lambda seq: LOGPROBS_MODES.index(seq.sampling_params.logprobs_mode),
    ),
    Control("presence", np.float32, lambda seq: seq.sampling_params.presence_penalty),
    Control("frequency", np.float32, lambda seq: seq.sampling_params.frequency_penalty),
    Control("repetition", np.float32, lambda seq: seq.sampling_params.repetition_penalty),
)


def pack_controls(seq: Sequence) -> list[int]:
    """The columns of one row."""
    return [int(np.asarray(c.read(seq), c.dtype).view(np.int32)) for c in CONTROLS]
