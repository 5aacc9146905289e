"""Bucket: the static shape of a compiled step; the table of all that there can be, and how their
buffers are laid out.

The layout of the packed buffers is defined here once (`input_sections`, `output_sections`): packing
fills by it on the host, the steps slice by it on the device.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jpaged.config import EngineConfig, has_draft_model, has_head_adapters
from jpaged.engine.controls import CONTROLS
from jpaged.engine.plan import Plan

TOKENS_A_ROW = 64  # of a prefill with the smaller of its two numbers of rows

Phase = Literal["prefill", "sample", "decode", "draft"]
Features = Literal["plain", "filtered", "full", "prompt"]
DRAWS: tuple[Features, ...] = ("plain", "filtered", "full")  # of a draw, each with more
GUESSES: tuple[Features, ...] = DRAWS[:2]  # of a draft, whose draws nobody needs to get right


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """The static shape of a compiled step: all that can make it compile again.

    prefill: tokens T, packed, of `rows` rows; features "prompt" scores the prompt's tokens too.
    sample: draws one token for each of `rows` rows of a prefill. decode: one token a row, `steps`
    times, drawing included; tokens equal rows. With `separate_draw` it is the model alone, and a
    "sample" of as many rows follows. With `mixed` rows that decode are rows of one token
    in a prefill too; where steps are pinned there is no decode, and they all are. draft: a decode
    by the draft model, drawing included. tables, blocks: block tables of a row, one a group of
    layers, and their width M. features "filtered" has top_k, top_p and min_p, "full" penalties,
    biases, bans and top lists too: a step that looked for them itself would have a GPU wait for the
    host in its middle. loras: slots of adapters, 0 where no row has one.
    masks: a draw that is told what each row may draw; a decode that leaves its draw to one (as all
    do with `separate_draw`); a prefill that scores under masks.
    """

    phase: Phase
    tokens: int
    rows: int
    tables: int = 0
    blocks: int = 0
    steps: int = 1
    features: Features = "plain"
    loras: int = 0
    masks: bool = False

    @property
    def is_full(self) -> bool:
        return self.features == "full"

    @property
    def takes_masks(self) -> bool:
        return self.masks and self.phase != "decode"

    def draws_apart(self, config: EngineConfig) -> bool:
        """Whether it is a decode that another step draws for."""
        return self.phase == "decode" and (bool(config.separate_draw) or self.masks)

    def holds(self, other: "Bucket") -> bool:
        """Whether this step can do what another does, and does more."""
        return (
            (self.phase, self.tables, self.blocks, self.steps, self.loras, self.masks)
            == (other.phase, other.tables, other.blocks, other.steps, other.loras, other.masks)
            and self.tokens >= other.tokens
            and self.rows >= other.rows
            and (self.features == other.features or self._draws_more(other))
        )

    def _draws_more(self, other: "Bucket") -> bool:
        draws = {self.features, other.features} <= set(DRAWS)
        return draws and DRAWS.index(self.features) > DRAWS.index(other.features)


# Of a prefill or decode, and of the draw after it, where that is apart and any row draws.
Buckets = tuple[Bucket, Bucket | None]


class Section(NamedTuple):
    offset: int
    shape: tuple[int, ...]


@functools.lru_cache(maxsize=1024)  # asked for in each step
def input_sections(bucket: Bucket, config: EngineConfig) -> tuple[dict[str, Section], int]:
    """Where each input lies in the packed int32 buffer of a bucket, and the buffer's length.

    A prefill's buffer ends in that of the "sample" step after it, which is of one size, so that
    neither shape multiplies the other's: the prefill hands it on, and so does a decode without its
    draw. logits_indices: places among the
    packed tokens after which a token is drawn. follows: 1 for a row whose last token is the one
    that its device row drew last. adapters: of each row its slot, max_loras where it has none; of a
    draw where the head can have adapters.
    """
    assert config.seq_buckets is not None
    rows, most = bucket.rows, config.seq_buckets[-1]
    shapes: dict[str, tuple[int, ...]]
    if bucket.phase == "sample":
        shapes = {"context_lens": (most,), **_row_shapes(most, config, full=True)}
        if has_head_adapters(config):
            shapes["adapters"] = (most,)
        return _lay_out(shapes | {"follows": (most,)})
    shapes = {"tokens": (bucket.tokens,), "context_lens": (rows,)}
    shapes["block_tables"] = (bucket.tables, rows, bucket.blocks)
    if bucket.loras:
        shapes["adapters"] = (rows,)
    _, size = input_sections(Bucket(phase="sample", tokens=most, rows=most), config)
    if bucket.draws_apart(config):
        return _lay_out(shapes | {"device_rows": (rows,), "sample": (size,)})
    if bucket.phase in ("decode", "draft"):
        return _lay_out(
            shapes | {"steps": (rows,), **_row_shapes(rows, config, full=bucket.is_full)}
        )
    shapes |= {"query_start_loc": (rows + 1,), "logits_indices": (most,), "device_rows": (rows,)}
    if bucket.features == "prompt":
        shapes |= {"targets": (bucket.tokens,), "scoring": (rows, 2)}
    return _lay_out(shapes | {"sample": (size,)})


def _row_shapes(rows: int, config: EngineConfig, *, full: bool) -> dict[str, tuple[int, ...]]:
    """What drawing a token needs to know of its row. open_after: draws before which stop ids
    neither stop nor occur.
    """
    shapes: dict[str, tuple[int, ...]] = {"device_rows": (rows,), "open_after": (rows,)}
    shapes["controls"] = (rows, len(CONTROLS) + config.max_stop_ids)  # then EOS and stop_token_ids
    biases = {"bias_ids": (rows, config.max_logit_bias), "bias": (rows, config.max_logit_bias)}
    return shapes | biases if full else shapes


def output_sections(bucket: Bucket, config: EngineConfig) -> tuple[dict[str, Section], int]:
    """Where each output lies in the int32 buffer that a step of this bucket returns, and the
    buffer's length.

    num_drawn: tokens of each row that count, fewer than `steps` for a row that stopped. Of a
    prefill: "prompt" alone; of a decode without its draw: nothing.
    """
    rows, steps, top = bucket.rows, bucket.steps, config.max_logprobs
    shapes: dict[str, tuple[int, ...]] = {}
    if bucket.phase != "prefill" and not bucket.draws_apart(config):
        shapes |= {"num_drawn": (rows,), "tokens": (steps, rows), "logprobs": (steps, rows)}
    if bucket.is_full:
        shapes |= {"ranks": (steps, rows)}
        shapes |= {"top_ids": (steps, rows, top), "top_logprobs": (steps, rows, top)}
    if bucket.phase == "sample" and bucket.masks:
        shapes |= {"allowed_logprobs": (steps, rows)}
    if bucket.features == "prompt":
        tokens = bucket.tokens
        shapes |= {"prompt_logprobs": (tokens,), "prompt_ranks": (tokens,)}
        shapes |= {"prompt_top_ids": (tokens, top), "prompt_top_logprobs": (tokens, top)}
    return _lay_out(shapes)


def choose_buckets(plan: Plan, config: EngineConfig) -> Buckets:
    """The smallest shapes of the table that hold a plan: of its prefill or decode, and of the draw
    after it where that is apart.
    """
    assert config.token_buckets is not None and config.seq_buckets is not None
    assert config.decode_steps is not None
    drawing = [e.seq for e in plan.entries if e.draws]
    masks = any(seq.structured is not None for seq in drawing)
    draws: list[Features] = [DRAWS[0], *(seq.sampling_params.draw for seq in drawing)]
    features = max(draws, key=DRAWS.index)
    rows = _ceil(config.seq_buckets, plan.num_draws)
    tables, blocks = len(plan.entries[0].seq.block_tables), config.max_blocks_per_seq
    has_adapters = any(e.seq.adapter is not None for e in plan.entries if e.num_tokens)
    kind: dict[str, Any] = {"tables": tables, "blocks": blocks}
    kind["loras"] = config.max_loras if has_adapters else 0
    if plan.phase == "draft":
        guesses = features if features in GUESSES else GUESSES[-1]
        return _draft_bucket(config, rows, guesses, kind), None
    sample = None
    if drawing:
        size: dict[str, Any] = {"tokens": rows, "rows": rows, "features": features}
        loras = _loras_of_draw(config, any(seq.adapter is not None for seq in drawing))
        sample = Bucket(phase="sample", **size, masks=masks, loras=loras)
    if plan.phase == "decode" and not config.pinned:
        if config.separate_draw or masks:
            kind["masks"] = not config.separate_draw
            return Bucket(phase="decode", tokens=rows, rows=rows, **kind), sample
        kind |= {"steps": config.decode_steps, "features": features}
        return Bucket(phase="decode", tokens=rows, rows=rows, **kind), None
    if any(
        e.seq.sampling_params.prompt_logprobs is not None and not e.decodes for e in plan.entries
    ):
        kind["features"] = "prompt"
        kind["masks"] = any(e.seq.scores_form for e in plan.entries)
    tokens = _ceil(config.token_buckets, plan.num_tokens)
    computed = sum(e.num_tokens > 0 for e in plan.entries)  # forks are rows of the draw alone
    rows = next(rows for rows in _prefill_rows(tokens, config) if rows >= computed)
    return Bucket(phase="prefill", tokens=tokens, rows=rows, **kind), sample


def _draft_bucket(
    config: EngineConfig, rows: int, features: Features, kind: Mapping[str, Any]
) -> Bucket:
    assert config.speculative is not None
    size: dict[str, Any] = {"tokens": rows, "rows": rows, "steps": config.speculative.num_tokens}
    return Bucket(phase="draft", **{**kind, "loras": 0}, **size, features=features)


def common_buckets(chosen: Sequence[Buckets], config: EngineConfig) -> Buckets:
    """Return the smallest buckets of the table that hold what each of these holds, all of one
    phase.
    """
    if len(chosen) == 1:
        return chosen[0]
    if any(b.masks and b.phase == "decode" for b, _ in chosen):  # the others' draws go apart too
        chosen = [drawn_apart(bucket, config, sample) for bucket, sample in chosen]
    bucket = _widest([bucket for bucket, _ in chosen])
    if bucket.phase == "prefill":
        rows = next(rows for rows in _prefill_rows(bucket.tokens, config) if rows >= bucket.rows)
        bucket = dataclasses.replace(bucket, rows=rows)
    samples = [sample for _, sample in chosen if sample is not None]
    return bucket, _widest(samples) if samples else None


def _loras_of_draw(config: EngineConfig, has_adapters: bool) -> int:
    return config.max_loras if has_adapters and has_head_adapters(config) else 0


def drawn_apart(bucket: Bucket, config: EngineConfig, sample: Bucket | None = None) -> Buckets:
    """A decode whose draw is apart, of one that draws itself."""
    if bucket.masks:
        return bucket, sample
    size: dict[str, Any] = {"tokens": bucket.tokens, "rows": bucket.rows}
    size["loras"] = _loras_of_draw(config, bucket.loras > 0)
    sample = Bucket(phase="sample", **size, features=bucket.features)
    return dataclasses.replace(bucket, features="plain", masks=True), sample


def _widest(buckets: Sequence[Bucket]) -> Bucket:
    """With the most tokens, rows and features of any of them."""
    features = max((b.features for b in buckets), key=(*DRAWS, "prompt").index)
    tokens, rows = max(b.tokens for b in buckets), max(b.rows for b in buckets)
    masks = any(b.masks for b in buckets)
    how = {"features": features, "masks": masks, "loras": max(b.loras for b in buckets)}
    return dataclasses.replace(buckets[0], tokens=tokens, rows=rows, **how)


def bucket_table(
    config: EngineConfig, *, tables: int = 1, tokens: int | None = None, rows: int | None = None
) -> Iterable[Bucket]:
    """Every bucket that choose_buckets can return for a resolved config, those of the smallest
    shapes first.

    tables: block tables of a row. tokens, rows: of prompts, and of completions, that there are at
    most; None: as many as the config allows.
    """
    assert config.token_buckets is not None and config.seq_buckets is not None
    assert config.decode_steps is not None
    most_rows, most_tokens = config.max_num_seqs, config.max_num_batched_tokens
    rows = most_rows if rows is None else min(rows, most_rows)
    tokens = most_tokens if tokens is None else min(tokens, most_tokens)
    shape: dict[str, Any] = {"tables": tables, "blocks": config.max_blocks_per_seq}
    shapes: list[dict[str, Any]] = []
    shapes += [shape | {"loras": loras} for loras in dict.fromkeys((0, config.max_loras))]
    for S in _up_to(config.seq_buckets, rows):
        size: dict[str, Any] = {"tokens": S, "rows": S}
        steps: dict[str, Any] = {"steps": config.decode_steps}
        for features in DRAWS:
            for loras in dict.fromkeys((0, _loras_of_draw(config, has_adapters=True))):
                yield Bucket(phase="sample", **size, features=features, loras=loras)
                if config.structured_output:
                    yield Bucket(phase="sample", **size, features=features, masks=True, loras=loras)
            if not config.pinned and (features == "plain" or not config.separate_draw):
                for each in shapes:
                    yield Bucket(phase="decode", **(size | each | steps), features=features)
        for features in GUESSES if has_draft_model(config) else ():
            yield _draft_bucket(config, S, features, shape)
        comes_apart = config.structured_output or config.separate_draw is None
        if comes_apart and not config.pinned and not config.separate_draw:
            for each in shapes:
                yield Bucket(phase="decode", **(size | each), masks=True)
    kinds: tuple[Features, ...] = ("plain", "prompt")
    for T in _up_to(config.token_buckets, tokens):
        for S in _up_to(_prefill_rows(T, config), min(rows, T)):
            for features in kinds:
                for each in shapes:
                    yield Bucket(phase="prefill", tokens=T, rows=S, **each, features=features)


def _prefill_rows(tokens: int, config: EngineConfig) -> tuple[int, ...]:
    """The two numbers of rows that a prefill is compiled for: few long ones, and as many as there
    can be.
    """
    assert config.seq_buckets is not None
    most = config.seq_buckets[-1]
    rows = [_ceil(config.seq_buckets, min(n, most)) for n in (tokens // TOKENS_A_ROW, tokens)]
    return tuple(dict.fromkeys(rows))


# Blocks of one move between pool and host at most: enough to fill a transfer.
MOST_MOVED = 64


def padded_blocks(count: int) -> int:
    """Return how many blocks a move of this many between pool and host is compiled for."""
    return 1 << (count - 1).bit_length()


def moved_blocks(config: EngineConfig) -> int:
    """Return the most blocks of a group that one move takes; more are moved one part after the
    other.
    """
    return min(padded_blocks(config.max_blocks_per_seq), MOST_MOVED)


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
