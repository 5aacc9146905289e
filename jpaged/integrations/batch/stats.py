"""What a run counts: one object that progress, summary, metrics and report read."""

import dataclasses
import time
from array import array
from collections import Counter
from typing import Any

import numpy as np

from jpaged.integrations.batch.answers import Failure
from jpaged.integrations.batch.timeline import Timeline
from jpaged.request.outputs import RequestOutput

FIRST = 5  # line numbers that are kept of each kind of error
SAMPLES = 3  # answers that are kept for a person to read
TIMED = ("prefill_tokens", "decode_tokens")  # of these, those whose course is kept
COUNTERS = (*TIMED, "preemptions", "num_compiles", "compile_time_s")  # of LLM.stats


@dataclasses.dataclass
class Answered:
    """A column each of what is known of every answered line, in the order of their ends: 16 bytes a
    line.

    latency: seconds from the engine's taking it to its end. finished: seconds since the run began.
    """

    latency: array = dataclasses.field(default_factory=lambda: array("f"))
    finished: array = dataclasses.field(default_factory=lambda: array("f"))
    prompt_tokens: array = dataclasses.field(default_factory=lambda: array("I"))
    completion_tokens: array = dataclasses.field(default_factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self.latency)


@dataclasses.dataclass
class BatchStats:
    """Counters of one run. Lines that an earlier run answered are counted apart; `total` is of all
    of them.

    total: lines to answer, None where nothing is known; total_is_exact: else it is estimated from
    the bytes read. errors: failed lines by code; first_lines: the first line numbers of each.
    first_messages: and what the first of them said. ignored: unknown fields left out.
    """

    began: float = dataclasses.field(default_factory=time.perf_counter)
    began_at: float = dataclasses.field(default_factory=time.time)
    ended: float | None = None
    ok: int = 0
    failed: int = 0
    earlier_ok: int = 0
    earlier_failed: int = 0
    total: int | None = None
    total_is_exact: bool = False
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    running: int = 0  # requests in the engine now
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    first_lines: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    first_messages: dict[str, str] = dataclasses.field(default_factory=dict)
    ignored: Counter[str] = dataclasses.field(default_factory=Counter)
    samples: list[str] = dataclasses.field(
        default_factory=list
    )  # the first lines that were answered, to read
    timeline: Timeline = dataclasses.field(default_factory=lambda: Timeline(TIMED))
    answered: Answered = dataclasses.field(default_factory=Answered)
    engine: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # LLM.stats() as it was last read
    engine_began: dict[str, Any] = dataclasses.field(default_factory=dict)  # and as the run began

    @property
    def done(self) -> int:
        """Lines that have an output line, of earlier runs too."""
        return self.ok + self.failed + self.earlier_ok + self.earlier_failed

    @property
    def all_failed(self) -> int:
        return self.failed + self.earlier_failed

    @property
    def seconds(self) -> float:
        return max((time.perf_counter() if self.ended is None else self.ended) - self.began, 1e-9)

    def counted(self, name: str) -> float:
        """How far one of the engine's COUNTERS has come in this run."""
        return self.engine.get(name, 0) - self.engine_began.get(name, 0)

    @property
    def preemptions(self) -> int:
        return int(self.counted("preemptions"))

    @property
    def seconds_left(self) -> float | None:
        """At this run's pace; None before its first line, or where the total is not known."""
        here = self.ok + self.failed
        return (
            None
            if self.total is None or not here
            else self.seconds / here * max(self.total - self.done, 0)
        )

    def watch(self, llm: Any) -> None:
        """Read the engine's counters: those that it starts with, the first time."""
        self.engine = llm.stats()
        self.engine_began = self.engine_began or {
            name: self.engine.get(name, 0) for name in COUNTERS
        }
        self.timeline.add([self.counted(name) for name in TIMED], at=self.seconds)

    def add(self, output: RequestOutput, latency: float) -> None:
        """A line is answered; latency in seconds."""
        prompt, completion = (
            len(output.prompt_token_ids),
            sum(len(done.token_ids) for done in output.outputs),
        )
        self.ok += 1
        self.tokens_in += prompt
        self.tokens_out += completion
        self.tokens_cached += output.num_cached_tokens
        self.reasons.update(str(done.finish_reason) for done in output.outputs)
        self.answered.latency.append(latency)
        self.answered.finished.append(time.perf_counter() - self.began)
        self.answered.prompt_tokens.append(prompt)
        self.answered.completion_tokens.append(completion)

    def fail(self, number: int, error: BaseException | str) -> None:
        """A line is an error."""
        code = Failure.of(error).code
        self.failed += 1
        self.first_messages.setdefault(code, str(error))
        self.errors[code] += 1
        if len(first := self.first_lines.setdefault(code, [])) < FIRST:
            first.append(number)

    def record(self) -> dict[str, Any]:
        """All of it as JSON, for summary.json; latencies and lengths as percentiles."""
        lines = {"done": self.done, "ok": self.ok, "failed": self.failed}
        lines |= {"earlier_ok": self.earlier_ok, "earlier_failed": self.earlier_failed}
        if self.total is not None:
            lines["total" if self.total_is_exact else "total_estimated"] = self.total
        return {
            "began_at": self.began_at,
            "seconds": self.seconds,
            "lines": lines,
            "tokens": {"in": self.tokens_in, "out": self.tokens_out, "cached": self.tokens_cached},
            "tokens_per_second": {
                "in": self.tokens_in / self.seconds,
                "out": self.tokens_out / self.seconds,
            },
            "latency_s": _percentiles(self.answered.latency),
            "prompt_tokens": _percentiles(self.answered.prompt_tokens),
            "completion_tokens": _percentiles(self.answered.completion_tokens),
            "finish_reasons": dict(self.reasons),
            "errors": {
                k: {"lines": n, "first": self.first_lines[k]} for k, n in self.errors.most_common()
            },
            "ignored_fields": dict(self.ignored),
            "preemptions": self.preemptions,
            "compiled_steps": int(self.counted("num_compiles")),
            "compile_seconds": float(self.counted("compile_time_s")),
        }

    def table(self) -> str:
        """The summary that a person reads."""
        here, seconds = self.ok + self.failed, self.seconds
        earlier = self.earlier_ok + self.earlier_failed
        share = 100 * self.tokens_cached / max(self.tokens_in, 1)
        rows = {"requests": f"{here} ({self.ok} ok, {self.failed} failed)"}
        if earlier:
            rows["earlier"] = f"{earlier} ({self.earlier_ok} ok, {self.earlier_failed} failed)"
        rows |= {
            "tokens": f"{self.tokens_in} in, {self.tokens_out} out",
            "time": f"{seconds:.1f} s, {self.tokens_out / seconds:.1f} tok/s out, "
            f"{(self.tokens_in + self.tokens_out) / seconds:.1f} tok/s in all",
            "cache hits": f"{self.tokens_cached} tokens ({share:.1f}% of the prompts)",
            "finished by": ", ".join(f"{k} {n}" for k, n in self.reasons.most_common()) or "-",
        }
        if len(self.answered):
            latency, length = (
                _percentiles(x) for x in (self.answered.latency, self.answered.completion_tokens)
            )
            rows["latency"] = "median {median:.2f} s, p99 {p99:.2f} s, longest {max:.2f} s".format(
                **latency
            )
            rows["answers"] = "median {median:.0f} tokens, p99 {p99:.0f}, longest {max:.0f}".format(
                **length
            )
        if self.preemptions:
            rows["preemptions"] = str(self.preemptions)
        if lost := self.engine.get("replicas_lost"):
            rows["replicas"] = (
                f"{lost} died; {self.engine['requests_retried']} requests were run again on others"
            )
        if compiles := int(self.counted("num_compiles")):
            rows["compiled"] = (
                f"{compiles} steps in {self.counted('compile_time_s'):.1f} s of that time"
            )
        rows |= errors_by_kind(self)
        if self.ignored:
            names = ", ".join(f"{name} ({n} lines)" for name, n in self.ignored.most_common(8))
            rows["ignored"] = f"unknown fields {names}"
        text = "\n".join(f"{name:<12} {value}" for name, value in rows.items())
        if self.reasons["length"] * 5 > self.ok:
            cut = (
                f"{self.reasons['length']} of {self.reasons.total()} answers were cut off "
                "by their token limit"
            )
            text += (
                f"\nwarning: {cut} (finish_reason 'length'): raise --max-tokens or --max-model-len"
            )
        return text


def errors_by_kind(stats: BatchStats) -> dict[str, str]:
    """A row of a table for each kind of error, with its first line numbers."""
    rows = {}
    for i, (code, count) in enumerate(stats.errors.most_common()):
        first = ", ".join(map(str, stats.first_lines[code]))
        more = ", ..." if count > len(stats.first_lines[code]) else ""
        rows["errors" if i == 0 else " " * i] = f"{count} {code} (line {first}{more})"
    return rows


def _percentiles(values: array) -> dict[str, float]:
    if not values:
        return {}
    found = np.frombuffer(values, dtype=values.typecode)
    low, median, high = np.percentile(found, (0, 50, 99))
    return {
        "min": float(low),
        "mean": float(found.mean()),
        "median": float(median),
        "p99": float(high),
        "max": float(found.max()),
    }
