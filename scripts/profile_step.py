"""Where the time of a step goes: a table by named scope, matmul rates beside plain matmuls of the
same shapes, faults.

    python scripts/profile_step.py CHECKPOINT                              # decode: 32 rows at 300
    tokens of context python scripts/profile_step.py --random 60m --phase both --rows 8 python
    scripts/profile_step.py CHECKPOINT --phase prefill --context 125 --ops 20

Steps run through the public LLM, first timed, then under jax's profiler. An instant that several
operations share (XLA:CPU runs independent ones on different threads) is split evenly between them,
so that the table adds up to the span of the traced steps; `(no operation)` is the rest: dispatch,
host, waiting. Tracing itself makes small operations a little slower: compare its sum with the
untraced time above it. The trace reads as HLO only on CPU.
"""

import argparse
import collections
import itertools
import math
import operator
import re
import resource
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import bench
import jax
import jax.numpy as jnp

import jpaged
from jpaged import SamplingParams
from jpaged.errors import JpagedError

CONTAINERS = ("while", "conditional", "call")  # their bodies' operations have events of their own
NATIVE = 'custom_call_target="jpaged_linear"'
CONTROL = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|checkpoint|eval_jaxpr|.*\W.*"
)  # in op_name paths


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="profile_step", description=__doc__, formatter_class=formatter
    )
    add = parser.add_argument
    add("checkpoint", nargs="?", help="a checkpoint folder")
    add("--random", metavar="SIZE", help="a random model instead, as scripts/bench.py names them")
    add("--phase", choices=("prefill", "decode", "both"), default="decode")
    add("--rows", type=int, default=32, help="sequences (default: 32)")
    add("--context", type=int, default=300, help="prompt tokens of each (default: 300)")
    add("--steps", type=int, default=16, help="decode steps, or prefills, to measure (default: 16)")
    add("--ops", type=int, default=0, metavar="N", help="also list the N slowest operations")
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    add("--trace", type=Path, metavar="DIR", help="keep the trace here (for xprof, or Perfetto)")
    args = parser.parse_args(argv)
    if (args.checkpoint is None) == (args.random is None):
        parser.error("give a checkpoint folder or --random, one of the two")
    return args


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)


class Steps:
    """Runs steps of one phase: `rows` sequences of `context` random tokens."""

    def __init__(self, args: argparse.Namespace):
        config = bench.model_config(args)
        self.rows, self.steps = args.rows, args.steps
        model = (
            args.checkpoint
            if args.checkpoint is not None
            else bench.random_params(config, args.dtype)
        )
        options = {"dtype": args.dtype, "max_num_seqs": args.rows, "enable_prefix_caching": False}
        self.llm = jpaged.LLM(
            model, max_model_len=1 << (args.context + 3 * args.steps + 64).bit_length(), **options
        )
        self.llm.session.engine.depth = 1  # no dispatch under way when a trace begins or ends
        self.prompts = [
            [(7 * i + j) % config.vocab_size for j in range(args.context)] for i in range(args.rows)
        ]

    def prefills(self) -> int:
        """`steps` times all prompts; the number of prefill steps that took."""
        before = self.llm.stats()["prefill_steps"]
        for _ in range(self.steps):
            self.llm.generate(self.prompts, sampling(1), use_tqdm=False)
        return self.llm.stats()["prefill_steps"] - before

    def start_decoding(self) -> None:
        """Prefill all rows and decode a little: what follows are decode steps alone."""
        for prompt in self.prompts:
            self.llm.add_request(prompt, sampling(2 * self.steps + 48))
        self._step_until(16)

    def decodes(self) -> int:
        """`steps` decode steps of all rows (or a few more, if a dispatch makes several); how
        many.
        """
        return self._step_until(self.steps)

    def _step_until(self, steps: int) -> int:
        before = self.llm.stats()["decode_tokens"]
        while (done := self.llm.stats()["decode_tokens"] - before) < steps * self.rows:
            self.llm.step()
        return done // self.rows


class Event(NamedTuple):
    """One execution of an HLO operation; times in ns, program is the module's name and the trace's
    own number.
    """

    start: float
    end: float
    op: str
    program: tuple[str, str]


class Measured(NamedTuple):
    """One phase: untraced milliseconds and page faults a step, and the events of as many traced
    steps.
    """

    steps: int
    ms: float
    faults: float
    events: list[Event]


def measure(run: Callable[[], int], trace_dir: Path) -> Measured:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    steps = run()
    seconds = time.perf_counter() - began
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(trace_dir, profiler_options=options):
        assert run() == steps
    return Measured(steps, 1e3 * seconds / steps, faults / steps, list(read_events(trace_dir)))


def read_events(trace_dir: Path) -> Iterator[Event]:
    """The HLO operations of the newest trace in a folder."""
    newest = max(trace_dir.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of the bindings: "has no __module__ attribute"
        for plane in jax.profiler.ProfileData.from_file(str(newest)).planes:
            for event in (event for line in plane.lines for event in line.events):
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    program = (str(stats.get("hlo_module")), str(stats.get("program_id")))
                    yield Event(
                        event.start_ns,
                        event.start_ns + event.duration_ns,
                        str(stats["hlo_op"]),
                        program,
                    )


class Matmul(NamedTuple):
    """A dot without batch dimensions, or a CPU kernel's: operand shapes, dtypes and contracted
    dimensions.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    contract: tuple[int, int]

    @property
    def flops(self) -> int:
        sizes = [math.prod(shape) for shape in self.shapes]
        return 2 * sizes[0] * sizes[1] // self.shapes[0][self.contract[0]]

    @property
    def weight_bytes(self) -> int:
        """Of the larger operand: the other one is activations."""
        return max(
            math.prod(s) * (4 if "32" in t else 2)
            for s, t in zip(self.shapes, self.dtypes, strict=True)
        )


class Op(NamedTuple):
    opcode: str
    scope: str
    matmul: Matmul | None  # scope: path of named scopes


def parse_hlo(text: str) -> dict[str, Op]:
    """Every operation of an HLO module, by name; a fusion around one matmul counts as that
    matmul.
    """
    bodies: dict[str, dict[str, tuple[str, str, str]]] = collections.defaultdict(dict)
    computation = ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
            computation = header[1]
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$", line):
            bodies[computation][found[1]] = (
                found[2],
                found[3],
                found[4],
            )  # type, opcode, operands and attributes
    ops = {}
    for body in bodies.values():
        for name, (_, opcode, rest) in body.items():
            called = re.search(r"calls=%?([\w.\-]+)", rest)
            inner = bodies.get(called[1], {}) if called else body
            dots = [
                r
                for n, (_, code, r) in inner.items()
                if (code == "dot" or NATIVE in r) and (called or n == name)
            ]
            path = re.search(r'op_name="([^"]*)"', rest)
            parts = (
                [part for part in path[1].split("/")[:-1] if not CONTROL.fullmatch(part)]
                if path
                else ["(unnamed)"]
            )
            matmul = _matmul(dots[0], inner) if len(dots) == 1 else None
            ops[name] = Op(opcode, "/".join(parts) or "(step)", matmul)
    return ops


def _matmul(rest: str, body: dict[str, tuple[str, str, str]]) -> Matmul | None:
    if "batch_dims" in rest:
        return None
    types = [
        re.match(r"(\w+)\[([\d,]*)\]", body[name][0])
        for name in re.findall(r"%?([\w.\-]+)", rest)[:2]
    ]
    contract = (
        [1, 1]
        if NATIVE in rest
        else [int(d) for d in re.findall(r"hs_contracting_dims=\{(\d+)\}", rest)]
    )
    if len(contract) != 2 or None in types:
        return None
    a, b = ((t[1], tuple(int(n) for n in t[2].split(","))) for t in types if t is not None)
    return Matmul((a[1], b[1]), (a[0], b[0]), (contract[0], contract[1]))


def programs(events: list[Event]) -> dict[tuple[str, str], dict[str, Op]]:
    """The parsed module of each program that ran: the live executable of that name that has all of
    its operations.
    """
    seen = collections.defaultdict(set)
    for event in events:
        seen[event.program].add(event.op)
    modules = [m for e in jax.devices()[0].client.live_executables() for m in e.hlo_modules()]
    found: dict[tuple[str, str], dict[str, Op]] = {}
    for program, names in seen.items():
        parsed = (parse_hlo(m.to_string()) for m in modules if m.name == program[0])
        found[program] = next((ops for ops in parsed if names <= ops.keys()), {})
    return found


def wall_shares(events: list[Event]) -> tuple[list[float], float]:
    """Of the span of all events: the ns that falls to each, evenly split where several ran at once,
    and the rest.
    """
    shares, edges = [0.0] * len(events), []
    for i, event in enumerate(events):
        edges += [(event.start, 1, i), (event.end, 0, i)]
    edges.sort()
    running: set[int] = set()
    idle = 0.0
    for (now, starts, i), (then, _, _) in itertools.pairwise(edges):
        (running.add if starts else running.discard)(i)
        idle += 0 if running else then - now
        for j in running:
            shares[j] += (then - now) / len(running)
    return shares, idle


def rate(matmul: Matmul, count: int) -> float:
    """Seconds of this matmul alone, over as many different weights as a step has: the best of
    five.
    """
    dims = (((matmul.contract[0],), (matmul.contract[1],)), ((), ()))
    dtypes = [{"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[d] for d in matmul.dtypes]
    large = int(math.prod(matmul.shapes[1]) > math.prod(matmul.shapes[0]))
    fixed = jnp.ones(matmul.shapes[1 - large], dtypes[1 - large])
    weights = [jnp.full(matmul.shapes[large], i, dtypes[large]) for i in range(count)]

    @jax.jit
    def run(fixed: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        pairs = ((fixed, w) if large else (w, fixed) for w in weights)
        return [
            jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32) for a, b in pairs
        ]

    run(fixed, weights)
    return (
        min(timeit.repeat(lambda: jax.block_until_ready(run(fixed, weights)), number=1, repeat=5))
        / count
    )


def report(name: str, measured: Measured, num_ops: int) -> Iterator[str]:
    modules = programs(measured.events)
    unknown = Op("?", "(unknown)", None)
    ops = {(e.program, e.op): modules[e.program].get(e.op, unknown) for e in measured.events}
    leaves = [e for e in measured.events if ops[e.program, e.op].opcode not in CONTAINERS]
    shares, idle = wall_shares(leaves)
    scopes, single, matmuls, counts = (collections.defaultdict[Any, float](float) for _ in range(4))
    for event, share in zip(leaves, shares, strict=True):
        op = ops[event.program, event.op]
        scopes[op.scope] += share
        single[event.program, event.op] += share
        if op.matmul is not None:
            matmuls[op.matmul] += share
            counts[op.matmul] += 1
    scopes["(no operation)"] = idle
    by_time = operator.itemgetter(1)
    span, per_step = sum(scopes.values()), 1e6 * measured.steps
    yield (
        f"{name}: {measured.ms:.2f} ms a step, {measured.faults:.0f} page faults, untraced "
        f"({measured.steps} steps)"
    )
    yield f"\n{'scope':<48}{'ms a step':>10}{'share':>8}"
    for scope, ns in sorted(scopes.items(), key=by_time, reverse=True):
        yield f"{scope:<48}{ns / per_step:>10.3f}{ns / span:>8.1%}"
    yield f"{'all':<48}{span / per_step:>10.3f}{1:>8.1%}"
    for (program, op), ns in sorted(single.items(), key=by_time, reverse=True)[:num_ops]:
        yield f"  {ns / per_step:>8.3f} ms  {op}  ({ops[program, op].scope})"
    yield f"\n{'matmul':<48}{'a step':>7}{'ms':>8}{'GFLOP/s':>9}{'(alone)':>9}{'weights GB/s':>13}{'(alone)':>9}"
    for matmul, ns in sorted(matmuls.items(), key=by_time, reverse=True):
        count = counts[matmul] / measured.steps
        alone, seconds = rate(matmul, max(round(count), 1)), ns / 1e9 / counts[matmul]
        shapes = " . ".join(
            f"{t}{list(s)}" for t, s in zip(matmul.dtypes, matmul.shapes, strict=True)
        )
        flops, size = matmul.flops / 1e9, matmul.weight_bytes / 1e9
        rates = f"{flops / seconds:>9.0f}{flops / alone:>9.0f}{size / seconds:>13.1f}{size / alone:>9.1f}"
        yield f"{shapes:<48}{count:>7.0f}{ns / per_step:>8.3f}{rates}"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        steps = Steps(args)
    except JpagedError as e:
        print(f"profile_step: {e}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        where = args.trace if args.trace is not None else Path(scratch)
        steps.llm.generate(steps.prompts, sampling(4), use_tqdm=False)  # compiles
        if args.phase != "decode":
            print(
                *report("prefill", measure(steps.prefills, where), args.ops), sep="\n", end="\n\n"
            )
        if args.phase != "prefill":
            steps.start_decoding()
            print(*report("decode", measure(steps.decodes, where), args.ops), sep="\n", end="\n\n")
    print(f"memory: {bench.read_bandwidth():.1f} GB/s in a plain read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
