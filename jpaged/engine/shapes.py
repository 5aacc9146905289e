"""Shapes: the static shape of each compiled step, a type a phase; which of them a plan takes, and
the table of all that there can be.

A shape is all that can make a step compile again.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, Self

from jpaged.checks import JsonObject
from jpaged.config import EngineConfig, has_draft_model, has_head_adapters
from jpaged.engine.plan import Plan
from jpaged.engine.scoring import WIDTHS, Scoring
from jpaged.engine.sequence import Sequence

MOST_MOVED = 64  # blocks of a move between pool and host: enough to fill a transfer
MOST_STATES_MOVED = 4  # of those that hold a state, which has megabytes a layer
TOKENS_A_ROW = 64  # of a prefill with the smaller of its two numbers of rows

# What a draw can do, each more than the one before: "filtered" has top_k, top_p and min_p, "full"
# penalties, biases, bans and top lists too. A step that looked for them itself would have a GPU
# wait for the host in its middle.
Sampler = Literal["plain", "filtered", "full"]
SAMPLERS: tuple[Sampler, ...] = ("plain", "filtered", "full")
DRAFT_SAMPLERS: tuple[Sampler, ...] = ("plain", "filtered")  # nobody needs a draft's draws right


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What the shapes of all phases have.

    tokens, rows: of the step; 0 tokens mean one a row. loras: slots of adapters, 0 where no row has
    one. sampler: what its draw can do, None where it leaves that to a SampleShape after it. In the
    shapes below tables and blocks are the block tables of a row, one a group of layers, and their
    width.
    """

    phase: ClassVar[Literal["prefill", "sample", "decode", "draft", "replay"]]

    tokens: int = 0
    rows: int
    loras: int = 0
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            object.__setattr__(self, "tokens", self.rows)

    @property
    def is_full(self) -> bool:
        """Whether its draw needs the counts of tokens, and returns top lists."""
        return self.sampler == "full"

    @property
    def takes_masks(self) -> bool:
        """Whether the host makes masks for it: of what each row may draw, or is scored under."""
        return False

    @property
    def order(self) -> tuple[str, int, int, str]:
        """A key to sort by: the smallest of a phase first."""
        return self.phase, self.tokens, self.rows, str(self)

    def holds(self, other: "Shape") -> bool:
        """Return whether this step can do what another does, in more room or with a richer draw."""
        if type(self) is not type(other) or self.tokens < other.tokens or self.rows < other.rows:
            return False
        if self.sampler != other.sampler:
            if self.sampler is None or other.sampler is None:
                return False
            if SAMPLERS.index(self.sampler) < SAMPLERS.index(other.sampler):
                return False
        same_size = dataclasses.replace(
            self, tokens=other.tokens, rows=other.rows, sampler=other.sampler
        )
        return same_size == other

    def widened(self, others: Iterable["Shape"]) -> Self:
        """Return the smallest step of the same kind that does what this one and others do."""
        values: dict[str, Any] = {}
        shapes = (self, *others)
        for field in dataclasses.fields(self):
            values_of_all = [getattr(shape, field.name) for shape in shapes]
            if field.name != "sampler":
                values[field.name] = max(values_of_all)
            elif self.sampler is not None:
                values["sampler"] = max(values_of_all, key=SAMPLERS.index)
        return dataclasses.replace(self, **values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillShape(Shape):
    """Packed tokens of prompts. With `mixed` rows that decode are rows of one token in it too, and
    where steps are pinned there is no decode: they all are.

    scores: it returns logprobs of the prompts' tokens. scores_masked: under masks. top: width of
    the lists of likeliest tokens that it returns with them; 0 is max_logprobs. candidates: width of
    the lists of tokens whose logprobs it returns. entropy: it returns that of each distribution.
    skips: it computes no logits of tokens that are not scored, which costs a GPU a pause for each
    tile of those that are. routed: numbers a token that say which experts it takes, 0 where routers
    choose. keeps_states: it returns all hidden states.
    """

    phase = "prefill"

    tables: int = 0
    blocks: int = 0
    scores: bool = False
    scores_masked: bool = False
    top: int = 0
    candidates: int = 0
    entropy: bool = False
    skips: bool = False
    routed: int = 0
    keeps_states: bool = False

    @property
    def takes_masks(self) -> bool:
        return self.scores_masked


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleShape(Shape):
    """The draw of a token for each row of a prefill, or of a decode that leaves it to this one.

    masked: under masks of what each row may draw.
    """

    phase = "sample"

    sampler: Sampler | None = "plain"
    masked: bool = False

    @property
    def takes_masks(self) -> bool:
        return self.masked


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape(Shape):
    """One token a row, `steps` times, each with its draw; without a draw, once."""

    phase = "decode"

    tables: int = 0
    blocks: int = 0
    steps: int = 1
    sampler: Sampler | None = "plain"

    def apart(self, config: EngineConfig) -> "tuple[DecodeShape, SampleShape]":
        """Return this decode as two steps: without its draw, and the draw after it."""
        assert self.sampler is not None, "its draw is apart already"
        loras = loras_of_draw(config, has_adapters=self.loras > 0)
        sample = SampleShape(rows=self.rows, sampler=self.sampler, loras=loras)
        return dataclasses.replace(self, sampler=None, steps=1), sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftShape(Shape):
    """What a draft model guesses after the last token of each row, `steps` tokens, drawn by it."""

    phase = "draft"

    tables: int = 0
    blocks: int = 0
    steps: int = 1
    sampler: Sampler | None = "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayShape(Shape):
    """The states of rows of a prefill with guesses, made once it is known which are right."""

    phase = "replay"

    tables: int = 0

    @classmethod
    def after(cls, prefill: PrefillShape, config: EngineConfig) -> Self:
        """Return the replay of what a prefill has kept."""
        tokens = min(prefill.tokens, most_replayed(config))
        return cls(tokens=tokens, rows=prefill.rows, tables=prefill.tables)


# The shapes of a dispatch: of a prefill, decode or draft, and of the draw after it, None where no
# row draws or the first step draws itself.
StepShapes = tuple[PrefillShape | DecodeShape | DraftShape, SampleShape | None]


def choose_shapes(plan: Plan, config: EngineConfig) -> StepShapes:
    """Return the smallest shapes of the table that hold a plan."""
    assert config.token_buckets is not None and config.seq_buckets is not None
    drawing = [e.seq for e in plan.entries if e.draws]
    sampler = _sampler(drawing)
    rows = _ceil(config.seq_buckets, plan.num_draws)
    tables, blocks = len(plan.entries[0].seq.block_tables), config.max_blocks_per_seq
    if plan.phase == "draft":
        return _draft_shape(
            config, rows, sampler if sampler in DRAFT_SAMPLERS else DRAFT_SAMPLERS[-1], tables
        ), None
    has_adapters = bool([e for e in plan.entries if e.num_tokens and e.seq.adapter is not None])
    loras = config.max_loras if has_adapters else 0
    masked, sample = bool([seq for seq in drawing if seq.structured is not None]), None
    if drawing:
        adapted = bool([seq for seq in drawing if seq.adapter is not None])
        of_draw = loras_of_draw(config, has_adapters=adapted)
        sample = SampleShape(rows=rows, sampler=sampler, masked=masked, loras=of_draw)
    if plan.phase == "decode" and not config.pinned:
        if config.separate_draw or masked:
            shape = DecodeShape(rows=rows, tables=tables, blocks=blocks, loras=loras, sampler=None)
            return shape, sample
        return decode_shape(drawing, config), None
    tokens = _ceil(config.token_buckets, plan.num_tokens)
    computed = len([e for e in plan.entries if e.num_tokens])  # forks are rows of the draw alone
    return PrefillShape(
        tokens=tokens,
        rows=_ceil(_prefill_rows(tokens, config), computed),
        tables=tables,
        blocks=blocks,
        loras=loras,
        **_scoring(plan, config),
    ), sample


def decode_shape(rows: list[Sequence], config: EngineConfig) -> DecodeShape:
    """Return the smallest decode of the table that holds these rows and draws for them itself."""
    assert config.seq_buckets is not None and config.decode_steps is not None
    has_adapters = bool([seq for seq in rows if seq.adapter is not None])
    return DecodeShape(
        rows=_ceil(config.seq_buckets, len(rows)),
        tables=len(rows[0].block_tables),
        blocks=config.max_blocks_per_seq,
        loras=config.max_loras if has_adapters else 0,
        steps=config.decode_steps,
        sampler=_sampler(rows),
    )


def _sampler(rows: list[Sequence]) -> Sampler:
    """Return the least that draws for all of these rows."""
    asked: set[Sampler] = {SAMPLERS[0], *[seq.sampler for seq in rows]}
    return max(asked, key=SAMPLERS.index)


def _scoring(plan: Plan, config: EngineConfig) -> JsonObject:
    """Return the fields of a PrefillShape that say what it scores."""
    read = [e.seq for e in plan.entries if not e.decodes and e.num_tokens]
    scored = [seq for seq in read if seq.sampling_params.prompt_logprobs is not None]
    asked = [seq.scoring for seq in read if seq.scoring is not None]
    fields: dict[str, Any] = {"scores": bool(scored)}
    if scored:
        fields["scores_masked"] = bool([seq for seq in scored if seq.scores_form])
    listed = max([seq.sampling_params.prompt_logprobs or 0 for seq in scored], default=0)
    return fields | _asked(asked, config, listed) if asked else fields


def _asked(asked: list[Scoring], config: EngineConfig, listed: int = 0) -> JsonObject:
    """Return the fields of a PrefillShape that say what more it returns of what it scores. listed:
    the longest list of prompts' logprobs, which has room beside the likeliest tokens.
    """
    fields: dict[str, Any] = {}
    if top := max([scoring.top_k for scoring in asked]):
        fields["top"] = _width(max(top, listed), config)
    if widest := max([scoring.num_candidates for scoring in asked]):
        fields["candidates"] = _width(widest, config)
    fields["routed"] = max([scoring.num_routed for scoring in asked])
    fields["entropy"] = bool([scoring for scoring in asked if scoring.entropy])
    fields["keeps_states"] = bool([scoring for scoring in asked if scoring.hidden])
    # No table has steps that skip.
    skips = [scoring for scoring in asked if scoring.first and not scoring.hidden]
    fields["skips"] = bool(skips) and not config.strict
    return fields


def scored_shapes(
    table: Iterable[Shape], scoring: Scoring, config: EngineConfig
) -> list[PrefillShape]:
    """Return the prefills that score sequences so, in place of those of a table that score."""
    fields = _asked([scoring], config)
    prefills = [shape for shape in table if isinstance(shape, PrefillShape)]
    return [dataclasses.replace(shape, **fields) for shape in prefills if shape.scores]


def _width(count: int, config: EngineConfig) -> int:
    """Return the width of lists of so many tokens."""
    return next((width for width in WIDTHS if width >= count), config.max_logprobs)


def common_shapes(chosen: list[StepShapes], config: EngineConfig) -> StepShapes:
    """Return the smallest shapes of the table that hold what several replicas' shapes hold, all of
    one phase.
    """
    firsts, samples = [first for first, _ in chosen], [s for _, s in chosen if s is not None]
    if isinstance(firsts[0], DecodeShape) and any(first.sampler is None for first in firsts):
        # Where one draws apart all do.
        for i, first in enumerate(firsts):
            if isinstance(first, DecodeShape) and first.sampler is not None:
                firsts[i], sample = first.apart(config)
                samples.append(sample)
    widest = firsts[0].widened(firsts[1:])
    if isinstance(widest, PrefillShape):
        rows = _ceil(_prefill_rows(widest.tokens, config), widest.rows)
        widest = dataclasses.replace(widest, rows=rows)
    return widest, samples[0].widened(samples[1:]) if samples else None


def shape_table(
    config: EngineConfig, *, tables: int = 1, tokens: int | None = None, rows: int | None = None
) -> Iterator[Shape]:
    """Yield every shape that choose_shapes can return for a resolved config, those of few rows
    first.

    tables: block tables of a row. tokens, rows: of prompts, and of completions, that there are at
    most; None: as many as the config allows.
    """
    assert config.token_buckets is not None and config.seq_buckets is not None
    assert config.decode_steps is not None
    most_rows, most_tokens = config.num_rows, config.max_num_batched_tokens
    rows = most_rows if rows is None else min(rows, most_rows)
    tokens = most_tokens if tokens is None else min(tokens, most_tokens)
    blocks, adapters = config.max_blocks_per_seq, dict.fromkeys((0, config.max_loras))
    of_draw = dict.fromkeys((0, loras_of_draw(config, has_adapters=True)))
    leaves_draw = config.structured_output or config.separate_draw is not False
    for size in _up_to(config.seq_buckets, rows):
        for sampler in SAMPLERS:
            for loras in of_draw:
                for masked in (False, True) if config.structured_output else (False,):
                    yield SampleShape(rows=size, sampler=sampler, masked=masked, loras=loras)
        if not config.pinned:
            for loras in adapters:
                place = DecodeShape(rows=size, tables=tables, blocks=blocks, loras=loras)
                for sampler in SAMPLERS if not config.separate_draw else ():
                    yield dataclasses.replace(place, sampler=sampler, steps=config.decode_steps)
                if leaves_draw:
                    yield dataclasses.replace(place, sampler=None)
        for sampler in DRAFT_SAMPLERS if has_draft_model(config) else ():
            yield _draft_shape(config, size, sampler, tables)
    for count in _up_to(config.token_buckets, tokens):
        for size in _up_to(_prefill_rows(count, config), min(rows, count)):
            for scores in (False, True):
                for loras in adapters:
                    yield PrefillShape(
                        tokens=count,
                        rows=size,
                        tables=tables,
                        blocks=blocks,
                        loras=loras,
                        scores=scores,
                    )


def most_replayed(config: EngineConfig) -> int:
    """Return how many tokens a step with guesses has at most: it draws after each of them. 0 where
    nothing guesses.
    """
    if config.speculative is None:
        return 0
    assert config.seq_buckets is not None
    return min(config.seq_buckets[-1], config.max_num_batched_tokens)


def loras_of_draw(config: EngineConfig, *, has_adapters: bool) -> int:
    """Return the slots of adapters that a draw has: where the head can have any."""
    return config.max_loras if has_adapters and has_head_adapters(config) else 0


def _draft_shape(config: EngineConfig, rows: int, sampler: Sampler, tables: int) -> DraftShape:
    assert config.speculative is not None
    steps, blocks = config.speculative.num_tokens, config.max_blocks_per_seq
    return DraftShape(rows=rows, tables=tables, blocks=blocks, steps=steps, sampler=sampler)


def _prefill_rows(tokens: int, config: EngineConfig) -> tuple[int, ...]:
    """Return the two numbers of rows that a prefill is compiled for: few long ones, and as many as
    there can be.
    """
    assert config.seq_buckets is not None
    most = config.seq_buckets[-1]
    rows = [_ceil(config.seq_buckets, min(n, most)) for n in (tokens // TOKENS_A_ROW, tokens)]
    return tuple(dict.fromkeys(rows))


def padded_blocks(count: int) -> int:
    """Return how many blocks a move of this many between pool and host is compiled for."""
    return 1 << (count - 1).bit_length()


def moved_blocks(config: EngineConfig, per: Literal["token", "block"] = "token") -> int:
    """Return the most blocks of a group that one move takes; more are moved one part after the
    other. per: see GroupSize.
    """
    most = MOST_MOVED if per == "token" else MOST_STATES_MOVED
    return min(padded_blocks(config.max_blocks_per_seq), most)


def _up_to(sizes: tuple[int, ...], value: int) -> tuple[int, ...]:
    """Return the sizes that anything up to `value` takes."""
    return sizes[: bisect.bisect_left(sizes, value) + 1]


def _ceil(sizes: tuple[int, ...], value: int) -> int:
    """Return the smallest size that holds a value."""
    return sizes[bisect.bisect_left(sizes, value)]
