"""Show where the time of a step goes: a table by named scope, the rates of its matmuls, and page
faults.

    python scripts/profile_step.py CHECKPOINT                # decode: 32 rows, 300 tokens each
    python scripts/profile_step.py --random 60m --phase both --rows 8
    python scripts/profile_step.py CHECKPOINT --phase prefill --context 125 --ops 20

Steps run through the public LLM, first timed, then under jax's profiler. They run ahead as where
they serve: the host prepares the next step while the device works on this one. Prompts of one call
do so, calls do not, so `--phase prefill --rows 1` shows the whole of a call of one prompt. Do not
run it with a real-time priority: the host then waits until the threads that compute have ended.

XLA:CPU runs independent operations on different threads; time that several operations share is
split evenly between them, so that the table adds up to the span of the traced steps. `(no
operation)` is the rest: dispatch, host and waiting. Tracing makes small operations a little slower:
compare the sum with the untraced time above it. Products within a call of a layer's whole
feed-forward part (kernels_cpu/mlp.py) have no rates. The trace can be read as HLO on CPU only.
scripts/bench_cpu_kernels.py shows what plain matmuls of the same shapes reach.
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
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import _common as common
import jax

import jpaged
from jpaged import SamplingParams
from jpaged.errors import JpagedError
from jpaged.flags import add_engine_flags, engine_settings

CONTAINERS = (
    "while",
    "conditional",
    "call",
)  # the operations in their bodies have their own events
NATIVE = 'custom_call_target="jpaged_linear"'
# Parts of an op_name that are not named scopes.
CONTROL = re.compile(r"while|body|cond|branch_\d+_fun|closed_call|checkpoint|eval_jaxpr|.*\W.*")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser("profile_step", __doc__)
    add = parser.add_argument
    add("--phase", choices=("prefill", "decode", "both"), default="decode")
    add("--rows", type=int, default=32, help="sequences (default: 32)")
    add("--context", type=int, default=300, help="prompt tokens of each (default: 300)")
    add("--steps", type=int, default=16, help="decode steps, or prefills, to measure (default: 16)")
    add("--ops", type=int, default=0, metavar="N", help="also list the N slowest operations")
    add("--trace", type=Path, metavar="DIR", help="keep the trace here (for xprof, or Perfetto)")
    common.add_model_flags(parser)
    add_engine_flags(parser, dtype="bfloat16", enable_prefix_caching=False)
    args = parser.parse_args(argv)
    common.check_model_flags(parser, args)
    return args


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)


class Steps:
    """Runs steps of one phase: `rows` sequences of `context` random tokens."""

    def __init__(self, args: argparse.Namespace):
        self.rows, self.steps = args.rows, args.steps
        longest = args.context + 3 * args.steps + 64
        sizes = {"max_num_seqs": args.rows, "max_model_len": 1 << longest.bit_length()}
        settings = sizes | engine_settings(args)
        self.llm = jpaged.LLM(common.load_model(args, args.dtype), **settings)
        vocab_size = self.llm.model_config.vocab_size
        self.prompts = common.random_ids(args.rows, args.context, vocab_size)

    def prefills(self) -> int:
        """Run all prompts `steps` times. Return the number of prefill steps."""
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
        """Run `steps` decode steps of all rows (or a few more, if a dispatch makes several). Return
        how many there were.
        """
        return self._step_until(self.steps)

    def _step_until(self, steps: int) -> int:
        before, in_flight = self.llm.stats()["decode_tokens"], self.llm.session.engine.in_flight

        def done() -> int:
            return (self.llm.stats()["decode_tokens"] - before) // self.rows

        while done() + len(in_flight) < steps - 1:
            self.llm.step()
        # No dispatch is under way when a trace begins or ends.
        depth, in_flight.depth = in_flight.depth, 1
        self.llm.step()
        in_flight.depth = depth
        return done()


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
        # of the bindings: "has no __module__ attribute"
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = jax.profiler.ProfileData.from_file(str(newest)).planes
        for event in (event for plane in planes for line in plane.lines for event in line.events):
            stats = dict(event.stats)
            if "hlo_op" in stats:
                program = (str(stats.get("hlo_module")), str(stats.get("program_id")))
                end = event.start_ns + event.duration_ns
                yield Event(event.start_ns, end, str(stats["hlo_op"]), program)


class Instruction(NamedTuple):
    """An operation of HLO; rest: operands and attributes, as they are written."""

    result: str
    opcode: str
    rest: str

    @property
    def called(self) -> str:
        """The computation of a fusion."""
        match = re.search(r"calls=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""


def hlo_computations(text: str) -> dict[str, dict[str, Instruction]]:
    """Instructions by name, of each computation of an HLO module by name."""
    form = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
    computations: dict[str, dict[str, Instruction]] = {}
    body: dict[str, Instruction] = {}
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            body = computations.setdefault(header[1], {})
        elif match := form.match(line):
            body[match[1]] = Instruction(match[2], match[3], match[4])
    assert computations, "no computation found: has the form of HLO text changed?"
    return computations


class Matmul(NamedTuple):
    """A dot without batch dimensions, or a CPU kernel's: operands as HLO names them, operations,
    and bytes of the larger operand (the other one is activations).
    """

    operands: str
    flops: int
    weight_bytes: int


class Op(NamedTuple):
    opcode: str
    scope: str  # path of named scopes
    matmul: Matmul | None


def parse_hlo(text: str) -> dict[str, Op]:
    """Every operation of an HLO module, by name; a fusion around one matmul counts as that
    matmul.
    """
    computations = hlo_computations(text)
    ops = {}
    for body in computations.values():
        for name, op in body.items():
            inner = computations.get(op.called, {}) if op.called else {name: op}
            dots = [i for i in inner.values() if i.opcode == "dot" or NATIVE in i.rest]
            body_of_dot = computations.get(op.called, body)
            product = matmul_of(dots[0], body_of_dot) if len(dots) == 1 else None
            scope = "(unnamed)"
            if path := re.search(r'op_name="([^"]*)"', op.rest):
                parts = [p for p in path[1].split("/")[:-1] if not CONTROL.fullmatch(p)]
                scope = "/".join(parts) or "(step)"
            ops[name] = Op(op.opcode, scope, product)
    return ops


def matmul_of(dot: Instruction, body: dict[str, Instruction]) -> Matmul | None:
    """body: the computation that has the operands."""
    contracted = re.search(r"lhs_contracting_dims=\{(\d+)\}", dot.rest)
    if "batch_dims" in dot.rest or (contracted is None and NATIVE not in dot.rest):
        return None
    names = re.findall(r"%?([\w.\-]+)", dot.rest)[:2]
    types = [re.match(r"(\w+)\[([\d,]+)\]", body[name].result) for name in names]
    dtypes = [t[1] for t in types if t is not None]
    x, weight = ([int(n) for n in t[2].split(",")] for t in types if t is not None)
    depth = x[int(contracted[1])] if contracted else x[-1]
    sizes = zip((x, weight), dtypes, strict=True)
    return Matmul(
        operands=f"{dtypes[0]}{x} . {dtypes[1]}{weight}",
        flops=2 * math.prod(x) * math.prod(weight) // depth,
        weight_bytes=max(math.prod(n) * (4 if "32" in dtype else 2) for n, dtype in sizes),
    )


def programs(events: list[Event]) -> dict[tuple[str, str], dict[str, Op]]:
    """The parsed module of each program that ran: the live executable of that name that has all of
    its operations.
    """
    seen = collections.defaultdict(set)
    for event in events:
        seen[event.program].add(event.op)
    modules = [m for e in jax.devices()[0].client.live_executables() for m in e.hlo_modules()]
    by_program: dict[tuple[str, str], dict[str, Op]] = {}
    for program, names in seen.items():
        parsed = (parse_hlo(m.to_string()) for m in modules if m.name == program[0])
        by_program[program] = next((ops for ops in parsed if names <= ops.keys()), {})
    return by_program


def wall_shares(events: list[Event]) -> tuple[list[float], float]:
    """Divide the span of all events: return the ns that falls to each, evenly split where several
    ran at once, and the rest.
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
    span, ms = sum(scopes.values()), 1e6 * measured.steps

    def slowest(times: dict[Any, float]) -> list[tuple[Any, float]]:
        return sorted(times.items(), key=operator.itemgetter(1), reverse=True)

    untraced = f"{measured.faults:.0f} page faults, untraced ({measured.steps} steps)"
    yield f"{name}: {measured.ms:.2f} ms a step, {untraced}\n"
    rows = [(scope, f"{ns / ms:.3f}", f"{ns / span:.1%}") for scope, ns in slowest(scopes)]
    rows.append(("all", f"{span / ms:.3f}", f"{1:.1%}"))
    yield from common.aligned(["scope", "ms a step", "share"], rows, left=1)
    for (program, op), ns in slowest(single)[:num_ops]:
        yield f"  {ns / ms:>8.3f} ms  {op}  ({ops[program, op].scope})"
    cells = []
    for matmul, ns in slowest(matmuls):
        gflop_s, gb_s = (n * counts[matmul] / ns for n in (matmul.flops, matmul.weight_bytes))
        times = f"{counts[matmul] / measured.steps:.0f}", f"{ns / ms:.3f}"
        cells.append((matmul.operands, *times, f"{gflop_s:.0f}", f"{gb_s:.1f}"))
    heads = ["\nmatmul", "a\nstep", "\nms", "\nGFLOP/s", "weights\nGB/s"]
    yield "\n" + "\n".join(common.aligned(heads, cells, left=1))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        steps = Steps(args)
    except JpagedError as e:
        print(f"profile_step: {e}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.trace if args.trace is not None else Path(scratch)
        steps.llm.generate(steps.prompts, sampling(4), use_tqdm=False)  # compiles
        if args.phase != "decode":
            print(*report("prefill", measure(steps.prefills, folder), args.ops), "", sep="\n")
        if args.phase != "prefill":
            steps.start_decoding()
            print(*report("decode", measure(steps.decodes, folder), args.ops), "", sep="\n")
    print(f"memory: {common.read_bandwidth():.1f} GB/s in a plain read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
