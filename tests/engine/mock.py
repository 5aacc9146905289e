"""A device that is a list, and what each request would get from it alone.

The "KV" of a token is a number that follows from the token and the KV before it, as a real model's
does, and the next token follows from all KV read back through the block table: a wrong, stale,
missing or foreign block shows as a wrong token, and a slot that nothing has written raises.
"""

import dataclasses
import functools
import itertools
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.cache.kinds import GroupSize, Replay
from jpaged.engine.layout import CONTROLS, Section, input_sections, output_sections
from jpaged.engine.packing import ON_DEVICE, PAD_TOKEN, Batch, pack_replays, unpack
from jpaged.engine.plan import StepResult
from jpaged.engine.sequence import Sequence
from jpaged.engine.shapes import DecodeShape, PrefillShape, ReplayShape, Shape, StepShapes
from jpaged.models.config import ModelConfig
from jpaged.search.beam import BeamSearch, EarlyStopping

SAMPLE_INDEX = [control.name for control in CONTROLS].index("sample_index")
VOCAB = 101
POISON, STOPPED = -1, -2
Window = int | Literal["state"] | None  # of a group of layers; a "state" is one record a block
Views = dict[str, np.ndarray]
Data = tuple[list[int], list[int]]  # a block's KV, and the era of each slot
Context = tuple[int, list[int], int | None]  # length, visible KV, the last token if on the device
ROOTS = [
    random.Random(i).choices(range(1, 90), k=24) for i in range(2)
]  # what prompts have in common
MODEL = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=2,
    intermediate_size=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    max_position_embeddings=4096,
)


def next_kv(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 1) % (2**61 - 1)


def adapted(tokens: Iterable[int], version: int) -> list[int]:
    """Tokens as an adapter of this version sees them; 0 is the model itself."""
    return [token + 1000 * version for token in tokens]


def next_token(kv: list[int], banned: Iterable[int] = (), index: int = 0) -> int:
    """Of sample `index`: each has its own stream."""
    token = zlib.crc32(np.array([*kv, *[index] * bool(index)], np.int64).tobytes()) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def top(kv: list[int], count: int) -> list[tuple[int, float]]:
    """The likeliest next tokens with their logprobs, in falling order: what a beam may go on
    with.
    """
    digest = zlib.crc32(np.array(kv, np.int64).tobytes())
    return [
        ((digest + 37 * i) % VOCAB, -((digest >> 8) % 61 + 16 * i * (1 + digest % 3)) / 64)
        for i in range(count)
    ]


class Form:
    """A form that follows from the tokens so far: a third of the vocabulary may not come next, or
    all but one token.

    It stands for jpaged.structured's Matcher. fails_after: so many tokens it cannot go on.
    """

    name = "structured"
    words = -(-VOCAB // 32)

    def __init__(self, eos_ids: frozenset[int] = frozenset(), fails_after: int = 1000):
        self.grammars = self
        self.eos_ids, self.fails_after = eos_ids, fails_after
        self.tokens: list[int] = []

    def push(self, token: int) -> None:
        assert token not in forbidden(self.tokens), "a token that the form does not have"
        self.tokens.append(token)

    def rewind(self, token_ids: Iterable[int]) -> None:
        self.tokens = []
        for token in token_ids:
            self.push(token)

    def copy(self) -> "Form":
        twin = Form(self.eos_ids, self.fails_after)
        twin.tokens = list(self.tokens)
        return twin

    def forced(self) -> list[int]:
        ahead: list[int] = []
        while len(free := sorted(set(range(VOCAB)) - forbidden(self.tokens + ahead))) == 1:
            ahead += free
        return ahead

    def advance(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            self.push(token)

    def go_back(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]

    def renew(self, token_ids: Iterable[int]) -> bool:
        assert [*token_ids] == self.tokens, "a row is renewed where it stands"
        return False

    @property
    def error(self) -> str | None:
        return "out of words" if len(self.tokens) >= self.fails_after else None

    def fill(self, forms: Iterable[tuple["Form", int]], masks_SW: np.ndarray) -> None:
        for form, row in forms:
            masks_SW[row] = 0
            for token in set(range(VOCAB)) - forbidden(form.tokens):
                masks_SW.view(np.uint32)[row, token >> 5] |= np.uint32(1 << (token & 31))


def forbidden(tokens: list[int]) -> set[int]:
    if len(tokens) % 6 in (1, 2, 3):
        return set(range(VOCAB)) - {(7 * sum(tokens) + 11) % VOCAB}
    return {token for token in range(VOCAB) if (token + sum(tokens) + len(tokens)) % 3 == 0}


def prompt_score(kv: int, target: int) -> float:
    return -float((kv + target) % 997) / 8


class Handle(NamedTuple):
    """A step that was dispatched: its output buffers, and the era in which it draws."""

    batch: Batch
    outs: list[np.ndarray]
    era: int
    replayed: list[dict[int, int]]  # of each replica, the tokens of rows with guesses by place


class MockRunner:
    """Engine's Runner. `fail` holds (method, how many calls of it come first) of calls that are to
    raise.

    windows: of the groups of layers; those with one have `windowed_blocks` blocks, if that is not
    None. pools: of each group, the KV in every slot. born: the era in which each slot was written,
    or the oldest one in what that was computed from. era: its version of the weights.
    """

    shares_blocks = True

    def __init__(
        self,
        config: EngineConfig,
        windows: tuple[Window, ...] = (None,),
        windowed_blocks: int | None = None,
    ):
        self.config = config
        most = config.num_blocks
        assert most is not None
        windowed = most if windowed_blocks is None else windowed_blocks
        self.kv_groups = tuple(
            GroupSize(
                most if window is None else windowed,
                None if window == "state" else window,
                2**20 // len(windows),
                "block" if window == "state" else "token",
            )
            for window in windows
        )
        self.fail: set[tuple[str, int]] = set()
        self.calls: dict[str, int] = dict.fromkeys(
            ("dispatch", "draw", "fetch", "replay", "read_blocks", "fetch_blocks", "write_blocks"),
            0,
        )
        self.dispatched: list[
            tuple[str, list[tuple[int, int]]]
        ] = []  # (phase, [(start, end) of each row])
        self.era = 0
        self.recover()

    def recover(self) -> None:
        sizes = [group.num_blocks * self._slots(group) for group in self.kv_groups]
        self.pools = [[POISON] * size for size in sizes]
        self.born = [[self.era] * size for size in sizes]
        self.last = [POISON] * self.config.num_rows
        self.undrawn: Callable[[np.ndarray | None], None] | None = None
        self._replayed: dict[int, int] = {}  # in the last step, the tokens of rows with guesses
        self._states: list[list[int]] | None = None  # the pools before a step of rows side by side
        self.tables = [POISON] * self.config.max_loras  # the version in each slot

    def fit(self, buckets: StepShapes) -> StepShapes:
        return buckets

    def steps_at_once(self, bucket: DecodeShape) -> int:
        return bucket.steps

    def dispatch(self, batch: Batch) -> Handle:
        """Everything happens here, in the order of the dispatches; `fetch` only reads."""
        self._may_fail("dispatch")
        assert self.undrawn is None, "the model needs the tokens of the step before"
        for slot, adapter in batch.loads:
            self.tables[slot] = adapter.version
        view, self._replayed = self._inputs(batch.bucket, batch.packed), {}
        if batch.copies is not None:
            self._copy(batch.copies)
        buckets = [bucket for bucket in (batch.bucket, batch.sample) if bucket is not None]
        outs = [
            np.full(output_sections(bucket, self.config)[1], POISON, np.int32) for bucket in buckets
        ]
        if batch.bucket.phase == "draft":
            spans = self._guess(batch, view, outs[0])
        elif batch.bucket.phase == "decode" and batch.bucket.sampler is None:
            contexts, spans = self._forward(batch, view)
            self._draw_rows(batch, view, contexts, outs[1])
        elif batch.bucket.phase == "decode":
            spans = self._decode(
                batch, view, _views(outs[0], output_sections(batch.bucket, self.config)[0])
            )
        else:
            scores = _views(outs[0], output_sections(batch.bucket, self.config)[0])
            places = view["logits_indices"][: batch.num_rows].tolist()
            contexts, chunks = self._prefill(view, scores, set(places))
            forks: Counter[int] = Counter()
            if batch.sample is not None:
                self._draw_rows(batch, view, [contexts[at] for at in places], outs[1])
                forks.update(places)
            spans = []
            for at, (start, end) in chunks.items():
                spans += [(start, end)] + [(end, end)] * (forks[at] - 1)
        self.dispatched.append((batch.bucket.phase, spans))
        outs = [out for out in reversed(outs) if out.size]
        return Handle(batch, outs, self.era, [self._replayed])

    def replay(self, handle: Handle, rounds: list[list[list[Replay]]]) -> None:
        self._may_fail("replay")
        bucket = handle.batch.bucket
        assert isinstance(bucket, PrefillShape)
        shape = ReplayShape.after(bucket, self.config)
        (tokens,) = handle.replayed
        for replays in rounds:
            view = self._inputs(shape, pack_replays(replays, shape, self.config))
            before = [list(pool) for pool in self.pools]
            for row, (first, past) in enumerate(itertools.pairwise(view["query_start_loc"])):
                for at, group in enumerate(self.kv_groups):
                    blocks = [view[name][at, row] for name in ("read_blocks", "written_blocks")]
                    if first == past or group.per == "token":
                        assert blocks == [-1, -1], "a replay of what no group keeps"
                        continue
                    read, written = blocks
                    assert view["starts"][row] > 0 and before[at][read] != POISON
                    kept = [tokens[place] for place in view["places"][first:past].tolist()]
                    *_, state = itertools.accumulate(kept, next_kv, initial=before[at][read])
                    self.pools[at][written], self.born[at][written] = state, self.born[at][read]

    def draw(self, handle: Handle, masks_SW: np.ndarray | None = None) -> Handle:
        if masks_SW is None:
            assert self.undrawn is None, "a draw under masks has masks"
            return handle  # drawn where it was dispatched
        self._may_fail("draw")
        assert self.undrawn is not None
        self.undrawn(masks_SW)
        self.undrawn = None
        return handle._replace(era=self.era)

    def _draw_rows(self, batch: Batch, view: Views, contexts: list[Context], out: np.ndarray):
        """Draw after each context, now or once there are masks."""
        assert batch.sample is not None
        sample = batch.sample
        rows = self._inputs(sample, view["sample"])
        drawn = _views(out, output_sections(sample, self.config)[0])
        assert not rows["context_lens"][batch.num_rows :].any()

        def draw(masks_SW: np.ndarray | None) -> None:
            for row, (length, kv, last) in enumerate(contexts):
                assert length == rows["context_lens"][row], "drawn after another's context"
                follows = bool(rows["follows"][row])
                assert follows == (last is not None), "whose token is on the device follows it"
                if last != STOPPED:
                    self._draw(rows, drawn, row, 0, kv, None if masks_SW is None else masks_SW[row])
                drawn["num_drawn"][row] = last != STOPPED

        if sample.masked:
            self.undrawn = draw
        else:
            draw(None)

    def _forward(self, batch: Batch, view: Views) -> tuple[list[Context], list[tuple[int, int]]]:
        """The context of each row of a decode that draws apart, and what it has written."""
        contexts, spans = list[Context](), list[tuple[int, int]]()
        known = view["tokens"][: batch.num_rows].tolist()
        for row, device_row in enumerate(view["device_rows"][: batch.num_rows]):
            end, last, seen = int(view["context_lens"][row]), None, list[int]()
            if known[row] == ON_DEVICE:
                last = self.last[device_row]
                assert last != POISON, f"row {row} decodes from a row of the device without a token"
            if last != STOPPED:
                token = known[row] if last is None else last
                tokens = adapted([token], self._version(view, row))
                _, seen = self._attend(view["block_tables"][:, row], end, tokens)
            contexts.append((end, seen, last))
            spans.append((end - 1, end))
        return contexts, spans

    def _inputs(self, bucket: Shape, packed: np.ndarray) -> dict[str, np.ndarray]:
        sections, size = input_sections(bucket, self.config)
        assert packed.shape == (size,) and packed.dtype == np.int32
        return _views(packed, sections)

    def _prefill(
        self, view: Views, out: Views, places: set[int]
    ) -> tuple[dict[int, Context], dict[int, tuple[int, int]]]:
        """The length and visible KV of each row's context with its last token if the device alone
        knows it, and (start, end) of each row's chunk, by the place of its last token. places: of
        tokens after which some are drawn.
        """
        contexts, chunks, size = {}, {}, self.config.block_size
        self._states = [list(pool) for pool in self.pools]
        for row, end in enumerate(view["context_lens"]):
            first, past = view["query_start_loc"][row : row + 2]
            tokens = view["tokens"][first:past].tolist()
            if not tokens:
                assert end == 0, "a row without tokens has no context"
                continue
            last = None
            if tokens[0] == ON_DEVICE:
                last = self.last[view["device_rows"][row]]
                assert last != POISON, f"row {row} decodes from a row of the device without a token"
                tokens = [last]
            tokens = adapted(tokens, self._version(view, row))
            tables, start = view["block_tables"][:, row], int(end) - len(tokens)
            if last == STOPPED:  # in a decode of several steps: the rest of it was never written
                for at, table in enumerate(tables):
                    block, slots = int(table[start // size]), self._slots(self.kv_groups[at])
                    self.pools[at][block * slots + start % size % slots] = POISON
                contexts[past - 1], chunks[past - 1] = (int(end), [], last), (start, int(end))
                continue
            if places & set(range(first, past - 1)):  # a run, after each token of which it draws
                guesses = "guesses" in view and bool(view["guesses"][row])
                if guesses:
                    self._replayed |= dict(enumerate(tokens, first))
                for i in range(len(tokens)):
                    past, is_last = start + i + 1, i + 1 == len(tokens) and not guesses
                    _, seen = self._attend(tables, past, tokens[: i + 1], is_last=is_last)
                    contexts[first + i] = past, seen, None
                chunks[first + len(tokens) - 1] = start, int(end)
                continue
            own, seen = self._attend(tables, int(end), tokens)
            contexts[past - 1] = int(end), seen, last
            if "prompt_logprobs" in out:
                self._score(view, out, int(first), own)
            chunks[past - 1] = (int(end) - len(tokens), int(end))
        self._states = None
        return contexts, chunks

    def _score(self, view: Views, out: Views, first: int, own: list[int]) -> None:
        """Score what is asked of a row whose tokens begin at place `first` and have this KV."""
        scored = view["scored"][: view["num_scored"][0]]
        rows = np.flatnonzero((scored >= first) & (scored < first + len(own)))
        kv = [own[place - first] for place in scored[rows]]
        scores = list(map(prompt_score, kv, view["targets"][rows].tolist()))
        out["prompt_logprobs"].view(np.float32)[rows] = scores
        out["prompt_ranks"][rows] = 1
        out["prompt_top_ids"][rows] = np.arange(out["prompt_top_ids"].shape[1])
        out["prompt_top_logprobs"].view(np.float32)[rows] = 0.25

    def _copy(self, copies: np.ndarray) -> None:
        for at, pairs in enumerate(copies.tolist()):
            for source, target in itertools.takewhile(lambda pair: pair[0] != pair[1], pairs):
                self._put(at, target, self._get(at, source))

    def _decode(self, batch: Batch, view: Views, out: Views) -> list[tuple[int, int]]:
        """Up to `steps` tokens of each row; (start, end) of what each has written."""
        assert not view["context_lens"][batch.num_rows :].any()
        assert (view["device_rows"][batch.num_rows :] == self.config.max_num_seqs).all()
        assert batch.steps == view["steps"].max() <= getattr(batch.bucket, "steps", 1)
        known, spans = view["tokens"][: batch.num_rows].tolist(), []
        for row, device_row in enumerate(view["device_rows"][: batch.num_rows]):
            start, count = int(view["context_lens"][row]) - 1, 0
            token = self.last[device_row] if known[row] == ON_DEVICE else known[row]
            assert token != POISON, f"row {row} decodes from a row of the device without a token"
            while token != STOPPED and count < view["steps"][row]:
                end, seen = start + count + 1, adapted([token], self._version(view, row))
                _, kv = self._attend(view["block_tables"][:, row], end, seen)
                token = self._draw(view, out, row, count, kv)
                count += 1
            out["num_drawn"][row] = count
            spans.append((start, start + count))
        return spans

    def _guess(self, batch: Batch, view: Views, out: np.ndarray) -> list[tuple[int, int]]:
        """Drafts, some tokens of them wrong, by a model whose KV is in the last group alone: all
        else stays as it was.
        """
        before = [list(x) for x in (*self.pools[:-1], *self.born[:-1], self.last)]
        drawn = _views(out, output_sections(batch.bucket, self.config)[0])
        spans = self._decode(batch, view, drawn)
        for row, (start, _) in enumerate(spans):
            drawn["tokens"][start % 3 :: 3, row] = start % 100
        own = len(self.pools) - 1
        self.pools[:-1], self.born[:-1], self.last = before[:own], before[own:-1], before[-1]
        return spans

    def _version(self, view: Views, row: int) -> int:
        """Of the adapter in a row's slot; 0 without one."""
        if "adapters" not in view or view["adapters"][row] == len(self.tables):
            return 0
        version = self.tables[view["adapters"][row]]
        assert version != POISON, f"row {row} has a slot that nothing was loaded into"
        return version

    def _draw(
        self,
        view: Views,
        out: Views,
        row: int,
        step: int,
        kv: list[int],
        mask_W: np.ndarray | None = None,
    ) -> int:
        """Draw after a context; returns what the device's row keeps."""
        columns, is_open = view["controls"][row], step >= view["open_after"][row]
        stop_ids = [token for token in columns[len(CONTROLS) :].tolist() if token != PAD_TOKEN]
        banned = set() if is_open else set(stop_ids)
        if mask_W is not None:
            bits = np.unpackbits(mask_W.view(np.uint8), bitorder="little")
            banned |= set(np.flatnonzero(bits == 0).tolist())
            out["allowed_logprobs"].view(np.float32)[step, row] = 0.0
        token = next_token(kv, banned, int(columns[SAMPLE_INDEX]))
        out["tokens"][step, row] = token
        out["logprobs"].view(np.float32)[step, row] = -token / 8
        if "ranks" in out:
            out["ranks"][step, row] = 1
            ids, logprobs = zip(*top(kv, self.config.max_logprobs), strict=True)
            out["top_ids"][step, row], out["top_logprobs"].view(np.float32)[step, row] = (
                ids,
                logprobs,
            )
        if "kept_ids" in out:
            out["kept_ids"][step, row] = -1
            out["kept_ids"][step, row, 0] = token
            out["kept_logprobs"].view(np.float32)[step, row] = -token / 4
        kept = STOPPED if is_open and token in stop_ids else token
        if (at := view["device_rows"][row]) < len(self.last):  # else another row keeps what follows
            self.last[at] = kept
        return kept

    def _attend(
        self, tables: np.ndarray, end: int, tokens: list[int], *, is_last: bool = True
    ) -> tuple[list[int], list[int]]:
        """Write the KV of a row's tokens, the last of its context of `end`. Returns it, and the KV
        that the last token sees, of one group after the other. is_last: nothing more of the row
        follows in this step, which leaves its states then.
        """
        start = end - len(tokens)
        own, seen = [], []
        for at, (group, table) in enumerate(zip(self.kv_groups, tables, strict=True)):
            pool, born, size = self.pools[at], self.born[at], self.config.block_size
            if group.per == "block":
                state, era = 0, self.era
                if start:
                    read = int(table[(start - 1) // size])
                    # Rows side by side: none of them sees what another leaves in this step.
                    states = pool if self._states is None else self._states[at]
                    state, era = states[read], born[read]
                    assert state != POISON, "a row reads a state that nothing has written"
                own = list(itertools.accumulate(tokens, next_kv, initial=state))[1:]
                seen.append(own[-1])
                if is_last:
                    written = int(table[(end - 1) // size])
                    pool[written], born[written] = own[-1], era
                continue
            first = 0 if group.window is None else max(start - group.window + 1, 0)
            places = {p: int(table[p // size]) * size + p % size for p in range(first, end)}
            kv = [pool[places[p]] for p in range(first, start)]
            assert POISON not in kv, "a row reads a slot that nothing has written"
            for p, token in zip(range(start, end), tokens, strict=True):
                kv.append(next_kv(kv[-1] if kv else 0, token))
                pool[places[p]] = kv[-1]
                born[places[p]] = born[places[p - 1]] if p > first else self.era
            own = kv[-len(tokens) :]
            seen += kv if group.window is None else kv[-group.window :]
        return own, seen

    def read_blocks(self, block_ids: list[list[int]], replica: int = 0) -> list[list[Data]]:
        self._may_fail("read_blocks")
        return [[self._get(at, b) for b in ids] for at, ids in enumerate(block_ids)]

    def fetch_blocks(self, handle: list[list[Data]]) -> list[list[Data]]:
        self._may_fail("fetch_blocks")
        return handle

    def write_blocks(
        self, blocks: list[list[Data]], block_ids: list[list[int]], replica: int = 0
    ) -> None:
        self._may_fail("write_blocks")
        for at, (blocks_of_group, ids) in enumerate(zip(blocks, block_ids, strict=True)):
            assert len(set(ids)) == len(ids), "a block is written twice"
            for block, block_id in zip(blocks_of_group, ids, strict=True):
                self._put(at, block_id, block)

    def _slots(self, group: GroupSize) -> int:
        """Records in a block."""
        return 1 if group.per == "block" else self.config.block_size

    def _get(self, at: int, block_id: int) -> Data:
        slots = self._slots(self.kv_groups[at])
        place = slice(block_id * slots, (block_id + 1) * slots)
        return self.pools[at][place], self.born[at][place]

    def _put(self, at: int, block_id: int, block: Data) -> None:
        slots = self._slots(self.kv_groups[at])
        assert all(map(len, block)) and len(block[0]) == slots, "a block of another group"
        place = slice(block_id * slots, (block_id + 1) * slots)
        self.pools[at][place], self.born[at][place] = block

    def fetch(self, handle: Handle) -> list[StepResult]:
        self._may_fail("fetch")
        return unpack(handle.batch, self.config, handle.outs, weight_version=handle.era)

    def computed(self, phase: str) -> int:
        """Tokens dispatched in a phase so far."""
        return sum(
            end - start for p, spans in self.dispatched if p == phase for start, end in spans
        )

    def _may_fail(self, method: str) -> None:
        call = (method, self.calls[method])
        self.calls[method] += 1
        if call in self.fail:
            raise RuntimeError(f"{method} fails")


class MockBytes:
    """The BlockCodec of a MockRunner's blocks: the KV, then the eras."""

    def __init__(self, config: EngineConfig, windows: tuple[Window, ...] = (None,)):
        self._slots = [1 if window == "state" else config.block_size for window in windows]

    def stored_bytes(self, group: int) -> int:
        return 16 * self._slots[group]

    def block_to_bytes(self, group: int, data: Data) -> list[memoryview]:
        assert [len(part) for part in data] == [self._slots[group]] * 2
        return [memoryview(np.array(part, np.int64)) for part in data]

    def block_from_bytes(self, group: int, raw: Any) -> Data:
        values, eras = np.frombuffer(raw, np.int64).reshape(2, -1).tolist()
        return values, eras


class MockReplicas:
    """A device of several replicas: a MockRunner for each, which gets its part of every step."""

    def __init__(
        self, config: EngineConfig, count: int, *, shares_blocks: bool = True, **mock: Any
    ):
        self.config = config
        self.runners = [MockRunner(config, **mock) for _ in range(count)]
        self.kv_groups = self.runners[0].kv_groups
        self.shares_blocks = shares_blocks
        self.phases: list[tuple[str, list[bool]]] = []  # of each dispatch, and who had work in it

    def fit(self, buckets: StepShapes) -> StepShapes:
        return buckets

    def steps_at_once(self, bucket: DecodeShape) -> int:
        return bucket.steps

    def dispatch(self, batch: Batch) -> Handle:
        """Parts as the device would cut them from the joined buffers; one without work is padding
        alone.
        """
        count = len(self.runners)
        packed = np.split(batch.packed, count)
        copies = [None] * count if batch.copies is None else np.split(batch.copies, count)
        outs, replayed = [], []
        for runner, part, own, pairs in zip(self.runners, batch.each, packed, copies, strict=True):
            assert (part.bucket, part.sample) == (batch.bucket, batch.sample)
            moved = dataclasses.replace(part, packed=own, copies=pairs)
            if part.num_tokens:
                own_handle = runner.dispatch(moved)
                outs.append(own_handle.outs)
                replayed += own_handle.replayed
                continue
            view = _views(own, input_sections(batch.bucket, self.config)[0])
            if batch.sample is not None:
                view = _views(view["sample"], input_sections(batch.sample, self.config)[0])
            assert pairs is None or not pairs.any()
            assert not view["context_lens"].any()
            if batch.sample is not None or batch.bucket.phase == "decode":
                assert (view["device_rows"] == self.config.max_num_seqs).all()
            outs.append(None)
            replayed.append({})
        self.phases.append((batch.bucket.phase, [own is not None for own in outs]))
        self._drawing = outs  # of a draw that waits for its masks
        some = next(own for own in outs if own is not None)
        whole = [[out * 0 + POISON for out in some] if own is None else own for own in outs]
        joined = [np.concatenate(buffers) for buffers in zip(*whole, strict=True)]
        return Handle(batch, joined, self.runners[0].era, replayed)

    def replay(self, handle: Handle, rounds: list[list[list[Replay]]]) -> None:
        for index, runner in enumerate(self.runners):
            own = handle._replace(replayed=handle.replayed[index : index + 1])
            runner.replay(own, [[replays[index]] for replays in rounds])

    def draw(self, handle: Handle, masks_SW: np.ndarray | None = None) -> Handle:
        """Into the parts of the joined buffer of draws, the first of outs."""
        if masks_SW is None:
            return handle  # drawn where it was dispatched
        masks = np.split(masks_SW, len(self.runners))
        shares, drawn = np.split(handle.outs[0], len(self.runners)), self._drawing
        for runner, part, own, share in zip(self.runners, masks, drawn, shares, strict=True):
            if own is not None:
                runner.draw(handle, part)
                share[:] = own[0]
        return handle

    def fetch(self, handle: Handle) -> list[StepResult]:
        for runner in self.runners:
            runner._may_fail("fetch")
        return unpack(handle.batch, self.config, handle.outs, weight_version=handle.era)

    def read_blocks(self, block_ids: list[list[int]], replica: int = 0) -> Any:
        return replica, self.runners[replica].read_blocks(block_ids)

    def fetch_blocks(self, handle: Any) -> list[list[Data]]:
        replica, blocks = handle
        return self.runners[replica].fetch_blocks(blocks)

    def write_blocks(
        self, blocks: list[list[Data]], block_ids: list[list[int]], replica: int = 0
    ) -> None:
        self.runners[replica].write_blocks(blocks, block_ids)

    def recover(self) -> None:
        for runner in self.runners:
            runner.recover()


def _views(packed: np.ndarray, sections: dict[str, Section]) -> dict[str, np.ndarray]:
    return {
        k: packed[s.offset : s.offset + math.prod(s.shape)].reshape(s.shape)
        for k, s in sections.items()
    }


@functools.lru_cache(maxsize=4096)
def _stream(
    prompt: tuple[int, ...],
    count: int,
    eos: frozenset[int],
    min_tokens: int,
    index: int,
    windows: tuple[Window, ...],
    version: int,
    formed: bool,
) -> list[int]:
    kv = list(itertools.accumulate(adapted(prompt, version), next_kv, initial=0))[1:]
    tokens: list[int] = []
    while len(tokens) < count:
        banned = set(eos) if len(tokens) < min_tokens else set()
        if formed and len(banned | forbidden(tokens)) < VOCAB:
            banned |= forbidden(tokens)
        elif formed:  # a form that can only end does
            banned = forbidden(tokens)
        tokens.append(next_token(visible(kv, windows), banned, index))
        if tokens[-1] in eos:
            break
        kv.append(next_kv(kv[-1], *adapted(tokens[-1:], version)))
    return tokens


def visible(kv: list[int], windows: tuple[Window, ...]) -> list[int]:
    """What the last token of a context sees, of one group of layers after the other."""
    seen = list[int]()
    for window in windows:
        seen += kv if window is None else kv[-1:] if window == "state" else kv[-window:]
    return seen


def expected(seq: Sequence, windows: tuple[Window, ...] = (None,)) -> list[int]:
    """The tokens that a sequence gets when it is alone with an endless pool."""
    prompt = tuple(seq.token_ids[: seq.prompt_len])
    count = 0 if seq.score_only else max(seq.end - seq.prompt_len, 1)
    stops = seq.eos_ids | seq.stop_ids
    how = (seq.sampling_params.min_tokens, seq.index, windows, version_of(seq))
    return _stream(prompt, count, stops, *how, seq.structured is not None)


def version_of(seq: Sequence) -> int:
    return 0 if seq.adapter is None else seq.adapter.version


@functools.lru_cache(maxsize=1024)
def _beams(
    prompt: tuple[int, ...],
    count: int,
    eos: frozenset[int],
    width: int,
    num_candidates: int,
    penalty: float,
    early_stopping: EarlyStopping,
    windows: tuple[Window, ...],
    version: int,
) -> tuple[list[tuple[list[int], float]], int]:
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[list[int], float]] = []
    length = 0
    for length in range(1, count + 1):
        options = []
        for total, tokens in beams:
            seen = adapted([*prompt, *tokens], version)
            kv = list(itertools.accumulate(seen, next_kv, initial=0))[1:]
            likely = top(visible(kv, windows), num_candidates)
            options += [(total + np.float32(p).item(), [*tokens, t]) for t, p in likely]
        options = sorted(options, key=lambda option: -option[0])[:num_candidates]
        ended = [
            (t, p / length**penalty) for p, t in options[:width] if length == count or t[-1] in eos
        ]
        done = sorted(done + ended, key=lambda d: -d[1])[:width]
        beams = [(p, t) for p, t in options if length < count and t[-1] not in eos][:width]
        if beams and len(done) == width:
            reach = count if early_stopping == "never" and penalty > 0 else length
            if early_stopping is True or beams[0][0] / reach**penalty <= done[-1][1]:
                break
    return done, length


def expected_beams(
    search: BeamSearch, windows: tuple[Window, ...] = (None,)
) -> tuple[list[tuple[list[int], float]], int]:
    """The token ids and scores of a search whose beams are lists, each copied in full at every
    step; and its length.
    """
    root = search.sequences[0]
    prompt = tuple(root.token_ids[: root.prompt_len])
    count, width = search.end - search.prompt_len, search.width
    return _beams(
        prompt,
        count,
        root.eos_ids,
        width,
        search.num_candidates,
        search.length_penalty,
        search.early_stopping,
        windows,
        version_of(root),
    )


def generated(seq: Sequence) -> list[int]:
    return seq.token_ids[seq.prompt_len :]
