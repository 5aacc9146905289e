"""Hold the fleet simulator (scripts/fleet.py) to real replicas.

    python scripts/fleet_check.py --out check/                 # two replicas, on a quiet machine
    python scripts/fleet_check.py --clock processor --out check/    # on a busy one
    python scripts/fleet_check.py --trace check/trace.jsonl --step-times check/step_times.json

It starts --replicas processes, each on a core of its own, with an engine of the embedded model, and
measures what a step of a prompt and a step of rows take there (step_times.json, which fleet.py
reads with --step-times). From that it makes a trace of --requests arrivals of several turns at
--load of what the replicas can do (trace.jsonl: one request a line, as _fleet_traffic.Asked), sends
every session to one replica, runs the trace there, and prints beside it what the simulator predicts
for it: "model" is fleet.py's queue, "host" the real scheduler, block manager and prefix cache over
a device that takes the measured times.

Steps are measured again after the run, and predictions take the mean: where they take longer or
shorter than before, so do all figures in seconds. Counts (requests, tokens, tokens found) depend on
no clock and must agree wherever it runs. With --clock wall requests arrive in time and times are
those of a clock. With --clock processor a replica's time is the processor time of its process, with
which waiting for the next arrival is skipped: on a machine that is busy with other work that is
what comes nearest to a quiet one's.
Answers are of one token over and over, so that a later turn's prompt is known before.
"""

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import _common as common
import fleet
import numpy as np
from _fleet_device import StepTimes
from _fleet_traffic import Asked, Kind, token_ids, traffic

TALKS = Kind(
    systems=4, system=96, first=128, message=40, answer=24, turns=2.5, think_s=1.0, sigma=0.6
)
ENGINE: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 4096,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "token_buckets": (32, 64, 96, 128, 192, 256, 384, 512),  # times are a line over tokens
    "seq_buckets": (16,),
    "decode_steps": 1,
    "max_logprobs": 0,
}
MOST_TOKENS = 900  # of a request: the embedded model reads 1024
ANSWER = 7  # the token of which answers are
# Prompts and rows that are measured: tokens to compute after so many that are cached; rows, and
# tokens that each looks back at.
PROMPTS = ((16, 0), (40, 0), (60, 96), (100, 0), (150, 96), (200, 0), (250, 300), (400, 0))
ROWS = ((1, 64), (1, 500), (3, 200), (4, 400), (8, 200), (12, 100), (16, 300))
REPEATS = 5
BETWEEN = 6  # steps of a row between two prompts that come amid them
SHOWN = {
    "requests": "{:.0f}",
    "prompt_tokens": "{:.0f}",
    "answer_tokens": "{:.0f}",
    "cached_tokens": "{:.0f}",
    "hit_rate": "{:.1%}",
    "answer_tokens_per_s": "{:.1f}",
    "first_p50_s": "{:.4f}",
    "first_p90_s": "{:.4f}",
    "whole_p50_s": "{:.4f}",
    "whole_p90_s": "{:.4f}",
}
COUNTS = ("requests", "prompt_tokens", "answer_tokens", "cached_tokens", "hit_rate")


# A replica, in a process of its own


class Clock:
    """Seconds of a replica: by the wall, or of its processor time and of what it skipped."""

    def __init__(self, kind: str):
        self._read = time.perf_counter if kind == "wall" else time.process_time
        self._skips = kind != "wall"
        self._zero = self._read()

    def now(self) -> float:
        """Return the seconds since it was made."""
        return self._read() - self._zero

    def wait_until(self, at: float) -> None:
        """Let time pass."""
        left = at - self.now()
        if left <= 0:
            return
        if self._skips:
            self._zero -= left
        else:
            time.sleep(left)


class Replica:
    """An LLM whose requests are timed."""

    def __init__(self, clock: str) -> None:
        import jpaged
        from jpaged.demo import MODEL_PATH

        self._params = jpaged.SamplingParams
        self.llm = jpaged.LLM(jpaged.load_params(MODEL_PATH), **ENGINE)
        self._kind = clock
        self.llm.warmup()  # a step that is compiled while requests run would slow down the others

    def answer(self, asks: Sequence[Asked]) -> list[dict[str, float]]:
        """Run requests as they arrive, but a turn once the one before has ended, as its client has
        to wait for that; return when each had its first token and its last, in seconds after it was
        sent, and how many tokens of its prompt were found.
        """
        asks, llm = sorted(asks), self.llm
        begins = min((asked.at for asked in asks), default=0.0)
        ids = [vocabulary_ids(asked) for asked in asks]
        came, first, done = dict[str, int](), dict[str, float](), [dict[str, float]() for _ in asks]
        left, sent, busy = list(range(len(asks))), dict[int, float](), set[int]()
        free_at = dict[int, float]()  # when a session's last turn ended
        clock = Clock(self._kind)
        while left or came:
            now = clock.now()
            for at in [i for i in left if asks[i].at - begins <= now]:
                if asks[at].session not in busy:
                    busy.add(asks[at].session)
                    left.remove(at)
                    sent[at] = max(asks[at].at - begins, free_at.get(asks[at].session, 0.0))
                    came[llm.add_request(ids[at], self._asked(asks[at].answer))] = at
            if not came:
                clock.wait_until(asks[left[0]].at - begins)
                continue
            ended, now = llm.step(), clock.now()
            requests = llm.session.pool.engine.requests
            for name in came:
                request = requests.get(name)
                if name not in first and (request is None or request.sequences[0].num_generated):
                    first[name] = now
            for out in ended:
                at = came.pop(out.request_id)
                busy.discard(asks[at].session)
                free_at[asks[at].session] = now
                done[at] = {
                    "first_s": first[out.request_id] - sent[at],
                    "whole_s": now - sent[at],
                    "cached": out.num_cached_tokens,
                    "answer": len(out.outputs[0].token_ids),
                    "prompt": len(out.prompt_token_ids),
                }
        return done

    def measure(self) -> StepTimes:
        """Measure its steps."""
        prompts = [(new, self._prompt_seconds(new, cached)) for new, cached in PROMPTS]
        rows = [
            (count, count * context, self._row_seconds(count, context)) for count, context in ROWS
        ]
        per_step, per_token = _fit([(1, new) for new, _ in prompts], [s for _, s in prompts])
        step, row, context = _fit([(1, r, c) for r, c, _ in rows], [s for *_, s in rows])
        idle = [self._idle_seconds(new) - per_step - per_token * new for new, _ in PROMPTS]
        return StepTimes(
            host_step=max(sorted(idle)[len(idle) // 2], 0.0),
            prefill_step=per_step,
            prefill_token=per_token,
            decode_step=step,
            decode_row=row,
            decode_context=context,
            kv_bytes=self.llm.stats()["kv_groups"][0]["block_bytes"] // ENGINE["block_size"],
        )

    def _prompt_seconds(self, new: int, cached: int) -> float:
        """Return by how much a prompt of so many tokens more prolongs the answer to another one."""
        took, steps = list[float](), 4 * BETWEEN
        for turn in range(REPEATS):
            rng = random.Random(hash((new, cached, turn)))
            asks = list[list[int]]()
            for _ in range(3):
                head = [rng.randrange(8, 4000) for _ in range(cached)]
                if head:
                    self._run([[*head, 1]], 1)
                asks.append(head + [rng.randrange(8, 4000) for _ in range(new)])
            row = [rng.randrange(8, 4000) for _ in range(64)]
            self._run([row], 1)
            alone = self._run([row], steps)
            took.append((self._run([row], steps, asks) - alone) / len(asks))
        return sorted(took)[len(took) // 2]

    def _idle_seconds(self, new: int) -> float:
        """Return the seconds to the first token of a prompt to a replica that has nothing to do."""
        took = list[float]()
        for turn in range(REPEATS):
            rng = random.Random(hash((new, turn, "idle")))
            if self._kind == "wall":
                time.sleep(0.03)
            prompt = [rng.randrange(8, 4000) for _ in range(new)]
            took.append(self._run([prompt], 1))
        return sorted(took)[len(took) // 2]

    def _row_seconds(self, rows: int, context: int) -> float:
        """Return the seconds of a step of so many rows: what more answers' tokens add."""
        took, few, many = list[float](), 2, 26
        for turn in range(REPEATS):
            rng = random.Random(hash((rows, context, turn)))
            prompts = [[rng.randrange(8, 4000) for _ in range(context)] for _ in range(rows)]
            self._run(prompts, 1)  # they are found from now on
            short, long = self._run(prompts, few), self._run(prompts, many)
            took.append((long - short) / (many - few))
        return sorted(took)[len(took) // 2]

    def _run(self, prompts: list[list[int]], answer: int, amid: Sequence[list[int]] = ()) -> float:
        """Return the seconds to answers of so many tokens. amid: prompts that come meanwhile, whose
        answers are one token.
        """
        clock, ran, amid = Clock(self._kind), 0, list(amid)
        for prompt in prompts:
            self.llm.add_request(prompt, self._asked(answer))
        while self.llm.has_unfinished():
            self.llm.step()
            ran += 1
            if amid and ran % BETWEEN == 0:
                self.llm.add_request(amid.pop(), self._asked(1))
        assert not amid
        return clock.now()

    def _asked(self, answer: int) -> Any:
        return self._params(
            temperature=0.0, max_tokens=answer, ignore_eos=True, logit_bias={ANSWER: 1e6}
        )


def _fit(facts: list[tuple[int, ...]], seconds: list[float]) -> list[float]:
    """Return the non-negative factors that bring facts nearest to seconds, relative to these."""
    left = list(range(len(facts[0])))
    weights = 1 / np.array(seconds)
    while True:
        a = np.array([[fact[i] for i in left] for fact in facts]) * weights[:, None]
        solution, *_ = np.linalg.lstsq(a, np.ones(len(seconds)), rcond=None)
        if (solution >= 0).all():
            whole = dict(zip(left, solution.tolist(), strict=True))
            return [whole.get(i, 0.0) for i in range(len(facts[0]))]
        left.pop(int(solution.argmin()))


def vocabulary_ids(asked: Asked) -> list[int]:
    """Return ids of a prompt that the embedded model reads, equal where prefixes are."""
    ids = token_ids(asked)
    system, rest = ids[: asked.system], ids[asked.system :]
    head = [8 + (i * 2654435761 >> 7) % 4000 for i in system]
    tail = [ANSWER if i == 0 else 8 + (i * 2654435761 >> 7) % 4000 for i in rest]
    return head + tail


def serve(clock: str) -> int:
    """Be a replica: read orders from the input, a line each, and write what came of them."""
    replica = Replica(clock)
    for line in sys.stdin:
        order = json.loads(line)
        if order["what"] == "measure":
            answer: Any = dataclasses.asdict(replica.measure())
            replica.llm.reset_prefix_cache()
        else:
            answer = replica.answer([Asked(*x) for x in order["asks"]])
        print(json.dumps(answer), flush=True)
    replica.llm.close()
    return 0


# Who starts them


class Process:
    """A replica's process, on one core."""

    def __init__(self, clock: str, core: int):
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--be-a-replica", "--clock", clock]
        self._process = subprocess.Popen(
            command,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        # Set at once: a thread inherits the core of the thread that makes it.
        os.sched_setaffinity(self._process.pid, {core})

    def order(self, **order: Any) -> None:
        """Send an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """Wait for what came of an order."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a replica ended with status {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def step_times(processes: list[Process]) -> StepTimes:
    """Return the mean of what steps take on the replicas, all of them busy: cores share memory,
    and may be two halves of one.
    """
    for process in processes:
        process.order(what="measure")
    return mean_of([StepTimes(**process.result()) for process in processes])


def mean_of(times: list[StepTimes]) -> StepTimes:
    """Return the mean of each of them."""
    facts: list[dict[str, Any]] = [dataclasses.asdict(x) for x in times]
    means: dict[str, Any] = {name: sum(x[name] for x in facts) / len(facts) for name in facts[0]}
    return StepTimes(**means | {"kv_bytes": times[0].kv_bytes})


def make_trace(
    times: StepTimes, replicas: int, requests: int, load: float, seed: int
) -> list[Asked]:
    """Return requests that keep so many replicas busy for `load` of the time, as the step times
    say, in turns whose pauses are as long as ten answers take.
    """

    def work(asked: Asked) -> float:
        new = asked.prompt - asked.before
        return times.prefill(new) + asked.answer * times.decode(2, 2 * asked.prompt) / 2

    alone = times.decode(1, 300) * TALKS.answer
    kind = dataclasses.replace(TALKS, think_s=10 * alone)
    some = list(traffic(kind, rate=10, seconds=100, seed=seed + 1))
    mean = sum(map(work, some)) / len(some)
    rate = load * replicas / mean
    kept = list[Asked]()
    for asked in traffic(
        kind, rate=rate, seconds=4 * requests / rate + 60 * kind.think_s, seed=seed
    ):
        if asked.prompt + asked.answer <= MOST_TOKENS:
            kept.append(asked)
        if len(kept) == requests:
            break
    # All that a prompt says was before is in the trace: sessions that began earlier are left out.
    began = {asked.session for asked in kept if not asked.answers}
    kept = [asked for asked in kept if asked.session in began]
    return [asked._replace(at=asked.at - kept[0].at) for asked in kept]


def read_trace(path: Path) -> list[Asked]:
    """Return the requests of a file that `write_trace` wrote."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Asked._make([*x[:-1], tuple(tuple(span) for span in x[-1])]) for x in lines]


def write_trace(path: Path, asks: Iterable[Asked]) -> None:
    """Write requests, one a line."""
    path.write_text("".join(json.dumps(asked) + "\n" for asked in asks), encoding="utf-8")


def predicted(
    times: StepTimes, asks: list[Asked], replicas: int, run: Callable[..., dict[str, Any]]
) -> dict[str, float]:
    """Return what the simulator says of a trace."""
    sizes = fleet.Sizes(
        pool=ENGINE["num_blocks"] * ENGINE["block_size"],
        host=0,
        files=0,
        block=ENGINE["block_size"],
        rows=ENGINE["max_num_seqs"],
        batched=ENGINE["max_num_batched_tokens"],
    )
    asked = fleet_of(replicas, asks, times, sizes)
    return summary(run(asked, asks))


def fleet_of(replicas: int, asks: list[Asked], times: StepTimes, sizes: fleet.Sizes) -> fleet.Fleet:
    """Return replicas that divide the sessions of a trace by number."""
    return fleet.Fleet(
        replicas=replicas,
        kind=TALKS,
        router="two",
        by_session=True,
        rate=1.0,
        seconds=max(asked.at for asked in asks) + 1.0,
        swing=0.0,
        times=times,
        sizes=sizes,
    )


def summary(report: dict[str, Any]) -> dict[str, float]:
    """Return the figures that are compared, of fleet.figures."""
    shown = {name: report[name] for name in SHOWN if name in report}
    shown["prompt_tokens"] = report["prompt_mean"] * report["requests"]
    shown["answer_tokens_per_s"] = report["answer_tokens"] / report["makespan_s"]
    return {name: float(shown[name]) for name in SHOWN}


def measured(asks: list[Asked], processes: list[Process]) -> dict[str, float]:
    """Run a trace on the replicas; return its figures."""
    parts = [[a for a in asks if a.session % len(processes) == i] for i in range(len(processes))]
    for process, part in zip(processes, parts, strict=True):
        process.order(what="answer", asks=part)
    served = list[fleet.Served]()
    for i, (process, part) in enumerate(zip(processes, parts, strict=True)):
        for asked, came in zip(sorted(part), process.result(), strict=True):
            assert came["prompt"] == asked.prompt and came["answer"] == asked.answer
            cached = {"pool": int(came["cached"])}
            served.append(
                fleet.Served(
                    asked.at,
                    i,
                    came["first_s"],
                    came["whole_s"],
                    asked.prompt,
                    cached,
                    asked.answer,
                )
            )
    count = len(processes)
    times = StepTimes.planned(billions=1, tflops=1, memory_gb_s=1, kv_kib=1)  # not looked at
    sizes = fleet.Sizes(pool=1, host=0, files=0)
    asked = fleet_of(count, asks, times, sizes)
    return summary(fleet.figures(served, asked))


def make_parser() -> argparse.ArgumentParser:
    parser = common.make_parser("fleet_check", __doc__)
    add = parser.add_argument
    add("--replicas", type=int, default=2)
    add("--requests", type=int, default=150, help="of the trace, where one is made")
    add("--load", type=float, default=0.5, help="share of the time that replicas are to be busy")
    add("--clock", choices=("wall", "processor"), default="wall")
    add("--trace", type=Path, help="a trace.jsonl; default: made")
    add("--step-times", type=Path, help="a step_times.json; default: measured")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder for step_times.json, trace.jsonl and results.json")
    add("--be-a-replica", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.be_a_replica:
        return serve(args.clock)
    common.check_positive(parser, args, "replicas", "requests")
    if not 0 < args.load < 1:
        parser.error(f"--load {args.load}: must be above 0 and below 1")
    began, cores = time.perf_counter(), sorted(os.sched_getaffinity(0))
    if args.clock == "wall" and len(cores) < args.replicas:
        parser.error(
            f"--replicas {args.replicas}: there are {len(cores)} cores (--clock processor)"
        )
    processes = [Process(args.clock, cores[i % len(cores)]) for i in range(args.replicas)]
    try:
        if args.step_times is not None:
            times = StepTimes.read(args.step_times)
        else:
            times = step_times(processes)
        if args.trace is not None:
            asks = read_trace(args.trace)
        else:
            asks = make_trace(times, args.replicas, args.requests, args.load, args.seed)
        real = measured(asks, processes)
        after = step_times(processes)
    finally:
        for process in processes:
            process.end()
    mean = mean_of([times, after]) if args.step_times is None else times
    reports = {
        "measured": real,
        "model": predicted(mean, asks, args.replicas, fleet.simulate),
        "host": predicted(mean, asks, args.replicas, fleet.run_engines),
    }
    print(show(reports))
    drift = [
        after.prefill(100) / times.prefill(100) - 1,
        after.decode(3, 900) / times.decode(3, 900) - 1,
    ]
    print(
        "after the run steps took {:+.0%} (100 tokens) and {:+.0%} (3 rows)".format(*drift)
        + " more or less than before it: predictions can be no better"
    )
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    took = time.perf_counter() - began
    print(f"clock: {args.clock}; load average {busy:.1f} a core; took {took:.0f} s")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        write_trace(args.out / "trace.jsonl", asks)
        for name, facts in (("step_times", dataclasses.asdict(mean)), ("results", reports)):
            (args.out / f"{name}.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    agree = all(
        abs(reports[kind][name] - real[name]) <= 0.01 * abs(real[name])
        for kind in ("model", "host")
        for name in COUNTS
    )
    if not agree:
        print("counts differ by more than a hundredth", file=sys.stderr)
    return 0 if agree else 1


def show(reports: dict[str, dict[str, float]]) -> str:
    """Return a table of figures, with how far predictions are off."""
    real, rows = reports["measured"], list[list[str]]()
    for name, form in SHOWN.items():
        row = [name, form.format(real[name])]
        for kind in ("model", "host"):
            off = reports[kind][name] / real[name] - 1 if real[name] else 0.0
            row += [form.format(reports[kind][name]), f"{off:+.1%}"]
        rows.append(row)
    return "\n".join(common.aligned(["", "measured", "model", "off", "host", "off"], rows, left=1))


if __name__ == "__main__":
    sys.exit(main())
