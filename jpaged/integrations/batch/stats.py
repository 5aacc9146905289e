"""BatchStats: the counters of a run, which progress, summary, metrics and report read."""

import dataclasses
import functools
import time
from array import array
from collections import Counter
from typing import Any, Literal

import numpy as np

from jpaged.integrations.batch.rows import FIRST
from jpaged.integrations.batch.timeline import Timeline
from jpaged.openai.responses import Failure
from jpaged.request.outputs import RequestOutput

SAMPLES = 3  # answers that are kept as examples
TIMED = ("prefill_tokens", "decode_tokens")  # counters whose values over time are kept
# Whose limit cut an answer off: max_tokens of its line, of the run or by default, or the context.
CutBy = Literal["line", "run", "context"]
RAISE: dict[CutBy, str] = {
    "line": "the max_tokens of the lines themselves",
    "run": "--max-tokens",
    "context": "--max-model-len",
}
COUNTERS = (*TIMED, "preemptions", "num_compiles", "compile_time_s")  # entries of LLM.stats


_floats, _counts = functools.partial(array, "f"), functools.partial(array, "I")


@dataclasses.dataclass
class Answered:
    """Columns with what is known of every answered line, in the order in which they finished: 16
    bytes a line.

    latency: seconds from the line's start in the engine to its end. finished: seconds since the run
    began.
    """

    latency: array = dataclasses.field(default_factory=_floats)
    finished: array = dataclasses.field(default_factory=_floats)
    prompt_tokens: array = dataclasses.field(default_factory=_counts)
    completion_tokens: array = dataclasses.field(default_factory=_counts)

    def __len__(self) -> int:
        return len(self.latency)


@dataclasses.dataclass
class BatchStats:
    """The counters of one run. Lines that an earlier run answered are counted separately; `total`
    includes all.

    total: lines to answer, None if unknown; total_is_exact: whether it is not an estimate from the
    bytes read. running: requests in the engine now. errors: failed lines by code; first_lines: the
    first line numbers by code; first_messages: the message of the first one by code.
    earlier_errors: failed lines of earlier runs by code: how many, and the first line numbers.
    cut_by: answers that a limit of tokens cut off, by whose limit it was. ignored: unknown fields
    that were left out. samples: the first answered lines, as examples. engine: LLM.stats() as last
    read; engine_began: the same when the run began.
    """

    began: float = dataclasses.field(default_factory=time.perf_counter)
    began_at: float = dataclasses.field(default_factory=time.time)
    ended: float | None = None
    ok: int = 0
    failed: int = 0
    earlier_ok: int = 0
    earlier_failed: int = 0
    earlier_errors: dict[str, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)
    total: int | None = None
    total_is_exact: bool = False
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    running: int = 0
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)
    cut_by: Counter[CutBy] = dataclasses.field(default_factory=Counter)
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    first_lines: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    first_messages: dict[str, str] = dataclasses.field(default_factory=dict)
    ignored: Counter[str] = dataclasses.field(default_factory=Counter)
    samples: list[str] = dataclasses.field(default_factory=list)
    timeline: Timeline = dataclasses.field(default_factory=lambda: Timeline(TIMED))
    answered: Answered = dataclasses.field(default_factory=Answered)
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    engine_began: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def done(self) -> int:
        """Return how many lines have an output line, including those of earlier runs."""
        return self.ok + self.failed + self.earlier_ok + self.earlier_failed

    @property
    def all_failed(self) -> int:
        return self.failed + self.earlier_failed

    @property
    def seconds(self) -> float:
        return max((time.perf_counter() if self.ended is None else self.ended) - self.began, 1e-9)

    def counted(self, name: str) -> float:
        """Return how much one of COUNTERS has grown in this run."""
        return self.engine.get(name, 0) - self.engine_began.get(name, 0)

    @property
    def preemptions(self) -> int:
        return int(self.counted("preemptions"))

    @property
    def cached_percent(self) -> float:
        """Return the percentage of prompt tokens that were found in the prefix cache."""
        return 100 * self.tokens_cached / max(self.tokens_in, 1)

    @property
    def told_total(self) -> str:
        """Return `total` as text, marked if it is an estimate."""
        return f"{'' if self.total_is_exact else '~'}{self.total}"

    @property
    def seconds_left(self) -> float | None:
        """Return the remaining seconds at this run's pace; None before its first line, or if the
        total is unknown.
        """
        here = self.ok + self.failed
        if self.total is None or not here:
            return None
        return self.seconds / here * max(self.total - self.done, 0)

    def watch(self, llm: Any) -> None:
        """Read the engine's counters; the first call also keeps them as those at the start."""
        self.engine = llm.stats()
        self.engine_began = self.engine_began or {k: self.engine.get(k, 0) for k in COUNTERS}
        self.timeline.add([self.counted(name) for name in TIMED], at=self.seconds)

    def add(self, output: RequestOutput, latency: float) -> None:
        """Count an answered line. latency: in seconds."""
        prompt = len(output.prompt_token_ids)
        completion = sum(len(done.token_ids) for done in output.outputs)
        self.ok += 1
        self.tokens_in += prompt
        self.tokens_out += completion
        self.tokens_cached += output.num_cached_tokens
        self.reasons.update(str(done.finish_reason) for done in output.outputs)
        self.answered.latency.append(latency)
        self.answered.finished.append(time.perf_counter() - self.began)
        self.answered.prompt_tokens.append(prompt)
        self.answered.completion_tokens.append(completion)

    def add_pooled(self, tokens: int, latency: float) -> None:
        """Count an answered line of embeddings, scores or ranks. latency: in seconds."""
        self.ok += 1
        self.tokens_in += tokens
        self.answered.latency.append(latency)
        self.answered.finished.append(time.perf_counter() - self.began)
        self.answered.prompt_tokens.append(tokens)
        self.answered.completion_tokens.append(0)

    def fail(self, number: int, error: BaseException | str) -> None:
        """Count a failed line."""
        code = Failure.of(error).code
        self.failed += 1
        self.first_messages.setdefault(code, str(error))
        self.errors[code] += 1
        if len(first := self.first_lines.setdefault(code, [])) < FIRST:
            first.append(number)

    def where(self, code: str) -> str:
        """Return the first line numbers with an error of this code."""
        return lines_of(self.errors[code], self.first_lines[code])

    def record(self) -> dict[str, Any]:
        """Return all counters as JSON for summary.json; latencies and lengths as percentiles."""
        names = ("done", "ok", "failed", "earlier_ok", "earlier_failed")
        lines = {name: getattr(self, name) for name in names}
        if self.total is not None:
            lines["total" if self.total_is_exact else "total_estimated"] = self.total
        tokens = {"in": self.tokens_in, "out": self.tokens_out}
        errors = self.errors.most_common()
        return {
            "began_at": self.began_at,
            "seconds": self.seconds,
            "lines": lines,
            "tokens": {**tokens, "cached": self.tokens_cached},
            "tokens_per_second": {k: count / self.seconds for k, count in tokens.items()},
            "latency_s": _percentiles(self.answered.latency),
            "prompt_tokens": _percentiles(self.answered.prompt_tokens),
            "completion_tokens": _percentiles(self.answered.completion_tokens),
            "finish_reasons": dict(self.reasons),
            "errors": {k: {"lines": n, "first": self.first_lines[k]} for k, n in errors},
            "earlier_errors": {
                k: {"lines": n, "first": first} for k, (n, first) in self.earlier_errors.items()
            },
            "ignored_fields": dict(self.ignored),
            "preemptions": self.preemptions,
            "compiled_steps": int(self.counted("num_compiles")),
            "compile_seconds": float(self.counted("compile_time_s")),
        }

    def table(self) -> str:
        """Return the summary as text for a person."""
        seconds, tokens = self.seconds, self.tokens_in + self.tokens_out
        rates = f"{self.tokens_out / seconds:.1f} tok/s out, {tokens / seconds:.1f} tok/s in all"
        rows = {"requests": f"{self.ok + self.failed} ({self.ok} ok, {self.failed} failed)"}
        if earlier := self.earlier_ok + self.earlier_failed:
            rows["earlier"] = f"{earlier} ({self.earlier_ok} ok, {self.earlier_failed} failed)"
        if self.earlier_errors:
            counts = self.earlier_errors.items()
            kinds = [
                f"{count} {code} ({lines_of(count, first)})" for code, (count, first) in counts
            ]
            rows["old errors"] = "; ".join(kinds)
        if earlier and not self.ok + self.failed:
            return f"{_rows_of(rows)}\n{self._nothing_ran()}"
        rows["tokens"] = f"{self.tokens_in} in, {self.tokens_out} out"
        rows["time"] = f"{seconds:.1f} s, {rates}"
        share = f"{self.cached_percent:.1f}% of the prompts"
        rows["cache hits"] = f"{self.tokens_cached} tokens ({share})"
        reasons = ", ".join(f"{k} {n}" for k, n in self.reasons.most_common())
        rows["finished by"] = reasons or "-"
        if len(self.answered):
            latency = "median {median:.2f} s, p99 {p99:.2f} s, longest {max:.2f} s"
            length = "median {median:.0f} tokens, p99 {p99:.0f}, longest {max:.0f}"
            rows["latency"] = latency.format(**_percentiles(self.answered.latency))
            rows["answers"] = length.format(**_percentiles(self.answered.completion_tokens))
        if self.preemptions:
            rows["preemptions"] = str(self.preemptions)
        if lost := self.engine.get("replicas_lost"):
            again = self.engine["requests_retried"]
            rows["replicas"] = f"{lost} died; {again} requests were run again on other replicas"
        if compiles := int(self.counted("num_compiles")):
            took = self.counted("compile_time_s")
            # Steps compile in parallel with each other and the run: this is no share of its time.
            rows["compiled"] = f"{compiles} steps, {took:.1f} s of work in all"
        rows |= self.trouble()
        text = _rows_of(rows)
        if (cut := self.reasons["length"]) * 5 > self.ok:
            text += (
                f"\nwarning: {cut} of {self.reasons.total()} answers were cut off by their token "
                f"limit (finish_reason 'length'): raise {self._what_to_raise()}"
            )
        return text

    def _what_to_raise(self) -> str:
        """Return the limits that cut answers off, the most frequent first."""
        by = self.cut_by.most_common()
        if len(by) == 1:
            return RAISE[by[0][0]]
        return ", ".join(f"{RAISE[limit]} ({count} answers)" for limit, count in by)

    def _nothing_ran(self) -> str:
        said = "no line was run: all lines have a row already"
        if not self.earlier_failed:
            return said
        return f"{said}; --retry-failed runs the {self.earlier_failed} failed ones again"

    def trouble(self) -> dict[str, str]:
        """Return rows of a table: each kind of error, and the fields that were ignored."""
        rows = {}
        for i, (code, count) in enumerate(self.errors.most_common()):
            rows["errors" if i == 0 else " " * i] = f"{count} {code} ({self.where(code)})"
        if self.ignored:
            names = ", ".join(f"{name} ({n} lines)" for name, n in self.ignored.most_common(8))
            rows["ignored"] = f"unknown fields {names}"
        return rows


def _rows_of(rows: dict[str, str]) -> str:
    return "\n".join(f"{name:<12} {value}" for name, value in rows.items())


def lines_of(count: int, first: list[int]) -> str:
    """Return the first of these line numbers as text. count: how many there are."""
    return f"line {', '.join(map(str, first))}{', ...' if count > len(first) else ''}"


def _percentiles(values: array) -> dict[str, float]:
    if not values:
        return {}
    numbers = np.frombuffer(values, dtype=values.typecode)
    low, median, p99, high = np.percentile(numbers, (0, 50, 99, 100)).tolist()
    return {"min": low, "mean": float(numbers.mean()), "median": median, "p99": p99, "max": high}
