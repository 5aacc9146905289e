"""Sequence: the one mutable record of a completion, from admission to its last token; Request:
those of one prompt.
"""

import copy
import dataclasses
import enum
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import Any

from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.constraint import Constraint, Text
from jpaged.engine.origin import Origin
from jpaged.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"  # holds no blocks and no device row
    RUNNING = "running"  # holds a device row and the blocks of its tables
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Swapped:
    """The KV of a preempted sequence's first `num_tokens` tokens, on the host: what later ones see.

    num_bytes: that it takes there. data: the runner's; None until moved.
    """

    num_tokens: int
    num_bytes: int
    data: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Swapped":
        return self  # never written again: a snapshot shares it


class Sequence:
    """One prompt and one completion of it.

    Positions count from 0. Tokens [0, num_dispatched) have their KV written by dispatches that went
    out; the token at position len(token_ids) and beyond is known to the device alone while
    `pending` samples are in flight. Between steps a decoding row has num_dispatched ==
    len(token_ids) + pending - 1.

    Who fills what. The caller, once: request_id, origin, token_ids[:prompt_len], sampling_params,
    key, index, salt, adapter, stop_ids, text, structured. Request: request. Commit: the rest of
    token_ids, logprobs, top_logprobs, allowed_logprobs, prompt_logprobs, candidates, num_committed,
    finish_reason, stop_reason, error. BlockManager and PrefixCache: block_tables, first_held,
    contents, hashes, generation. Scheduler and Queues: all else.
    """

    # Slots, not a dict, for speed: thousands of sequences are walked every step.
    __slots__ = (
        # what the caller asked for
        *("request", "request_id", "origin", "sampling_params", "key", "index", "salt", "adapter"),
        *("eos_ids", "stop_ids"),
        *("prompt_len", "score_only", "end", "text", "structured", "waits_for_host", "controls"),
        *("ahead", "num_masked"),
        # what came of it
        *("token_ids", "logprobs", "top_logprobs", "allowed_logprobs", "prompt_logprobs"),
        *("candidates",),
        *("num_committed", "num_cached", "finish_reason", "stop_reason", "error"),
        # where it stands
        *("status", "device_row", "is_new", "num_dispatched", "fill", "pending", "in_flight"),
        *("epoch", "swapped", "adapter_slot"),
        # its blocks
        *("block_tables", "first_held", "contents", "hashes", "generation"),
        "__weakref__",  # for what others know of it
    )
    request: "Request"

    def __init__(
        self,
        request_id: str,
        token_ids: List[int],
        sampling_params: SamplingParams,
        *,
        max_model_len: int,
        key: tuple[int, int] = (0, 0),
        index: int = 0,
        salt: str | None = None,
        adapter: AdapterVersion | None = None,
        eos_ids: frozenset[int] = frozenset(),
        text: Text | None = None,
        structured: Constraint | None = None,
        score_only: bool = False,
        origin: Origin | None = None,
    ):
        self.request_id = request_id
        self.origin = origin  # who shares the engine fairly with others
        self.token_ids = list(token_ids)  # prompt, then every committed token
        self.prompt_len = len(token_ids)
        self.sampling_params = sampling_params
        self.key = key  # threefry key data of the request
        self.index = index  # which of the request's samples
        self.adapter = adapter
        # Cached blocks are shared under one salt and one version of an adapter only.
        self.salt = b"" if salt is None else salt.encode()
        self.salt += b"" if adapter is None else adapter.salt
        self.eos_ids = frozenset() if sampling_params.ignore_eos else eos_ids
        self.stop_ids = frozenset(sampling_params.stop_token_ids or ())
        self.text = text
        # Where it stands in the form that was asked for; Any: who has it knows that it has.
        self.structured: Any = structured
        # (position, tokens): those that the form leaves no choice about, from a position on.
        self.ahead: tuple[int, list[int]] = (0, [])
        self.num_masked = 0  # draws of a run that guesses that are under their masks
        self.score_only = score_only  # prompt logprobs only: nothing is sampled
        asked = sampling_params.max_tokens
        limit = max_model_len if asked is None else self.prompt_len + asked
        # The length at which it stops.
        self.end = self.prompt_len if score_only else min(limit, max_model_len)
        # After each draw it runs on only when its request has taken up `candidates`.
        self.waits_for_host = False
        self.controls: Any = None  # engine.packing's row of what does not change
        self.logprobs: list[float] = []  # of each generated token
        # (token, logprob, rank) of the drawn and the likeliest tokens, asked by `logprobs`.
        self.top_logprobs: list[list[tuple[int, float, int]]] = []
        # Of each generated token, what the model gives to all that its form allowed there.
        self.allowed_logprobs: list[float] = []
        # Of each prompt token but the first.
        self.prompt_logprobs: list[list[tuple[int, float, int]] | None] = [None]
        # What the last draw offers a row that waits for the host, as in top_logprobs.
        self.candidates: list[tuple[int, float, int]] | None = None
        # Tokens that commit was done with: it may be interrupted.
        self.num_committed = self.prompt_len
        self.num_cached = 0  # prompt tokens that the first admission found in the cache
        self.epoch = -1  # bumped at preemption: results of an older epoch are of other blocks
        self.restart()

    def restart(self) -> None:
        """Waiting with nothing computed, also after a failed step; all that was committed stays."""
        del self.token_ids[self.num_committed :]
        del self.logprobs[self.num_generated :]
        del self.top_logprobs[self.num_generated :]
        del self.allowed_logprobs[self.num_generated :]
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
        self.swapped: Swapped | None = None  # KV kept on the host while it waits
        self.candidates = None
        self.hashes: list[int] = []  # chain hash of each full block of token_ids seen so far
        self.drop_blocks()

    def drop_blocks(self) -> None:
        """Hold no blocks."""
        self.block_tables: tuple[array[int], ...] = ()  # one a group of layers
        self.first_held: list[int] = []  # in each table, before it the window has moved on
        self.contents: list[Any] = []  # of the leading blocks that are closed
        self.generation = 0  # of the cache that its KV is from

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
    def scores_form(self) -> bool:
        """Whether it is scored under the masks of its form."""
        return self.score_only and self.structured is not None

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
        return not self.is_prefilling and len(self.token_ids) + self.pending < self.end

    @property
    def num_closed(self) -> int:
        """Leading blocks that are full and findable, none of them where the cache is off."""
        return len(self.contents)

    def extend(self, token: int, logprob: float) -> "Sequence":
        """Append one token."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.num_committed = len(self.token_ids)
        return self

    def copy(self) -> "Sequence":
        """A waiting sequence of the same tokens."""
        twin = copy.copy(self)
        lists = ("token_ids", "logprobs", "top_logprobs", "allowed_logprobs", "prompt_logprobs")
        for name in lists:
            setattr(twin, name, list(getattr(self, name)))
        twin.text = copy.deepcopy(self.text)
        twin.structured = None if self.structured is None else self.structured.copy()
        twin.restart()
        return twin


class Request:
    """What one caller asked for: the samples of one prompt, in order. weight_version: set when the
    engine takes it.
    """

    def __init__(self, sequences: Iterable[Sequence], *, prompt: str | None = None):
        self.sequences = list(sequences)
        self.request_id = self.sequences[0].request_id
        self.prompt = prompt
        self.weight_version = 0
        for seq in self.sequences:
            seq.request = self

    def rename(self, request_id: str) -> None:
        """Take another id, before the engine has the request."""
        self.request_id = request_id
        for seq in self.sequences:
            seq.request_id = request_id

    @property
    def is_finished(self) -> bool:
        return all(seq.status is Status.FINISHED for seq in self.sequences)

    @property
    def max_sequences(self) -> int:
        """How many there may be at once."""
        return len(self.sequences)

    def blocks_needed(self, block_size: int) -> list[int]:
        """Blocks of each sequence at full length; those of the prompt count once."""
        first = self.sequences[0]
        whole, shared = -(-first.end // block_size), first.prompt_len // block_size
        return [whole, *[whole - shared] * (self.max_sequences - 1)]

    @property
    def error(self) -> Exception | None:
        """What went wrong first, None if nothing did."""
        return next((seq.error for seq in self.sequences if seq.error is not None), None)

    def steer(self, queues: Any) -> None:
        """Go on with rows that wait for the host (see Sequence.candidates), if it has any."""

    def doomed_with(self, seq: Sequence) -> list[Sequence]:
        """The sequences that cannot go on when this one fails."""
        return [seq]

    def restart(self) -> list[Sequence]:
        """What is to be computed again after a failed step, as if it had just been added."""
        unfinished = [seq for seq in self.sequences if seq.status is not Status.FINISHED]
        for seq in unfinished:
            seq.restart()
        return unfinished
