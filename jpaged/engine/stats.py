"""Stats: what an engine has done so far."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from time import perf_counter

from jpaged.engine.packing import Batch
from jpaged.engine.plan import Plan
from jpaged.engine.types import Report


class Stats:
    """Running totals of one engine. Times in seconds; tokens, steps and preemptions are counts.

    prompt_tokens, cached_tokens, generated_tokens: of the requests that have ended. dispatches: a
    prefill with the draw after it, or up to decode_steps steps of decode (those that run at most).
    host_time_s: scheduling, packing, dispatching and committing. device_time_s: waiting for
    results. mask_time_s: making masks of rows whose answers have a form, while the device works.
    padded_tokens: rows of tokens computed, padding included. preemptions: counts of what was
    "preempted" and, once it runs again, whether blocks of it were loaded from the host ("swapped")
    or not ("recomputed"). states: of a model that keeps a state a sequence, admissions that went on
    from one that was kept ("hits"), and those whose beginning was computed before, up to where no
    state was kept any more or none ever was ("misses"). swap_out_bytes, swap_in_bytes: of blocks
    moved to the host and back. loaded_blocks: that came back. idle_replica_steps: dispatches in
    which a replica had nothing to do, of as many as there are dispatches and replicas.
    adapter_loads: adapters written into slots. embedded_tokens: computed with embeddings in their
    place.
    """

    def __init__(self) -> None:
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.prefill_steps = self.decode_steps = self.dispatches = 0
        self.prefill_tokens = self.decode_tokens = self.padded_tokens = 0
        self.prefill_time_s = self.decode_time_s = self.host_time_s = self.device_time_s = 0.0
        self.mask_time_s = 0.0
        self.copied_blocks = self.swap_out_bytes = self.swap_in_bytes = self.peak_blocks_in_use = 0
        self.loaded_blocks = 0
        self.idle_replica_steps = self.adapter_loads = self.embedded_tokens = 0
        self._last_done = 0.0
        self.preemptions: Counter[str] = Counter()
        self.states: Counter[str] = Counter()
        self.prefill_sizes: Counter[int] = Counter()  # steps by their number of tokens
        self.decode_sizes: Counter[int] = Counter()  # and of rows

    def count(self, plan: Plan, batch: Batch, blocks_in_use: int) -> None:
        """Record a dispatch."""
        self.peak_blocks_in_use = max(self.peak_blocks_in_use, blocks_in_use)
        self.padded_tokens += batch.padded_tokens
        self.copied_blocks += sum(map(len, plan.copies))
        self.dispatches += 1
        self.adapter_loads += sum([len(part.loads) for part in batch.each])
        self.embedded_tokens += sum([piece.size for part in batch.each for piece in part.embedded])
        self.idle_replica_steps += sum([not part.num_tokens for part in batch.parts])
        decoded = sum([entry.num_tokens for entry in plan.entries if entry.decodes])
        self.decode_tokens += decoded
        self.prefill_tokens += batch.num_tokens - decoded
        if plan.verifies:
            self.decode_steps += 1
            self.decode_sizes[batch.num_tokens] += 1
        elif batch.bucket.phase == "prefill":
            self.prefill_steps += 1
            self.prefill_sizes[batch.num_tokens] += 1
        else:
            self.decode_steps += batch.steps
            self.decode_sizes[batch.num_rows] += batch.steps

    @contextlib.contextmanager
    def masking(self) -> Iterator[None]:
        """Record the time that making masks takes."""
        started = perf_counter()
        yield
        self.mask_time_s += perf_counter() - started

    def time(
        self,
        plan: Plan,
        *,
        dispatched_at: float,
        step_began_at: float,
        fetch_began_at: float,
        fetch_ended_at: float,
    ) -> tuple[float, bool]:
        """Record a step that has just been committed. All times are readings of one clock.

        dispatched_at: when the call began that dispatched it. step_began_at: when the call began
        that commits it. Return its duration, overlap with the previous step excluded, and whether
        it was dispatched before the previous step was committed.
        """
        done = perf_counter()
        self.device_time_s += fetch_ended_at - fetch_began_at
        self.host_time_s += (fetch_began_at - step_began_at) + (done - fetch_ended_at)
        took = done - max(dispatched_at, self._last_done)
        ran_ahead = dispatched_at < self._last_done
        self._last_done = done
        if plan.phase == "prefill" and not plan.verifies:
            self.prefill_time_s += took
        else:
            self.decode_time_s += took
        return took, ran_ahead

    def report(self) -> Report:
        """Return the totals and what follows from them."""
        totals = {
            name: x
            for name, x in vars(self).items()
            if not isinstance(x, Counter) and not name.startswith("_")
        }
        sizes = {"prefill": dict(self.prefill_sizes), "decode": dict(self.decode_sizes)}
        computed, prompts = self.prefill_tokens + self.decode_tokens, self.prompt_tokens
        return {
            **totals,
            "step_sizes": sizes,
            "steps": self.prefill_steps + self.decode_steps,
            "padding_waste": 1 - computed / self.padded_tokens if self.padded_tokens else 0.0,
            "prefix_hit_rate": self.cached_tokens / prompts if prompts else 0.0,
            "preemptions": self.preemptions["preempted"],
            "preemptions_swapped": self.preemptions["swapped"],
            "preemptions_recomputed": self.preemptions["recomputed"],
            "state_hits": self.states["hits"],
            "state_misses": self.states["misses"],
        }
