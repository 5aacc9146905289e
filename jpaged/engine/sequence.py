"""Sequence: one prompt with one completion, from admission to the last token; Request: all
completions of one prompt.
"""

import copy
import enum
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.constraint import Constraint, Text
from jpaged.engine.generated import Generated, Kept, Top
from jpaged.engine.origin import NOBODY, Origin
from jpaged.engine.scoring import Scored, Scoring
from jpaged.engine.spans import Spans
from jpaged.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"  # holds no blocks and no device row
    RUNNING = "running"  # holds a device row and the blocks of its tables
    FINISHED = "finished"


class Candidates(NamedTuple):
    """What a draw offers to a row that waits for its request. tokens: (token, logprob, rank) of the
    drawn one, then of the likeliest ones. weight_version: of the weights that drew.
    """

    tokens: Top
    weight_version: int


class Sequence:
    """One prompt and one completion of it.

    Positions count from 0. Tokens [0, num_dispatched) have their KV written by dispatches that went
    out; the token at position len(token_ids) and beyond is known to the device alone while
    `pending` samples are in flight. Between steps a decoding row has num_dispatched ==
    len(token_ids) + pending - 1.

    This file alone assigns the attributes of a sequence: its methods are the steps of its life.
    After the first values, which are set here too, these attributes have another owner:

        engine/cache/block_manager.py  block_tables, first_held, contents, hashes, generation
        engine/masks.py                ahead, num_masked
        engine/packing.py              controls
    """

    # Slots, not a dict, for speed: thousands of sequences are walked every step.
    __slots__ = (
        # what the caller asked for
        *("request", "request_id", "origin", "sampling_params", "key", "index", "salt", "adapter"),
        "spans",
        "named_salt",
        *("priority", "sampler", "eos_ids", "stop_ids"),
        *("prompt_len", "scoring", "end", "text", "structured", "waits_for_host", "controls"),
        *("ahead", "num_masked"),
        # what came of it
        *("token_ids", "generated", "prompt_logprobs", "scored", "candidates"),
        *("num_committed", "num_resumed", "num_cached", "finish_reason", "stop_reason", "error"),
        # where it stands
        *("status", "device_row", "is_new", "num_dispatched", "fill", "pending", "in_flight"),
        *("epoch", "adapter_slot"),
        # its blocks
        *("block_tables", "first_held", "contents", "hashes", "generation"),
        *("left_blocks", "chosen_experts"),
        "__weakref__",  # Drafter keeps what it knows of a sequence in a WeakKeyDictionary
    )
    request: "Request"

    def __init__(
        self,
        request_id: str,
        token_ids: Iterable[int],
        sampling_params: SamplingParams,
        *,
        max_model_len: int,
        key: tuple[int, int] = (0, 0),
        index: int = 0,
        salt: str | None = None,
        adapter: AdapterVersion | None = None,
        spans: Spans | None = None,
        eos_ids: frozenset[int] = frozenset(),
        text: Text | None = None,
        structured: Constraint | None = None,
        scoring: Scoring | None = None,
        origin: Origin | None = None,
    ):
        self.request_id = request_id
        self.origin = NOBODY if origin is None else origin  # who shares the engine with others
        self.token_ids = list(token_ids)  # prompt, then every committed token
        self.prompt_len = len(self.token_ids)
        self.sampling_params = sampling_params
        self.key = key  # threefry key data of the request
        self.index = index  # which of the request's samples
        self.priority = int(sampling_params.priority)  # lower ones run sooner
        # The least of the steps that can serve it: see SamplingParams.sampler.
        self.sampler: Literal["plain", "filtered", "full"] = sampling_params.sampler
        self.adapter = adapter
        self.spans = spans  # the embeddings in place of tokens of its prompt; None: there are none
        self.named_salt = salt
        # Cached blocks are shared under one salt and one version of an adapter only.
        self.salt = b"" if salt is None else salt.encode()
        self.salt += b"" if adapter is None else adapter.salt
        self.salt += b"" if scoring is None else scoring.salt
        self.eos_ids = frozenset() if sampling_params.ignore_eos else eos_ids
        # A jax scalar has no hash, and sums with it are jax's.
        self.stop_ids = frozenset(map(int, sampling_params.stop_token_ids or ()))
        self.text = text
        # The grammar that holds it, and its place there. Any spares callers a check for None.
        self.structured: Any = structured
        # (position, tokens): from that position on the grammar allows these tokens alone.
        self.ahead: tuple[int, list[int]] = (0, [])
        self.num_masked = 0  # how many draws of the current guessed run have a grammar's mask
        self.scoring = scoring  # of one that is scored: nothing is sampled
        asked = sampling_params.max_tokens
        limit = max_model_len if asked is None else self.prompt_len + int(asked)
        # The length at which it stops.
        self.end = self.prompt_len if scoring is not None else min(limit, max_model_len)
        # After each draw it runs on only when its request has chosen among `candidates`.
        self.waits_for_host = False
        self.controls: Any = None  # engine.packing's row of what does not change
        self.generated = Generated()  # the tokens that it has drawn
        # Of each prompt token but the first, unless `scored` has them.
        self.prompt_logprobs: list[Top | None] = [None]
        self.scored = None if scoring is None else Scored(scoring, self.prompt_len)
        # What the last draw offers to a row that waits for the host.
        self.candidates: Candidates | None = None
        # Tokens that a commit has dealt with to the end; an interrupt may fall before it.
        self.num_committed = self.prompt_len
        self.num_resumed = 0  # drawn tokens that it began with
        self.num_cached = 0  # prompt tokens that the first admission found in the cache
        # Of the experts that its tokens took: the blocks that it held when it ended, until they are
        # read; then int16 [tokens computed, layers, experts], None where nobody asks.
        self.left_blocks: list[int] = []
        self.chosen_experts: np.ndarray | None = None
        self.epoch = -1  # bumped at preemption: results of an older epoch are of other blocks
        self.restart()

    # What happens to it

    def restart(self, num_tokens: int | None = None) -> None:
        """Wait with nothing computed, also after a failed step.

        It keeps its first num_tokens tokens; None keeps all that were committed.
        """
        self.num_committed = self.num_committed if num_tokens is None else num_tokens
        del self.token_ids[self.num_committed :]
        self.generated.truncate(self.num_generated)
        self.ahead = (0, [])
        if self.structured is not None:
            self.structured.rewind(self.token_ids[self.prompt_len :])
        if self.text is not None:
            self.text.rewind(self.token_ids[self.prompt_len :], self.sampling_params.min_tokens)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self.status = Status.WAITING
        self.device_row = -1  # of the device's state while running
        self.adapter_slot: int | None = None  # of its adapter while running
        self.is_new = False  # took its row after the last dispatch: the state there is another's
        self.num_dispatched = 0
        self.fill = 0  # length up to which prefill runs (all tokens known at admission)
        self.pending = 0  # samples dispatched and not committed
        self.in_flight = 0  # dispatches that hold this sequence
        self.epoch += 1
        self.candidates = None
        self.hashes: list[int] = []  # chain hash of each full block of token_ids seen so far
        self.drop_blocks()

    def take_up(self, drawn: Generated, prompt_logprobs: Iterable[Top | None] = ()) -> None:
        """Begin with these tokens, which an earlier request of its prompt drew before it was cut;
        go on at the next one, as after a preemption. prompt_logprobs: of its prompt, where they are
        known. The engine does not have it yet.
        """
        self.token_ids += drawn.token_ids
        self.generated, self.num_resumed = drawn, len(drawn)
        self.prompt_logprobs = list(prompt_logprobs) or self.prompt_logprobs
        self.settle()
        self.epoch = -1
        self.restart()

    def drop_blocks(self) -> None:
        """Hold no blocks."""
        self.block_tables: tuple[array[int], ...] = ()  # one a group of layers
        self.first_held: list[int] = []  # in each table, before it the window has moved on
        self.contents: list[Any] = []  # of the leading blocks that are closed
        self.generation = 0  # of the cache that its KV is from

    def block_bytes(self, i: int, size: int, end: int | None = None) -> bytes:
        """Return what its block i is of, which two blocks have in common only if their KV is equal
        after equal blocks: the tokens as int32, up to position `end`, and before those of the first
        block the salt and the adapter; after them the embeddings in place of tokens. size: tokens a
        block.
        """
        start = i * size
        past = start + size if end is None else min(start + size, end)
        tokens = array("i", self.token_ids[start:past]).tobytes()
        if self.spans is not None:
            tokens += self.spans.block_bytes(start, past)
        return tokens if i else self.salt + tokens

    def stored_bytes(self, i: int, size: int) -> bytes | None:
        """Return what its block i is of, in a form that means the same in every process; None where
        no other process may find it. size: tokens a block.
        """
        start, past = i * size, (i + 1) * size
        ids = array("i", self.token_ids[start:past]).tobytes()
        if self.spans is not None:
            ids += self.spans.block_bytes(start, past, in_files=True)
        if i:
            return ids
        adapter, scoring = self.adapter, self.scoring
        salt = b"" if self.named_salt is None else self.named_salt.encode()
        routes = b"" if scoring is None else scoring.salt
        if self.salt != salt + (b"" if adapter is None else adapter.salt) + routes:
            return None  # it shares with no other request
        changes = b"" if adapter is None else adapter.digest
        if changes is None:
            return None
        parts = (salt, changes, routes)
        return array("q", map(len, parts)).tobytes() + b"".join(parts) + ids

    def run(
        self, *, device_row: int, adapter_slot: int | None, num_computed: int, fill: int
    ) -> None:
        """Begin to run in a row of the device. num_computed: tokens whose KV is in its blocks or
        on the way there. fill: the length up to which prefill runs.
        """
        if self.epoch == 0:
            self.num_cached = min(num_computed, self.prompt_len)
        self.device_row, self.is_new, self.adapter_slot = device_row, True, adapter_slot
        self.num_dispatched, self.fill = num_computed, fill
        self.status = Status.RUNNING

    def dispatch(self, end: int, draws: int) -> bool:
        """Count a dispatch that writes its KV up to position `end` and draws so many tokens. Return
        whether the device's row holds the state of another sequence.
        """
        is_new, self.is_new = self.is_new, False
        self.num_dispatched = end
        self.pending += draws
        self.in_flight += 1
        return is_new

    def arrive(self, epoch: int, draws: int) -> None:
        """Count the result of a dispatch that went out in this epoch and drew so many tokens, all
        of which have been dealt with: see `settle`.
        """
        self.in_flight -= 1
        if epoch == self.epoch:
            self.pending -= draws
        self.num_committed = len(self.token_ids)

    def append(
        self,
        token_id: int,
        logprob: float,
        weight_version: int,
        top: Top | None = None,
        allowed: float | None = None,
        kept: Kept | None = None,
    ) -> None:
        """Add a token that was drawn (see Generated.append); `settle` or `arrive` makes it last."""
        self.token_ids.append(token_id)
        self.generated.append(token_id, logprob, weight_version, top, allowed, kept)

    def settle(self) -> None:
        """Keep every token that it has now, also after a failed step."""
        self.num_committed = len(self.token_ids)

    def go_on_from(self, position: int) -> None:
        """Compute this position next: the KV before it is there, what follows it does not count."""
        self.num_dispatched = position

    def offer(self, candidates: Candidates) -> None:
        """Wait until the request has chosen among these continuations."""
        self.candidates = candidates

    def resume(self) -> None:
        """Go on: the request has chosen."""
        self.candidates = None

    def score_again(self) -> None:
        """Forget the scores of its prompt; it waits with nothing computed."""
        self.prompt_logprobs = [None]
        self.scored = None if self.scoring is None else Scored(self.scoring, self.prompt_len)

    def lose_row_state(self) -> None:
        """Have the next dispatch fill the device's row anew."""
        self.is_new = True

    def preempt(self) -> None:
        """Wait again, without a row and with nothing computed."""
        self.device_row, self.adapter_slot = -1, None
        self.status = Status.WAITING
        self.num_dispatched = self.fill = self.pending = 0
        self.epoch += 1

    def retire(self) -> None:
        """Leave for good, from any state. An interrupt before this undoes `conclude`."""
        self.device_row, self.adapter_slot = -1, None
        self.status = Status.FINISHED

    def leave_blocks(self, table: Iterable[int]) -> None:
        """Note the blocks that say which experts its tokens took, before they are given up."""
        self.left_blocks = list(table)

    def take_experts(self, blocks: np.ndarray) -> None:
        """Take what its blocks said: [tokens, layers, experts] of at least those that it has
        computed.
        """
        computed = min(self.num_dispatched, len(self.token_ids) - 1)
        self.chosen_experts = blocks[:computed].astype(np.int16)
        self.left_blocks = []

    def conclude(
        self, reason: str, stop: int | str | None = None, error: Exception | None = None
    ) -> None:
        """Note why it ends, before it retires."""
        self.finish_reason, self.stop_reason, self.error = reason, stop, error

    # Where it stands

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        name = f"{self.request_id!r}[{self.index}]"
        return (
            f"Sequence({name}, {self.status.value}, {self.prompt_len}+{self.num_generated} tokens)"
        )

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_being_scored(self) -> bool:
        """Whether scores of its prompt are wanted, or hidden states, and nothing is drawn yet."""
        is_scored = self.scoring is not None or self.sampling_params.prompt_logprobs is not None
        return is_scored and not self.num_generated

    @property
    def score_only(self) -> bool:
        """Whether it is scored alone: nothing is sampled."""
        return self.scoring is not None

    @property
    def scores_form(self) -> bool:
        """Whether it is scored under the masks of its form."""
        return self.score_only and self.structured is not None

    @property
    def next_read(self) -> int | None:
        """The next position whose hidden state is to be scored or returned, which must be computed;
        None where none is.
        """
        if self.scoring is not None and self.scored is not None:
            at, past = self.scoring.first + self.scored.count, self.scoring.past(self.prompt_len)
        elif self.sampling_params.prompt_logprobs is not None:
            at, past = len(self.prompt_logprobs) - 1, self.prompt_len - 1
        else:
            return None
        return at if at < past else None

    def positions_read(self, start: int, end: int) -> range:
        """Return the positions in [start, end) whose hidden states are scored, or returned."""
        if self.scoring is not None:
            first, past = self.scoring.first, self.scoring.past(self.prompt_len)
        elif self.sampling_params.prompt_logprobs is not None:
            first, past = 0, self.prompt_len - 1
        else:
            return range(0)
        return range(max(start, first), min(end, past))

    @property
    def forced(self) -> list[int]:
        """The tokens that a decode goes on with, one after the other, as far as they are certain
        before they are drawn.
        """
        begins, tokens = self.ahead
        at = self.num_dispatched - begins
        return tokens[at:] if at >= 0 else []

    @property
    def is_prefilling(self) -> bool:
        """Running with tokens of its prompt (or of its recomputation) still to be dispatched."""
        return self.num_dispatched < self.fill

    @property
    def can_decode(self) -> bool:
        """Whether one more token may be dispatched: prefill is out, and those in flight do not
        reach the end.
        """
        if self.waits_for_host and (self.pending or self.candidates is not None):
            return False
        is_prefilled = self.num_dispatched >= self.fill
        return is_prefilled and len(self.token_ids) + self.pending < self.end

    @property
    def num_closed(self) -> int:
        """Leading blocks that are full and findable, none of them where the cache is off."""
        return len(self.contents)

    def copy(self) -> "Sequence":
        """Return a waiting sequence of the same tokens."""
        twin = copy.copy(self)
        twin.token_ids = list(self.token_ids)
        twin.prompt_logprobs = list(self.prompt_logprobs)
        twin.scored = None if self.scored is None else self.scored.copy()
        twin.generated = self.generated.copy()
        twin.text = copy.deepcopy(self.text)
        twin.structured = None if self.structured is None else self.structured.copy()
        twin.restart()
        return twin


class Request:
    """What one caller asked for: the samples of one prompt, in order. Some may have ended before
    the engine takes it. salt: under which cached prefixes of its prompt are shared. weight_version:
    of the weights when the engine takes it, of newer ones that came before it had drawn anything,
    or of those that drew the first of the tokens that it began with. is_streamed: whether somebody
    follows its tokens while they are drawn.
    """

    steers = False  # whether its rows wait for `steer` after each draw

    def __init__(
        self,
        sequences: Iterable[Sequence],
        *,
        prompt: str | None = None,
        salt: str | None = None,
        is_streamed: bool = False,
    ):
        self.sequences = list(sequences)
        self.max_sequences = len(self.sequences)  # that there may be at once
        self.request_id = self.sequences[0].request_id
        self.prompt, self.salt, self.is_streamed = prompt, salt, is_streamed
        self.weight_version = 0
        # Of samples that had ended before: what became of them, by index, for whoever collects.
        self.ended: Mapping[int, object] = {}
        for seq in self.sequences:
            seq.request = self
            seq.waits_for_host = self.steers

    def rename(self, request_id: str) -> None:
        """Take another id, before the engine has the request."""
        self.request_id = request_id
        for seq in self.sequences:
            seq.request_id = request_id

    def give_up(self) -> None:
        """End the samples that have not ended, of a request that the engine does not have."""
        for seq in self.sequences:
            if seq.status is not Status.FINISHED:
                seq.conclude("abort")
                seq.retire()

    def hide(self, number: int) -> None:
        """Let no other request find its cached blocks. number: no other request has it."""
        for seq in self.sequences:
            # No text holds this byte in UTF-8, so neither does a caller's salt.
            seq.salt += b"\xff" + number.to_bytes(8, "little")
            seq.hashes.clear()

    @property
    def has_drawn(self) -> bool:
        """Whether any of its samples has a token."""
        return bool([seq for seq in self.sequences if seq.num_generated])

    @property
    def is_finished(self) -> bool:
        return not [seq for seq in self.sequences if seq.status is not Status.FINISHED]

    def blocks_needed(self, block_size: int) -> list[int]:
        """Return the number of blocks of each sequence at full length; those of the prompt count
        once.
        """
        first = self.sequences[0]
        whole, shared = -(-first.end // block_size), first.prompt_len // block_size
        return [whole, *[whole - shared] * (self.max_sequences - 1)]

    @property
    def error(self) -> Exception | None:
        """What went wrong first, None if nothing did."""
        errors = [seq.error for seq in self.sequences if seq.error is not None]
        return errors[0] if errors else None

    def steer(self, queues: Any) -> None:
        """Choose among the candidates of rows that wait for it; called where `steers`."""

    def doomed_with(self, seq: Sequence) -> list[Sequence]:
        """Return the sequences that cannot go on when this one fails."""
        return [seq]

    def restart(self) -> list[Sequence]:
        """Return what is to be computed again after a failed step, as if it had just been added."""
        unfinished = [seq for seq in self.sequences if seq.status is not Status.FINISHED]
        for seq in unfinished:
            seq.restart()
        return unfinished
