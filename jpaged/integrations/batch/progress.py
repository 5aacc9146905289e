"""Shows the progress of a run: lines, tokens a second, time left and errors by kind, in a tqdm bar
on a terminal, in a plain line every few seconds elsewhere, or not at all.
"""

import sys
import time
from collections import Counter
from typing import Any, Literal

from jpaged.integrations.batch.stats import BatchStats

LINES_EVERY_S, BAR_EVERY_S = 5.0, 0.5
MOST_KINDS = 3  # of errors that are shown by name


class Progress:
    """Reads the engine's counters at intervals and shows those of the run. `stats.watch` is called
    even if nothing is shown.
    """

    def __init__(self, mode: Literal["bar", "lines", "none"], stats: BatchStats):
        self._stats, self._mode, self._bar = stats, mode, None
        self._watched = self._shown = time.perf_counter()
        self._tokens = (0.0, 0.0)
        if mode == "bar":
            from tqdm import tqdm

            self._bar = tqdm(
                total=stats.total,
                initial=stats.done,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            )

    def update(self, llm: Any, *, now: bool = False) -> None:
        """Show the progress if it is time to."""
        at = time.perf_counter()
        if now or at - self._watched >= BAR_EVERY_S:
            self._stats.watch(llm)
            self._watched = at
        every, elapsed = LINES_EVERY_S if self._bar is None else BAR_EVERY_S, at - self._shown
        if self._mode == "none" or not (now or elapsed >= every):
            return
        self._shown, stats = at, self._stats
        text = self._text(max(elapsed, 1e-9))
        if self._bar is not None:
            self._bar.total = stats.total
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(stats.done - self._bar.n)
            self._bar.refresh()
        else:
            of = "" if stats.total is None else f"/{stats.told_total}"
            line = f"[{stats.seconds:.0f} s] {stats.done}{of} done, {text}"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _text(self, elapsed: float) -> str:
        stats = self._stats
        tokens = stats.counted("prefill_tokens"), stats.counted("decode_tokens")
        rates = [(new - old) / elapsed for new, old in zip(tokens, self._tokens, strict=True)]
        self._tokens = tokens
        parts = [failures(stats), f"{rates[0]:.0f} tok/s in, {rates[1]:.0f} out"]
        parts.append(f"cache {stats.cached_percent:.0f}%")
        if stats.preemptions:
            parts.append(f"{stats.preemptions} preemptions")
        if (left := stats.seconds_left) is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)


def failures(stats: BatchStats) -> str:
    """Return how many lines have failed, and of which kinds, the most frequent first."""
    kinds = Counter(stats.errors)
    kinds.update({code: count for code, (count, _) in stats.earlier_errors.items()})
    named = [f"{count} {code}" for code, count in kinds.most_common(MOST_KINDS)]
    if len(kinds) > MOST_KINDS:
        named.append(f"{kinds.total() - sum(n for _, n in kinds.most_common(MOST_KINDS))} others")
    return f"{stats.all_failed} failed" + (f" ({', '.join(named)})" if named else "")


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds, the two largest of them: "3h 05m"."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h {m:02}m" if hours else f"{m}m {s:02}s" if m else f"{s}s"
