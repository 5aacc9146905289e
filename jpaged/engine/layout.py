"""Layout: where each input and output of a step lies in its packed int32 buffer. Packing fills
buffers by it on the host, the steps slice them by it on the device.

CONTROLS is the table of numbers that each row of a draw has; a new one is a line of it, a field of
runtime/sampler.py's Controls or FullControls with its name, and the arithmetic there.
"""

import functools
import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from jpaged.config import EngineConfig, has_head_adapters
from jpaged.engine.sequence import Sequence
from jpaged.engine.shapes import (
    DecodeShape,
    DraftShape,
    PrefillShape,
    ReplayShape,
    SampleShape,
    Shape,
)
from jpaged.sampling_params import LOGPROBS_MODES

INT32_MAX = int(np.iinfo(np.int32).max)


class Control(NamedTuple):
    """A column of int32, packed once a request and then copied row by row.

    dtype: what its 32 bits are. read: its value for a sequence.
    """

    name: str
    dtype: Any
    read: Callable[[Sequence], float]


def _asked(name: str) -> Callable[[Sequence], float]:
    """Return what reads a field of a sequence's SamplingParams."""
    return attrgetter(f"sampling_params.{name}")


CONTROLS = (
    Control("temperature", np.float32, _asked("divisor")),
    Control("top_p", np.float32, _asked("top_p")),
    Control("min_p", np.float32, _asked("min_p")),
    Control("top_k", np.int32, lambda seq: min(max(seq.sampling_params.top_k, 0), INT32_MAX)),
    Control("key_hi", np.uint32, lambda seq: seq.key[0]),
    Control("key_lo", np.uint32, lambda seq: seq.key[1]),
    Control("sample_index", np.int32, attrgetter("index")),
    Control(
        "logprobs_mode",
        np.int32,
        lambda seq: LOGPROBS_MODES.index(seq.sampling_params.logprobs_mode),
    ),
    Control("presence", np.float32, _asked("presence_penalty")),
    Control("frequency", np.float32, _asked("frequency_penalty")),
    Control("repetition", np.float32, _asked("repetition_penalty")),
    Control("sampling_mask", np.int32, _asked("sampling_mask")),
)


class Section(NamedTuple):
    """A part of a buffer. offset: of its first number."""

    offset: int
    shape: tuple[int, ...]


Layout = tuple[dict[str, Section], int]  # the sections of a buffer, and its length


@functools.lru_cache(maxsize=1024)  # asked for in each step
def input_sections(shape: Shape, config: EngineConfig) -> Layout:
    """Return where each input lies in the packed int32 buffer of a step.

    A prefill's buffer ends in that of the draw after it. That part has a fixed size, so the shapes
    of prefills and draws compile independently: the prefill hands it on, and so does a decode that
    leaves its draw to another step.

    logits_indices: places among the packed tokens after which a token is drawn. follows: 1 for a
    row whose last token is the one that its device row drew last. adapters: the slot of each row,
    max_loras where it has none; a draw has them where the head can have adapters. guesses: 1 for a
    row whose tokens may be wrong. A replay has the place of each of its tokens among those of the
    step before, the position of each row's first one, and by group the blocks that it reads and
    writes. scored: places among the packed tokens after which a token of the prompt is scored,
    num_scored of them; targets and candidates are the token itself and others, in the same order.
    routes: of each packed token the experts that it takes, a layer after the other, -1 where its
    router chooses.

    Where prompts may have embeddings, a prefill has of each packed token `embedded`, the row of
    their pool that takes its place or -1, `axes`, its positions on the three axes of a rope, and
    `ends`, the position after the image that it is of, else 0; and a decode has `offsets`, what the
    positions of each row on all axes are ahead of its index.
    """
    assert config.seq_buckets is not None
    rows, most = shape.rows, config.seq_buckets[-1]
    sections: dict[str, tuple[int, ...]]
    if isinstance(shape, SampleShape):
        sections = {"context_lens": (most,), **_row_sections(most, config, full=True)}
        if has_head_adapters(config):
            sections["adapters"] = (most,)
        return _lay_out(sections | {"follows": (most,)})
    if isinstance(shape, ReplayShape):
        sections = {"places": (shape.tokens,), "query_start_loc": (rows + 1,), "starts": (rows,)}
        blocks = (shape.tables, rows)
        return _lay_out(sections | {"read_blocks": blocks, "written_blocks": blocks})
    assert isinstance(shape, PrefillShape | DecodeShape | DraftShape)
    sections = {"tokens": (shape.tokens,), "context_lens": (rows,)}
    sections["block_tables"] = (shape.tables, rows, shape.blocks)
    if shape.loras:
        sections["adapters"] = (rows,)
    if config.max_embeddings and isinstance(shape, PrefillShape):
        sections |= {"embedded": (shape.tokens,), "axes": (3, shape.tokens)}
        sections["ends"] = (shape.tokens,)
    elif config.max_embeddings:
        sections["offsets"] = (rows,)
    if shape.sampler is not None:
        drawing = _row_sections(rows, config, full=shape.is_full)
        return _lay_out(sections | {"steps": (rows,), **drawing})
    _, size = input_sections(SampleShape(rows=most), config)
    if isinstance(shape, PrefillShape):
        sections |= {"query_start_loc": (rows + 1,), "logits_indices": (most,)}
        sections["device_rows"] = (rows,)
        if config.speculative is not None:
            sections["guesses"] = (rows,)
        if shape.scores:
            tokens = (shape.tokens,)
            sections |= {"scored": tokens, "num_scored": (1,), "targets": tokens}
            sections |= {"scoring": (rows, 2), "candidates": (shape.tokens, shape.candidates)}
        if shape.routed:
            sections["routes"] = (shape.tokens, shape.routed)
    else:
        sections["device_rows"] = (rows,)
    return _lay_out(sections | {"sample": (size,)})


def _row_sections(rows: int, config: EngineConfig, *, full: bool) -> dict[str, tuple[int, ...]]:
    """Return what drawing a token needs to know of its row. open_after: draws before which stop ids
    neither stop nor occur.
    """
    sections: dict[str, tuple[int, ...]] = {"device_rows": (rows,), "open_after": (rows,)}
    sections["controls"] = (rows, len(CONTROLS) + config.max_stop_ids)  # then EOS, stop_token_ids
    biases = {"bias_ids": (rows, config.max_logit_bias), "bias": (rows, config.max_logit_bias)}
    return sections | biases if full else sections


@functools.lru_cache(maxsize=1024)
def output_sections(shape: Shape, config: EngineConfig) -> Layout:
    """Return where each output lies in the int32 buffer that a step returns; it is empty for a
    prefill that scores nothing and a decode that leaves its draw to another step.

    num_drawn: tokens of each row that count, fewer than `steps` for a row that stopped. Scores of
    prompts have a row for each of the inputs' `scored`.
    """
    rows, top = shape.rows, config.max_logprobs
    sections: dict[str, tuple[int, ...]] = {}
    if shape.sampler is not None:
        steps = shape.steps if isinstance(shape, DecodeShape | DraftShape) else 1
        sections |= {"num_drawn": (rows,), "tokens": (steps, rows), "logprobs": (steps, rows)}
        if shape.is_full:
            sections |= {"ranks": (steps, rows)}
            sections |= {"top_ids": (steps, rows, top), "top_logprobs": (steps, rows, top)}
        if shape.is_full and (most := config.max_sampling_mask):
            sections |= {"kept_ids": (steps, rows, most), "kept_logprobs": (steps, rows)}
    if isinstance(shape, SampleShape) and shape.masked:
        sections |= {"allowed_logprobs": (1, rows)}
    if isinstance(shape, PrefillShape) and shape.scores:
        tokens, top = shape.tokens, shape.top or top
        sections |= {"prompt_logprobs": (tokens,), "prompt_ranks": (tokens,)}
        sections |= {"prompt_top_ids": (tokens, top), "prompt_top_logprobs": (tokens, top)}
        if shape.candidates:
            sections |= {"prompt_candidate_logprobs": (tokens, shape.candidates)}
        if shape.entropy:
            sections |= {"prompt_entropies": (tokens,)}
    return _lay_out(sections)


def is_float(name: str) -> bool:
    """Return whether an output's 32 bits are a float32."""
    return name.endswith(("logprobs", "entropies"))


def _lay_out(shapes: dict[str, tuple[int, ...]]) -> Layout:
    """Return sections of these shapes, one after the other."""
    sections, offset = {}, 0
    for name, shape in shapes.items():
        sections[name] = Section(offset, shape)
        offset += math.prod(shape)
    return sections, offset
