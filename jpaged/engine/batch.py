"""Plan -> Batch: one int32 buffer padded to a Bucket, and back: the step's one int32 buffer -> StepResult.

The layout of both buffers is defined here once (`input_sections`, `output_sections`); the runner slices by it on the
device. Floats and uint32 travel as their bits. numpy ends here; jax begins at the runner.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.sampling_params import LOGPROBS_MODES, SamplingParams
from jpaged.engine.sequence import Sequence

if TYPE_CHECKING:
    from jpaged.engine.scheduler import Plan, PlanEntry

# Static controls of a row, one int32 column each: (name, dtype). Packed once a request, then copied row by row.
CONTROLS = (
    ("temperature", np.float32), ("top_p", np.float32), ("min_p", np.float32), ("top_k", np.int32),
    ("key_hi", np.uint32), ("key_lo", np.uint32), ("sample_index", np.int32), ("mode", np.int32),
    ("presence", np.float32), ("frequency", np.float32), ("repetition", np.float32),
)  # fmt: skip
ON_DEVICE = -1  # in a decode step's tokens: the last one that the row's slot drew
PAD_TOKEN = np.int32(2**31 - 1)  # in id lists: past any vocabulary, so a scatter drops it

Features = Literal["plain", "full", "prompt"]  # prompt is full and scores the prompt's tokens too


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """The static shape of a step: all that can make it compile again.

    tokens: T, packed tokens (prefill), equal to rows in decode. rows: S. blocks: M, width of the block table. steps: of
    decode, a dispatch.
    """

    phase: Literal["prefill", "decode"]
    tokens: int
    rows: int
    blocks: int
    steps: int = 1
    features: Features = "plain"


class Section(NamedTuple):
    offset: int
    shape: tuple[int, ...]


def input_sections(bucket: Bucket, config: EngineConfig) -> tuple[dict[str, Section], int]:
    """Where each input lies in the packed int32 buffer of a bucket, and the buffer's length."""
    rows, full = bucket.rows, bucket.features != "plain"
    shapes: dict[str, tuple[int, ...]] = {"tokens": (bucket.tokens,)}
    if bucket.phase == "prefill":
        shapes["query_starts"] = (rows + 1,)
    else:
        shapes["copies"] = (rows, 2)  # a row writes one block, so it needs one copy at most
    if bucket.features == "prompt":
        shapes["targets"] = (bucket.tokens,)
    shapes |= {"context_lens": (rows,), "slots": (rows,), "samples": (rows,), "controls": (rows, len(CONTROLS))}
    shapes["block_table"] = (rows, bucket.blocks)
    if full:
        shapes |= {"bias_ids": (rows, config.max_logit_bias), "bias": (rows, config.max_logit_bias)}
        shapes["ban_ids"] = (rows, config.max_stop_ids)
    return _lay_out(shapes)


def output_sections(bucket: Bucket, config: EngineConfig) -> tuple[dict[str, Section], int]:
    """Where each output lies in the int32 buffer that a step of this bucket returns, and the buffer's length."""
    rows, top = bucket.rows, config.max_logprobs
    shapes: dict[str, tuple[int, ...]] = {"tokens": (rows,), "logprobs": (rows,)}
    if bucket.features != "plain":
        shapes |= {"ranks": (rows,), "top_ids": (rows, top), "top_logprobs": (rows, top)}
    if bucket.features == "prompt":
        tokens = bucket.tokens
        shapes |= {"prompt_logprobs": (tokens,), "prompt_ranks": (tokens,)}
        shapes |= {"prompt_top_ids": (tokens, top), "prompt_top_logprobs": (tokens, top)}
    return _lay_out(shapes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """What one dispatch uploads: `packed` (int32 [n], laid out by input_sections), and slots whose counts must be set.

    count_rows: (slot, token ids, prompt length) of rows with penalties that were just admitted.
    """

    bucket: Bucket
    packed: np.ndarray
    count_rows: tuple[tuple[int, list[int], int], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one dispatch computed, by row of its plan; top and prompt arrays are None unless the bucket has them."""

    tokens: list[int]
    logprobs: list[float]
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    prompt_logprobs: np.ndarray | None = None
    prompt_ranks: np.ndarray | None = None
    prompt_top_ids: np.ndarray | None = None
    prompt_top_logprobs: np.ndarray | None = None

    def top(self, row: int, count: int) -> list[tuple[int, float, int]]:
        """(token, logprob, rank) of a row's sampled token, then of its `count` most likely ones."""
        assert self.ranks is not None and self.top_ids is not None and self.top_logprobs is not None
        own = (self.tokens[row], self.logprobs[row], int(self.ranks[row]))
        return [own, *_ranked(self.top_ids[row], self.top_logprobs[row], count)]

    def prompt_rows(self, plan: "Plan", row: int) -> list[list[tuple[int, float, int]]]:
        """For each token of a row's chunk, (token, logprob, rank) of the next prompt token, then of the most likely."""
        assert self.prompt_logprobs is not None and self.prompt_ranks is not None
        assert self.prompt_top_ids is not None and self.prompt_top_logprobs is not None
        entry = plan.entries[row]
        first = sum(e.num_tokens for e in plan.entries[:row])
        count = entry.seq.params.prompt_logprobs or 0
        scored = []
        for i in range(min(entry.num_tokens, entry.seq.prompt_len - 1 - entry.start)):
            t = first + i
            own = (entry.seq.token_ids[entry.start + i + 1], float(self.prompt_logprobs[t]), int(self.prompt_ranks[t]))
            scored.append([own, *_ranked(self.prompt_top_ids[t], self.prompt_top_logprobs[t], count)])
        return scored


def choose_bucket(plan: "Plan", config: EngineConfig) -> Bucket:
    """The smallest shape of the table that holds a plan."""
    assert config.token_buckets is not None and config.seq_buckets is not None
    rows = _ceil(config.seq_buckets, len(plan.entries))
    params = [e.seq.params for e in plan.entries]
    features: Features = "plain" if all(p.is_plain for p in params) else "full"
    if plan.phase == "decode":
        return Bucket(phase="decode", tokens=rows, rows=rows, blocks=config.max_blocks_per_seq, features=features)
    if any(p.prompt_logprobs is not None for p in params):
        features = "prompt"
    # Forks are rows without a token: as many tokens as rows keep the table of buckets small.
    tokens = _ceil(config.token_buckets, min(max(plan.num_tokens, len(plan.entries)), config.token_buckets[-1]))
    return Bucket(phase="prefill", tokens=tokens, rows=rows, blocks=config.max_blocks_per_seq, features=features)


def bucket_table(config: EngineConfig) -> Iterable[Bucket]:
    """Every bucket that choose_bucket can return for a resolved config."""
    assert config.token_buckets is not None and config.seq_buckets is not None
    blocks = config.max_blocks_per_seq
    for rows in config.seq_buckets:
        for features in ("plain", "full"):
            yield Bucket(phase="decode", tokens=rows, rows=rows, blocks=blocks, features=features)
        for tokens in config.token_buckets:
            # A plan of no more rows than the next smaller bucket takes that one; one of more has as many tokens.
            smaller = max((r for r in config.seq_buckets if r < rows), default=0)
            if tokens > smaller or tokens == config.token_buckets[-1]:
                for features in ("plain", "full", "prompt"):
                    yield Bucket(phase="prefill", tokens=tokens, rows=rows, blocks=blocks, features=features)


def padded_blocks(count: int) -> int:
    """How many blocks a move between pool and host is compiled for, and takes on the host."""
    return 1 << (count - 1).bit_length()


def pack(plan: "Plan", config: EngineConfig) -> Batch:
    """Lay a plan out in the one buffer of its bucket. Padding rows have no tokens, no context and no slot.

    A pair of `copies` whose blocks are the same ends the list.
    """
    bucket = choose_bucket(plan, config)
    sections, size = input_sections(bucket, config)
    packed = np.zeros(size, np.int32)
    view = {name: packed[s.offset : s.offset + math.prod(s.shape)].reshape(s.shape) for name, s in sections.items()}
    rows = len(plan.entries)
    view["slots"][rows:] = config.max_num_seqs  # past the end: dropped
    table, controls = view["block_table"], view["controls"]
    for row, entry in enumerate(plan.entries):
        seq = entry.seq
        blocks = np.frombuffer(seq.block_table, np.int32)
        table[row, : len(blocks)] = blocks
        controls[row] = seq.controls if seq.controls is not None else _pack_controls(seq)
    view["context_lens"][:rows] = [e.end for e in plan.entries]
    view["slots"][:rows] = [e.seq.slot for e in plan.entries]
    view["samples"][:rows] = [e.samples for e in plan.entries]
    if plan.phase == "prefill":
        _pack_tokens(view, plan)
    else:  # a token that is still in flight is known to the device alone
        known = (e.seq.token_ids[e.start] if e.start < len(e.seq.token_ids) else ON_DEVICE for e in plan.entries)
        view["tokens"][:rows] = list(known)
        view["copies"][: len(plan.copies)] = plan.copies or np.zeros((0, 2), np.int32)
    if bucket.features != "plain":
        view["bias_ids"][:] = view["ban_ids"][:] = PAD_TOKEN
        for row, entry in enumerate(plan.entries):
            _pack_full(view, row, entry)
    admitted = (e for e in plan.entries if e.first and e.seq.params.has_penalties)
    counts = tuple((e.seq.slot, list(e.seq.token_ids), e.seq.prompt_len) for e in admitted)
    return Batch(bucket=bucket, packed=packed, count_rows=counts)


def unpack_result(packed: np.ndarray, bucket: Bucket, config: EngineConfig, rows: int) -> StepResult:
    """The step's one output buffer, taken apart; `rows` is the number of real rows."""
    sections, _ = output_sections(bucket, config)
    views: dict[str, np.ndarray] = {}
    for name, section in sections.items():
        view = packed[section.offset : section.offset + math.prod(section.shape)].reshape(section.shape)
        views[name] = view.view(np.float32) if name.endswith("logprobs") else view
    tokens, logprobs = views.pop("tokens"), views.pop("logprobs")
    return StepResult(tokens=tokens[:rows].tolist(), logprobs=logprobs[:rows].tolist(), **views)


def _pack_tokens(view: dict[str, np.ndarray], plan: "Plan") -> None:
    start, starts = 0, view["query_starts"]
    for row, entry in enumerate(plan.entries):
        starts[row] = start
        view["tokens"][start : start + entry.num_tokens] = entry.seq.token_ids[entry.start : entry.end]
        if "targets" in view:  # what each position should predict; past the known tokens it is never read
            following = entry.seq.token_ids[entry.start + 1 : entry.end + 1]
            view["targets"][start : start + len(following)] = following
        start += entry.num_tokens
    starts[len(plan.entries) :] = start


def _pack_controls(seq: Sequence) -> np.ndarray:
    """A row of CONTROLS, kept in the sequence."""
    p: SamplingParams = seq.params
    values = (
        p.temperature, p.top_p, p.min_p, min(max(p.top_k, 0), PAD_TOKEN), seq.key[0], seq.key[1], seq.index,
        LOGPROBS_MODES.index(p.logprobs_mode), p.presence_penalty, p.frequency_penalty, p.repetition_penalty,
    )  # fmt: skip
    columns = [np.asarray(v, dtype).view(np.int32) for (_, dtype), v in zip(CONTROLS, values, strict=True)]
    seq.controls = np.stack(columns)
    return seq.controls


def _pack_full(view: dict[str, np.ndarray], row: int, entry: "PlanEntry") -> None:
    seq = entry.seq
    if bias := seq.params.logit_bias:
        view["bias_ids"][row, : len(bias)] = list(bias)
        view["bias"].view(np.float32)[row, : len(bias)] = list(bias.values())
    if entry.end - seq.prompt_len < seq.params.min_tokens:  # so many tokens of output before the one drawn now
        banned = sorted(seq.eos_ids | seq.stop_ids)
        view["ban_ids"][row, : len(banned)] = banned


def _ranked(ids: np.ndarray, logprobs: np.ndarray, count: int) -> list[tuple[int, float, int]]:
    return [(int(i), float(p), rank + 1) for rank, (i, p) in enumerate(zip(ids[:count], logprobs[:count], strict=True))]


def _lay_out(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Section], int]:
    sections, offset = {}, 0
    for name, shape in shapes.items():
        sections[name] = Section(offset, shape)
        offset += math.prod(shape)
    return sections, offset


def _ceil(sizes: tuple[int, ...], value: int) -> int:
    return sizes[bisect.bisect_left(sizes, value)]
