"""PrefillPlanner: the chunks of prompts of one step, and who is admitted to run."""

from jpaged.engine.cache.prefix_cache import Match
from jpaged.engine.plan import PlanEntry, dispatch
from jpaged.engine.queues import Queues
from jpaged.engine.sequence import Sequence

Chunk = list[PlanEntry]  # a chunk of a prompt, then the forks that draw after it


class PrefillPlanner:
    """Plans one prefill. budget: tokens that it may compute at most."""

    def __init__(self, queues: Queues, budget: int):
        self.queues = queues
        self.blocks = queues.blocks
        self.budget = budget
        self.chunks: list[Chunk] = []
        self._last_chunks: dict[bytes, Chunk] = {}  # that end a prompt, by what the prompt holds

    def plan(self) -> list[PlanEntry]:
        """Chunks of prompts that have begun, then of new admissions, as the policy has them."""
        # At most one has begun, unless a budget cut two plans.
        for seq in self.queues.waiting.by_urgency(self.queues.running):
            if self.budget and seq.is_prefilling:
                self._add_chunk(seq)
        while self.queues.free_rows and (seq := self.queues.waiting.next()) is not None:
            if not self._admit(seq):
                break
        return [entry for chunk in self.chunks for entry in chunk]

    def _admit(self, seq: Sequence) -> bool:
        """Admit a waiting sequence, or fail it if it never can be; False: it must wait."""
        if seq.in_flight:  # preempted while a step holds it: its tokens are not all known yet
            return False
        if not self.blocks.fits(len(seq)):
            self.queues.fail(seq)
            return True
        if not self.queues.adapters.has_room(seq.adapter):
            return False
        match = self._match(seq)
        # A block in hand for every row that runs: an admission that forces a preemption at once is
        # wasted work.
        reserve = len(self.queues.running)
        if (leader := self._leader(seq, match)) is not None:
            if not self.blocks.has_free(reserve):
                return False
            self.queues.join(seq, leader[0].seq)
            leader.append(dispatch(seq, len(seq), 0, draws=1))
            return True
        if not self.budget:
            return False
        end = min(len(seq), match.num_blocks * self.blocks.block_size + self.budget)
        if reserve and not self.blocks.has_room(seq, match, end, reserve=reserve):
            return False
        self.queues.admit(seq, match)
        self._add_chunk(seq, match.num_known * self.blocks.block_size)
        return True

    def _match(self, seq: Sequence) -> Match:
        # Prompt logprobs need every prompt token computed, so such a request hits no further than
        # its prompt has been scored, before it was preempted.
        num_scored = len(seq.prompt_logprobs) - 1
        if seq.sampling_params.prompt_logprobs is None or num_scored + 1 == seq.prompt_len:
            return self.blocks.cache.match(seq)
        return self.blocks.cache.match(seq, most=num_scored)

    def _leader(self, seq: Sequence, match: Match) -> Chunk | None:
        """The chunk of this plan that ends the very same tokens, if a fork of its sequence is what
        to run.

        A fork computes nothing. It shares the open block too, which is copied when written: samples
        of one request are always forks; other requests are where the cached blocks leave more than
        the one token to compute.
        """
        if not self._last_chunks or seq.sampling_params.prompt_logprobs is not None:
            return None
        leader = self._last_chunks.get(_content(seq))
        if leader is None or leader[0].seq.request is seq.request:
            return leader
        rest = len(seq) - match.num_blocks * self.blocks.block_size
        return leader if self.blocks.cache.is_on and rest > 1 else None

    def _add_chunk(self, seq: Sequence, parting: int = 0) -> None:
        """Plan the next chunk of a prompt; none while a group with a window lacks blocks for it.
        parting: tokens that another sequence is known to have too.
        """
        start = seq.num_dispatched
        end = min(start + self.budget, seq.fill, self.blocks.reach(seq))
        assert start < seq.fill <= len(seq), f"{seq!r}: nothing to compute from {start}"
        if end <= start:
            return
        end = self.blocks.stop_before(start, end, parting)
        self.blocks.extend(seq, end)
        self.blocks.close_ahead(seq, end)
        draws = end == seq.fill and not seq.score_only
        chunk = [dispatch(seq, start, end - start, draws=int(draws))]
        self.chunks.append(chunk)
        self.budget -= end - start
        if draws:
            self._last_chunks[_content(seq)] = chunk


def _content(seq: Sequence) -> bytes:
    """Return all that a sequence is of, as one block."""
    return seq.block_bytes(0, len(seq))
