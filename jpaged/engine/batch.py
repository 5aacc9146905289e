"""Plan -> Batch: one int32 buffer padded to its Buckets, and back: what the step returns -> StepResult.

The layout of the buffers is defined here once (`input_sections`, `output_sections`); the runner slices by it on the
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
TOKENS_A_ROW = 64  # of a prefill with the smaller of its two numbers of rows

Phase = Literal["prefill", "sample", "decode"]
Features = Literal["plain", "full", "prompt"]


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """The static shape of a compiled step: all that can make it compile again.

    prefill: tokens T, packed, of `rows` rows; features "prompt" scores the prompt's tokens too. sample: draws one token
    for each of `rows` rows of a prefill. decode: one token a row, `steps` times, drawing included; tokens equal rows.
    With deterministic=True there is no decode: its rows go through the one prefill shape that all tokens go through.
    blocks: M, width of the block table. features "full" has penalties, biases, bans and top lists.
    """

    phase: Phase
    tokens: int
    rows: int
    blocks: int = 0
    steps: int = 1
    features: Features = "plain"

    @property
    def is_full(self) -> bool:
        return self.features == "full"


class Section(NamedTuple):
    offset: int
    shape: tuple[int, ...]


def input_sections(bucket: Bucket, config: EngineConfig) -> tuple[dict[str, Section], int]:
    """Where each input lies in the packed int32 buffer of a bucket, and the buffer's length.

    A prefill's buffer ends in that of the "sample" step after it, which is of one size, so that neither shape
    multiplies the other's: the prefill hands it on.
    """
    assert config.seq_buckets is not None
    rows, most = bucket.rows, config.seq_buckets[-1]
    if bucket.phase == "sample":
        return _lay_out({"context_lens": (most,), **_row_shapes(most, config, full=True)})
    shapes: dict[str, tuple[int, ...]] = {"tokens": (bucket.tokens,), "context_lens": (rows,)}
    shapes["block_table"] = (rows, bucket.blocks)
    if bucket.phase == "decode" or config.deterministic:
        shapes["copies"] = (rows, 2)  # a row writes one block, so it needs one copy at most
    if bucket.phase == "decode":
        return _lay_out(shapes | {"steps": (rows,), **_row_shapes(rows, config, full=bucket.is_full)})
    shapes |= {"query_starts": (rows + 1,), "drawn_at": (most,)}
    if bucket.features == "prompt":
        shapes |= {"targets": (bucket.tokens,), "scoring": (rows, 2)}
    _, size = input_sections(Bucket(phase="sample", tokens=most, rows=most), config)
    return _lay_out(shapes | {"sample": (size,)})


def _row_shapes(rows: int, config: EngineConfig, *, full: bool) -> dict[str, tuple[int, ...]]:
    """What drawing a token needs to know of its row. open_after: draws before which stop ids neither stop nor occur."""
    shapes: dict[str, tuple[int, ...]] = {"slots": (rows,), "open_after": (rows,)}
    shapes["controls"] = (rows, len(CONTROLS) + config.max_stop_ids)  # then EOS and stop_token_ids
    biases = {"bias_ids": (rows, config.max_logit_bias), "bias": (rows, config.max_logit_bias)}
    return shapes | biases if full else shapes


def output_sections(bucket: Bucket, config: EngineConfig) -> tuple[dict[str, Section], int]:
    """Where each output lies in the int32 buffer that a step of this bucket returns, and the buffer's length.

    num_drawn: tokens of each row that count, fewer than `steps` for a row that stopped. Of a prefill: "prompt" alone.
    """
    rows, steps, top = bucket.rows, bucket.steps, config.max_logprobs
    shapes: dict[str, tuple[int, ...]] = {}
    if bucket.phase != "prefill":
        shapes |= {"num_drawn": (rows,), "tokens": (steps, rows), "logprobs": (steps, rows)}
    if bucket.is_full:
        shapes |= {"ranks": (steps, rows), "top_ids": (steps, rows, top), "top_logprobs": (steps, rows, top)}
    if bucket.features == "prompt":
        tokens = bucket.tokens
        shapes |= {"prompt_logprobs": (tokens,), "prompt_ranks": (tokens,)}
        shapes |= {"prompt_top_ids": (tokens, top), "prompt_top_logprobs": (tokens, top)}
    return _lay_out(shapes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """What one step uploads: `packed` (int32 [n], laid out by input_sections), and slots whose counts must be set.

    bucket: of a prefill or decode. sample: of the draw after a prefill, None where no row draws. num_tokens, num_rows:
    without padding, num_rows of those that draw. steps: that a decode runs at most.
    count_rows: (slot, token ids, prompt length) of rows with penalties that were just admitted.
    """

    bucket: Bucket
    sample: Bucket | None
    packed: np.ndarray
    num_tokens: int
    num_rows: int
    steps: int = 1
    count_rows: tuple[tuple[int, list[int], int], ...] = ()

    @property
    def drawing(self) -> Bucket | None:
        """The bucket of the step that draws tokens."""
        return self.bucket if self.bucket.phase == "decode" else self.sample

    @property
    def padded_tokens(self) -> int:
        return self.bucket.tokens * self.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step computed. Rows are those that draw, in the order of the plan; arrays that a bucket lacks are None.

    tokens, logprobs: a list a row, of `steps` entries, of which the first num_drawn[row] count.
    """

    num_drawn: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    prompt_logprobs: np.ndarray | None = None
    prompt_ranks: np.ndarray | None = None
    prompt_top_ids: np.ndarray | None = None
    prompt_top_logprobs: np.ndarray | None = None

    def top(self, row: int, count: int, step: int = 0) -> list[tuple[int, float, int]]:
        """(token, logprob, rank) of a row's sampled token, then of its `count` most likely ones."""
        assert self.ranks is not None and self.top_ids is not None and self.top_logprobs is not None
        own = (self.tokens[row][step], self.logprobs[row][step], int(self.ranks[step, row]))
        return [own, *_ranked(self.top_ids[step, row], self.top_logprobs[step, row], count)]

    def prompt_rows(self, plan: "Plan", row: int) -> list[list[tuple[int, float, int]]]:
        """For each token of a plan's row, (token, logprob, rank) of the next prompt token, then of the most likely."""
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


def choose_buckets(plan: "Plan", config: EngineConfig) -> tuple[Bucket, Bucket | None]:
    """The smallest shapes of the table that hold a plan: of its prefill and the draw after it, or of its decode."""
    assert config.token_buckets is not None and config.seq_buckets is not None and config.decode_steps is not None
    drawing = [e.seq.params for e in plan.entries if e.draws]
    features: Features = "plain" if all(p.is_plain for p in drawing) else "full"
    rows, blocks = _ceil(config.seq_buckets, len(drawing)), config.max_blocks_per_seq
    if plan.phase == "decode" and not config.deterministic:
        steps = config.decode_steps
        return Bucket(phase="decode", tokens=rows, rows=rows, blocks=blocks, steps=steps, features=features), None
    sample = Bucket(phase="sample", tokens=rows, rows=rows, features=features) if drawing else None
    scores = any(e.seq.params.prompt_logprobs is not None for e in plan.entries)
    tokens = _ceil(config.token_buckets, plan.num_tokens)
    computed = sum(e.num_tokens > 0 for e in plan.entries)  # forks are rows of the draw alone
    rows = next(rows for rows in _prefill_rows(tokens, config) if rows >= computed)
    kind: Features = "prompt" if scores else "plain"
    return Bucket(phase="prefill", tokens=tokens, rows=rows, blocks=blocks, features=kind), sample


def bucket_table(config: EngineConfig, *, tokens: int | None = None, rows: int | None = None) -> Iterable[Bucket]:
    """Every bucket that choose_buckets can return for a resolved config, those of the smallest shapes first.

    tokens, rows: of prompts, and of completions, that there are at most; None: as many as the config allows.
    """
    assert config.token_buckets is not None and config.seq_buckets is not None and config.decode_steps is not None
    blocks, steps = config.max_blocks_per_seq, config.decode_steps
    rows = config.max_num_seqs if rows is None else min(rows, config.max_num_seqs)
    tokens = config.max_num_batched_tokens if tokens is None else min(tokens, config.max_num_batched_tokens)
    kinds: tuple[Features, ...] = ("plain", "full")
    for S in _up_to(config.seq_buckets, rows):
        for features in kinds:
            yield Bucket(phase="sample", tokens=S, rows=S, features=features)
            if not config.deterministic:
                yield Bucket(phase="decode", tokens=S, rows=S, blocks=blocks, steps=steps, features=features)
    kinds = ("plain", "prompt")
    for T in _up_to(config.token_buckets, tokens):
        for S in _up_to(_prefill_rows(T, config), min(rows, T)):
            for features in kinds:
                yield Bucket(phase="prefill", tokens=T, rows=S, blocks=blocks, features=features)


def _prefill_rows(tokens: int, config: EngineConfig) -> tuple[int, ...]:
    """The two numbers of rows that a prefill is compiled for: few long ones, and as many as there can be."""
    assert config.seq_buckets is not None
    most = config.seq_buckets[-1]
    return tuple(dict.fromkeys(_ceil(config.seq_buckets, min(n, most)) for n in (tokens // TOKENS_A_ROW, tokens)))


def padded_blocks(count: int) -> int:
    """How many blocks a move between pool and host is compiled for, and takes on the host."""
    return 1 << (count - 1).bit_length()


def pack(plan: "Plan", config: EngineConfig) -> Batch:
    """Lay a plan out in the one buffer of its bucket. Padding rows have no tokens, no context and no slot.

    A pair of `copies` whose blocks are the same ends the list.
    """
    bucket, sample = choose_buckets(plan, config)
    packed, view = _views(bucket, config)
    computed = [e for e in plan.entries if e.num_tokens]
    drawing = [e for e in plan.entries if e.draws]
    table = view["block_table"]
    for row, entry in enumerate(computed):
        blocks = np.frombuffer(entry.seq.block_table, np.int32)
        table[row, : len(blocks)] = blocks
    if "copies" in view:
        view["copies"][: len(plan.copies)] = plan.copies or np.zeros((0, 2), np.int32)
    if bucket.phase == "decode":
        rows = len(drawing)
        view["context_lens"][:rows] = [e.start + 1 for e in drawing]  # of the first step
        view["steps"][:rows] = [e.draws for e in drawing]
        # A token that is still in flight is known to the device alone.
        known = (e.seq.token_ids[e.start] if e.start < len(e.seq.token_ids) else ON_DEVICE for e in drawing)
        view["tokens"][:rows] = list(known)
        _pack_rows(view, drawing, config)
    else:
        view["context_lens"][: len(computed)] = [e.end for e in computed]
        _pack_tokens(view, plan)
        if sample is not None:
            _, rows_view = _views(sample, config, view["sample"])
            rows_view["context_lens"][: len(drawing)] = [e.end for e in drawing]
            _pack_rows(rows_view, drawing, config)
    admitted = (e for e in plan.entries if e.first and e.seq.params.has_penalties)
    counts = tuple((e.seq.slot, list(e.seq.token_ids), e.seq.prompt_len) for e in admitted)
    steps = max((e.draws for e in drawing), default=1)
    real = {"num_tokens": plan.num_tokens, "num_rows": len(drawing), "steps": steps}
    return Batch(bucket=bucket, sample=sample, packed=packed, count_rows=counts, **real)


def unpack_result(batch: Batch, config: EngineConfig, packed: Iterable[np.ndarray]) -> StepResult:
    """A step's output buffers, taken apart: of the step that drew, and of a prefill that scored its prompts."""
    buckets = [b for b in (batch.drawing, batch.bucket) if b is not None and output_sections(b, config)[1]]
    views: dict[str, np.ndarray] = {"num_drawn": np.zeros(0, np.int32)}
    views["tokens"] = views["logprobs"] = np.zeros((1, 0), np.int32)
    for bucket, buffer in zip(dict.fromkeys(buckets), packed, strict=True):
        for name, (offset, shape) in output_sections(bucket, config)[0].items():
            view = buffer[offset : offset + math.prod(shape)].reshape(shape)
            views[name] = view.view(np.float32) if name.endswith("logprobs") else view
    tokens, logprobs = (views.pop(name)[:, : batch.num_rows].T.tolist() for name in ("tokens", "logprobs"))
    num_drawn = views.pop("num_drawn")[: batch.num_rows].tolist()
    return StepResult(num_drawn=num_drawn, tokens=tokens, logprobs=logprobs, **views)


def _views(
    bucket: Bucket, config: EngineConfig, packed: np.ndarray | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A buffer of a bucket's inputs, of zeros unless it is given, and each input's place in it."""
    sections, size = input_sections(bucket, config)
    packed = np.zeros(size, np.int32) if packed is None else packed
    return packed, {n: packed[s.offset : s.offset + math.prod(s.shape)].reshape(s.shape) for n, s in sections.items()}


def _pack_tokens(view: dict[str, np.ndarray], plan: "Plan") -> None:
    """Tokens back to back, where each row begins, and the place of the last token of each row that draws."""
    start, starts, drawn_at = 0, [], []
    for entry in plan.entries:
        if entry.num_tokens:
            end = start + entry.num_tokens
            view["tokens"][start:end] = entry.seq.token_ids[entry.start : entry.end]
            if "targets" in view:  # what each position should predict; past the known tokens it is never read
                following = entry.seq.token_ids[entry.start + 1 : entry.end + 1]
                view["targets"][start : start + len(following)] = following
                view["scoring"].view(np.float32)[len(starts), 0] = entry.seq.params.temperature
                view["scoring"][len(starts), 1] = LOGPROBS_MODES.index(entry.seq.params.logprobs_mode)
            starts.append(start)
            start = end
        if entry.draws:
            drawn_at.append(start - 1)
    view["query_starts"][: len(starts)] = starts
    view["query_starts"][len(starts) :] = start
    view["drawn_at"][: len(drawn_at)] = drawn_at


def _pack_rows(view: dict[str, np.ndarray], drawing: list["PlanEntry"], config: EngineConfig) -> None:
    """What drawing needs of each row."""
    rows = len(drawing)
    view["slots"][:rows] = [e.seq.slot for e in drawing]
    view["slots"][rows:] = config.max_num_seqs  # past the end: dropped
    full = "bias" in view
    if full:
        view["bias_ids"][:] = PAD_TOKEN
    for row, entry in enumerate(drawing):
        seq = entry.seq
        view["controls"][row] = seq.controls if seq.controls is not None else _pack_controls(seq, config)
        if seq.params.min_tokens:  # so many tokens of output come before the first one drawn now
            drawn = entry.end - entry.draws + 1 - seq.prompt_len
            view["open_after"][row] = max(seq.params.min_tokens - drawn, 0)
        if full and (bias := seq.params.logit_bias):
            view["bias_ids"][row, : len(bias)] = list(bias)
            view["bias"].view(np.float32)[row, : len(bias)] = list(bias.values())


def _pack_controls(seq: Sequence, config: EngineConfig) -> np.ndarray:
    """A row of CONTROLS and the ids that stop it, kept in the sequence."""
    p: SamplingParams = seq.params
    values = (
        p.temperature, p.top_p, p.min_p, min(max(p.top_k, 0), PAD_TOKEN), seq.key[0], seq.key[1], seq.index,
        LOGPROBS_MODES.index(p.logprobs_mode), p.presence_penalty, p.frequency_penalty, p.repetition_penalty,
    )  # fmt: skip
    # Where there are more than fit, the host alone sees the others; with min_tokens they always fit.
    stops = sorted(seq.eos_ids | seq.stop_ids)[: config.max_stop_ids]
    columns = [np.asarray(v, dtype).view(np.int32) for (_, dtype), v in zip(CONTROLS, values, strict=True)]
    columns += [np.int32(token) for token in stops] + [PAD_TOKEN] * (config.max_stop_ids - len(stops))
    seq.controls = np.stack(columns)
    return seq.controls


def _ranked(ids: np.ndarray, logprobs: np.ndarray, count: int) -> list[tuple[int, float, int]]:
    return [(int(i), float(p), rank + 1) for rank, (i, p) in enumerate(zip(ids[:count], logprobs[:count], strict=True))]


def _lay_out(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Section], int]:
    sections, offset = {}, 0
    for name, shape in shapes.items():
        sections[name] = Section(offset, shape)
        offset += math.prod(shape)
    return sections, offset


def _up_to(sizes: tuple[int, ...], value: int) -> tuple[int, ...]:
    """The sizes that anything up to `value` takes."""
    return sizes[: bisect.bisect_left(sizes, value) + 1]


def _ceil(sizes: tuple[int, ...], value: int) -> int:
    return sizes[bisect.bisect_left(sizes, value)]
