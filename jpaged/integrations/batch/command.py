"""Answer a file of prompts: OpenAI batch requests, bare objects, text or a table in, JSONL out.

    jpaged batch prompts.jsonl              # prints prompts and answers to read
    jpaged batch batch.jsonl --model DIR --output answers.jsonl
    jpaged batch batch.jsonl --model Qwen/Qwen3-0.6B --output a.jsonl --resume
    jpaged batch batch.jsonl --model DIR --check     # plans, and runs nothing
    cat prompts.txt | jpaged batch - --format text --output -

In a checkout `python scripts/serve_batch.py` is the same command.

The input is read as a stream, a bounded window at a time, and answers are written when they have
finished. A bad line becomes an error line and never ends the run. --resume continues a run that was
killed. docs/batch.md describes the forms of lines, how runs resume, and shards. Exit status: 0 all
lines are answered; 2 some lines failed; 1 nothing could run, or the engine or the input failed; 3
--max-error-rate ended the run; 130 or 143 Ctrl-C or SIGTERM stopped it; 141 the reader of stdout
has gone.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from jpaged import adapter_flag, gpu_share
from jpaged.config import EngineConfig
from jpaged.errors import CheckpointError, ConfigError, PeerError
from jpaged.flags import Parser, add_engine_groups, engine_settings, parse_resources
from jpaged.integrations.batch.formats import guess_format, open_source
from jpaged.integrations.batch.images import LineImages
from jpaged.integrations.batch.journal import Existing, bytes_of, shard_path
from jpaged.integrations.batch.judged import judged_engine, judged_flags
from jpaged.integrations.batch.lines import Settings
from jpaged.integrations.batch.manifest import make_manifest, manifest_path, model_identity
from jpaged.integrations.batch.metrics import serve_metrics
from jpaged.integrations.batch.run import (
    BROKEN_PIPE,
    FAILED_LINES,
    FATAL,
    OK,
    RunOptions,
    run_batch,
    sentence,
    summary_path,
)
from jpaged.integrations.batch.source import BatchError, Source
from jpaged.integrations.batch.stats import BatchStats
from jpaged.sampling_params import SamplingParams
from jpaged.streams import open_closed_streams, was_closed

SAMPLING = ("max_tokens", "temperature", "top_p")
SCRIPT = "serve_batch"  # the name of the command in a checkout
COMMON = (
    *("input", "--model", "--output", "--resume", "--overwrite", "--ordered", "--check"),
    *("--config", "--format", "--report", "--shard", "--max-tokens", "--temperature", "--seed"),
    *("--max-model-len", "--max-num-seqs", "--quantization", "--tensor-parallel-size"),
)
LEASTS = {"window": 1, "max_line_bytes": 1, "grace": 0, "replicas": 1, "replica_hosts": 1}
LEASTS |= {"replica_retries": 0}
MOST = 1 << 33  # of each of them: no timer waits for much longer, and no line is longer


class BatchParser(Parser):
    """A parser that exits with FATAL: argparse's own status 2 means here that some lines failed.
    file: the one of --config that the flags are from, which errors name.
    """

    def __init__(self, *, file: str | None = None, **settings: Any):
        super().__init__(error_status=FATAL, **settings)
        self._file = file

    def error(self, message: str) -> NoReturn:
        """Exit with one sentence."""
        super().error(message if self._file is None else f"--config {self._file}: {message}")

    def group(self, title: str) -> Any:
        """Return a function that adds flags to a new group; a flag's help states its default."""
        group = self.add_argument_group(title)

        def add(flag: str, help: str, *, default: Any = None, **settings: Any) -> None:
            shown = f"{default:g}" if isinstance(default, float) else default
            text = help if "(default: " in help else f"{help} (default: {shown})"
            group.add_argument(flag, help=text, default=default, **settings)

        return add


def make_parser(prog: str = SCRIPT) -> BatchParser:
    """Return the parser with every flag, in groups. Flags of sampling and of the engine that are
    not given leave the defaults of the model and of EngineConfig.
    """
    common = () if prog == SCRIPT else COMMON
    parser = BatchParser(prog=prog, description=__doc__, common=common)
    switch: Any = {"action": argparse.BooleanOptionalAction, "default": False}

    add = parser.group("input")
    first = (
        "a file of lines (also .gz, .zst), a Parquet file or a folder of them, a data set's "
        "folder, hf:NAME, or - for stdin (default: --config's)"
    )
    add("input", first, nargs="?", default=argparse.SUPPRESS)
    formats = ("auto", "jsonl", "text", "parquet", "dataset")
    add("--format", "format of the input; auto goes by its name", default="auto", choices=formats)
    columns = "columns of a table to read, each as the field of its name or as FIELD (default: all)"
    add("--columns", columns, nargs="+", metavar="[FIELD=]COLUMN")
    add("--split", "split of a data set (default: the only one)")
    long = "longer lines become error lines, and are never held in memory"
    add("--max-line-bytes", long, type=int, default=16 << 20, metavar="BYTES")
    ignored = "run lines with unknown fields without those fields; the summary counts them"
    add("--ignore-unknown", f"{ignored} (default: an error line)", **switch)
    shard = (
        "answer every N-th line from the I-th on, I from 0, into a file of its own: "
        "jpaged merge (default: a SLURM array task's own, else 0/1: all)"
    )
    add("--shard", shard, metavar="I/N")

    add = parser.group("images of prompts, with --images")
    fetched = "hosts whose image URLs are fetched: NAME, NAME:PORT or *.NAME (default: none)"
    add("--image-hosts", fetched, nargs="+", metavar="HOST")
    below = "read images by paths relative to the input's folder, and below it"
    add("--image-paths", f"{below} (default: an error line)", **switch)

    add = parser.group("output")
    add("--output", "file for the JSONL, - for stdout (default: print text for a person)")
    add("--ordered", "write in input order (default: as answers finish)", **switch)
    style = "form of failed batch requests: the error in the body, or as in vLLM's run_batch"
    add("--error-style", style, choices=("openai", "vllm"), default="openai")
    add("--summary", "file for the figures (default: OUTPUT.summary.json)", metavar="FILE")
    page = "write a page for browsers: throughput over time, latencies, lengths, errors"
    add("--report", f"{page} (default: none)", metavar="FILE")
    scrape = "port on which to answer Prometheus while the run lasts, 0 is off"
    add("--metrics-port", scrape, type=int, metavar="PORT", default=0)
    listen = "address to listen on for it; 0.0.0.0 is all addresses of this machine"
    add("--metrics-host", listen, metavar="ADDRESS", default="127.0.0.1")

    add = parser.group("starting, stopping, resuming")
    choice: Any = {"dest": "existing", "action": "store_const"}
    resume = "continue an existing output (default: ask on a terminal, else refuse)"
    add("--resume", resume, const="resume", **choice)
    again = "replace an existing output (default: as for --resume)"
    add("--overwrite", again, const="overwrite", **choice)
    retry = "with --resume, run failed lines again (default: they count as done)"
    add("--retry-failed", retry, **switch)
    grace = "seconds for running requests after Ctrl-C or SIGTERM; a second signal stops at once"
    add("--grace", grace, type=float, default=30.0, metavar="SECONDS")
    hopeless = "end the run if more than this share of at least 100 lines fails (default: never)"
    add("--max-error-rate", hopeless, type=float, metavar="SHARE")
    dry = "validate the whole input, count its tokens, plan memory and time; run nothing"
    add("--check", f"{dry} (default: off)", action="store_true", default=False)
    rates = (
        "for --check: tokens a second to expect, or the summary.json of a run that measured them "
        "(default: OUTPUT.summary.json if there is one)"
    )
    add("--rates", rates, metavar="TOK_S|SUMMARY")
    config = (
        "file of flags by name, YAML or JSON; the command line takes precedence (default: none)"
    )
    add("--config", config, metavar="FILE")

    add = parser.group(
        "sampling, for lines that set nothing (default: the model's generation_config)"
    )
    longest = "256 for prompts, 16 for /v1/completions, the rest of the context for chat"
    add("--max-tokens", f"tokens to generate (default: {longest})", type=int)
    add("--temperature", "0 is greedy (default: the model's, else 1)", type=float)
    add("--top-p", "nucleus sampling, 1 is off (default: the model's, else 1)", type=float)
    add("--seed", "combined with each line's id or number to its seed", type=int, default=0)

    add = parser.group("engines on a Ray cluster, pip install 'jpaged[ray]'")
    address = (
        "address of the cluster to run the engines on; auto is this machine's, local starts Ray "
        "here (default: one engine in this process)"
    )
    add("--ray", address, metavar="ADDRESS|local")
    replicas = "number of engines, each with --max-num-seqs rows"
    add("--replicas", replicas, type=int, default=1, metavar="N")
    hosts = "hosts of an engine, with an actor on each (default: as many as its devices need)"
    add("--replica-hosts", hosts, type=int, metavar="N")
    taken = (
        "what Ray reserves for an engine, on each of its hosts: GPU=2 or TPU=4 (default: as many "
        "GPUs as it has devices, or a host's TPU chips, if the cluster has them, else a CPU)"
    )
    add("--replica-resources", taken, nargs="+", metavar="NAME=COUNT")
    lost = "how often to run a line again whose engine died, before it becomes an error line"
    add("--replica-retries", lost, type=int, default=3, metavar="TIMES")

    add = parser.group("one engine over several processes, the same command in each")
    first = "address of the first process, which reads and writes (default: only this process)"
    add("--coordinator", first, metavar="HOST:PORT")
    add("--num-processes", "number of processes (default: what the cluster says)", type=int)
    add("--process-id", "number of this process, from 0 (default: what the cluster says)", type=int)

    group = parser.add_argument_group("model")
    model = "checkpoint folder, OWNER/NAME of the Hub, or jpaged-demo-hybrid (default: jpaged-demo)"
    group.add_argument("--model", help=model)
    group.add_argument("--adapter", nargs="+", metavar="NAME=FOLDER", help=adapter_flag.FLAG)
    window = "requests in the engine at once (default: 4 * max_num_seqs of all replicas)"
    group.add_argument("--window", help=window, type=int)
    add_engine_groups(parser)
    return parser


def parse_args(argv: list[str] | None = None, prog: str = SCRIPT) -> argparse.Namespace:
    """Return the flags of the command line over those of the file of --config. Exits with status 1
    and one sentence if they cannot work.
    """
    parser = make_parser(prog)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.config is not None:
        args = parser.parse_args(argv, config_args(parser, args.config))
    if "input" not in args:
        parser.error("give an input: a file, or - for stdin")
    args.argv, args.prog = argv, prog
    for name, least in LEASTS.items():
        if (value := getattr(args, name)) is not None and not least <= value <= MOST:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {value}: must be at least {least}, and at most {MOST}")
    if args.max_error_rate is not None and not 0 <= args.max_error_rate < 1:
        parser.error(f"--max-error-rate {args.max_error_rate}: must be from 0 to below 1")
    if args.ray is None and (args.replicas != 1 or args.replica_resources or args.replica_hosts):
        parser.error("--replicas, --replica-hosts and --replica-resources need --ray")
    if args.ray is not None and args.check:
        parser.error("--check plans for one engine on this machine: leave out --ray")
    for name in ("report", "summary"):  # which are written when hours have passed
        path = getattr(args, name)
        if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"--{name} {path}: no such folder")
    if args.retry_failed and args.existing != "resume":
        parser.error("--retry-failed needs --resume")
    if args.existing == "resume" and args.output in (None, "-"):
        parser.error("--resume needs the --output of the run to continue")
    if args.image_paths and args.input.startswith(("-", "hf:")):
        parser.error(f"--image-paths needs an input that is a file or a folder, not {args.input}")
    args.lead = lambda llm: llm
    args.overrides = {k: getattr(args, k) for k in SAMPLING if getattr(args, k) is not None}
    args.engine = engine_settings(args)
    try:
        args.engine_config = EngineConfig(**args.engine)
        args.line_images = line_images(args)
        args.replica_resources = parse_resources(args.replica_resources or ())
        SamplingParams(**args.overrides).validate(EngineConfig(), vocab_size=1)
        args.shard = parse_shard(args.shard, os.environ)
    except ValueError as e:  # ConfigError and RequestError are ValueErrors
        parser.error(str(e))
    if args.shard is not None and args.output not in (None, "-"):
        args.output = shard_path(args.output, args.shard)
    return args


def config_args(parser: BatchParser, path: str) -> argparse.Namespace:
    """Return the flags that a YAML or JSON file sets: a mapping from names, with - or _, to
    values.
    """

    def refuse(message: object) -> NoReturn:
        parser.error(f"--config {path}: {message}")

    try:
        values_by_flag = read_mapping(path)
    except (OSError, ValueError) as e:
        refuse(e)
    if not isinstance(values_by_flag, dict):
        refuse("must be a mapping of flags by name")
    # Keys are flags as they are defined: --no-ordered is a flag, but "no_ordered" is not a key.
    actions = [a for a in parser._actions if a.dest not in ("input", "config", "help")]
    known = {action.option_strings[0][2:]: action for action in actions}
    flags: list[str] = []
    for key, value in values_by_flag.items():
        name = str(key).replace("_", "-")
        # The value of a flag that takes JSON may be written as YAML.
        value = json.dumps(value) if isinstance(value, dict) else value
        values = [str(v) for v in value] if isinstance(value, list) else [str(value)]
        if name == "input":
            flags = [*values, *flags]
            continue
        if name not in known:
            refuse(f"{key!r} is not a flag; the flags are input, {', '.join(sorted(known))}")
        is_switch = isinstance(known[name], argparse.BooleanOptionalAction)
        if known[name].nargs == 0 and not isinstance(value, bool):
            refuse(f"{key!r} is {value!r}: must be true or false")
        if isinstance(value, bool) and (is_switch or known[name].nargs == 0):
            flags += [f"--{name}"] if value else [f"--no-{name}"] * is_switch
        elif value is not None:
            flags += [f"--{name}", *values]
    of_file = BatchParser(
        file=path, prog=parser.prog, parents=[parser], add_help=False, conflict_handler="resolve"
    )
    return of_file.parse_args(flags)


def read_mapping(path: str) -> Any:
    """Return the content of a JSON or YAML file. Raises OSError or ValueError."""
    text = Path(path).read_text()
    if path.endswith(".json"):
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ValueError(" ".join(str(e).split())) from e


def parse_shard(text: str | None, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (i, N) of "i/N", or of this SLURM array task; None for all lines. Raises
    ValueError.
    """
    if text is None:
        if "SLURM_ARRAY_TASK_ID" not in environ:
            return None
        task, low, step, count = (
            int(environ.get(f"SLURM_ARRAY_TASK_{k}", d))
            for k, d in (("ID", 0), ("MIN", 0), ("STEP", 1), ("COUNT", 1))
        )
        text = f"{(task - low) // step}/{count}"
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
        raise ValueError(f"--shard {text}: must be I/N with I from 0 to N - 1")
    return None if int(n) == 1 else (int(i), int(n))


def line_images(args: argparse.Namespace) -> LineImages:
    """Return what a run takes as images. Raises ConfigError."""
    folder = args.input if os.path.isdir(args.input) else os.path.dirname(args.input) or "."
    return LineImages.of(
        args.engine_config.image_limits,
        hosts=args.image_hosts or (),
        folder=os.path.abspath(folder) if args.image_paths else None,
    )


def make_llm(args: argparse.Namespace) -> Any:
    """Return the engine on the checkpoint. Raises BatchError if one of them is at fault."""
    path = model_path(args)
    try:
        if args.ray is not None:
            from jpaged.integrations.ray_llm import RayLLM

            return RayLLM(
                None if args.model is None else path,
                address=args.ray,
                replicas=args.replicas,
                hosts=args.replica_hosts,
                resources=args.replica_resources,
                max_retries=args.replica_retries,
                adapters=adapter_flag.folders(args.adapter),
                **{"seed": args.seed, **args.engine},
            )
        import jpaged

        llm = adapter_flag.loaded(jpaged.LLM(path, seed=args.seed, **args.engine), args.adapter)
        return args.lead(llm)
    except Exception as e:
        raise BatchError(f"cannot start the engine on {path}: {sentence(e)}") from e


def model_path(args: argparse.Namespace) -> str:
    if args.model is None:
        from jpaged.demo import MODEL_PATH

        return str(MODEL_PATH)
    from jpaged.checkpoint.hub import local_folder

    if not (folder := local_folder(args.model, weights=not args.check)).is_dir():
        raise BatchError(f"--model {args.model}: no such folder, and not an OWNER/NAME of the Hub")
    return str(folder)


def make_settings(args: argparse.Namespace, llm: Any, source: Source) -> Settings:
    return Settings(
        defaults=llm.default_sampling_params(),
        model="jpaged-demo" if args.model is None else Path(args.model).resolve().name,
        overrides=args.overrides,
        seed=args.seed,
        text=source.text,
        ignore_unknown=args.ignore_unknown,
        adapters=frozenset() if args.check else frozenset(adapter_flag.folders(args.adapter)),
        images=args.line_images,
    )


def manifest_of(args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """Return everything that an answer depends on, from files and flags alone.
    jpaged/integrations/batch/judged.py says which settings those are.
    """
    flags = {name: getattr(args, name) for name in judged_flags(flag_names())}
    if args.format == "auto":
        flags["format"] = guess_format(args.input)
    served = served_of(args)
    served["settings"] = {**flags, **served["settings"]}
    return make_manifest(**served, source=source.identity(), shard=args.shard)


def served_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the part of a manifest that says which model an engine serves, and with which
    settings.
    """
    folders = adapter_flag.folders(args.adapter)
    return {
        "model": model_identity(model_path(args)),
        "adapters": {name: model_identity(folder) for name, folder in folders.items()},
        "settings": judged_engine(args.engine),
    }


def flag_names() -> list[str]:
    """Return every flag by its attribute, without those of EngineConfig."""
    names = {action.dest for action in make_parser()._actions}
    return sorted(names - {field.name for field in dataclasses.fields(EngineConfig)})


def check_streams(args: argparse.Namespace) -> None:
    """Raise BatchError if the run would read from a standard stream, or write its answers to one,
    that is closed.
    """
    if args.input == "-" and was_closed(sys.stdin):
        raise BatchError("cannot read -: stdin is closed")
    if args.output in (None, "-") and not args.check and was_closed(sys.stdout):
        raise BatchError("cannot write the answers: stdout is closed; --output names a file")


def check_files(args: argparse.Namespace) -> None:
    """Raise BatchError if the run would write over what it reads, or over another file that it
    writes.
    """
    files: list[tuple[str, str | None, str]] = [("", args.input, "the input")]
    files.append(("", args.config, "the file of --config"))
    summary = args.summary
    if args.output not in (None, "-"):
        files.append(("--output", args.output, "the output"))
        files.append(("--output", manifest_path(args.output), "the manifest"))
        summary = summary or summary_path(args.output)
    files += [("--summary", summary, "the summary"), ("--report", args.report, "the report")]
    known: list[tuple[str, str]] = []
    for flag, path, what in files:
        if path is None or path == "-" or (os.path.exists(path) and not os.path.isfile(path)):
            continue  # a device may take all of them
        for other, meaning in known:
            if _is_one_file(path, other):
                raise BatchError(f"{flag} {path} is {meaning} itself")
        known.append((path, what))


def _is_one_file(path: str, other: str) -> bool:
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def ask(args: argparse.Namespace) -> Existing:
    """Return what to do with an existing output. A person at a terminal is asked."""
    if args.existing is not None:
        return args.existing
    path = args.output
    there = path not in (None, "-") and os.path.isfile(path) and os.path.getsize(path)
    if not there or args.input == "-" or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "refuse"
    question = f"{path} exists. Resume it, overwrite it, or quit? [R/o/q] "
    print(question, end="", file=sys.stderr, flush=True)
    answers: dict[str, Existing] = {"": "resume", "r": "resume", "o": "overwrite"}
    return answers.get(sys.stdin.readline().strip().lower()[:1], "refuse")


def resuming(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the command line that resumes this run."""
    script = sys.argv[0] if sys.argv[0].endswith("serve_batch.py") else "scripts/serve_batch.py"
    program = ("python", script) if args.prog == SCRIPT else args.prog.split()
    kept = (a for a in args.argv if a not in ("--resume", "--overwrite"))
    return (*program, *kept, "--resume")


def run_check(args: argparse.Namespace, source: Source) -> int:
    from jpaged.integrations.batch.check import Rate, check

    earlier = summary_path(args.output) if args.output not in (None, "-") else ""
    rates = args.rates or (earlier if os.path.exists(earlier) else None)
    good = check(
        source,
        model_path(args),
        args.engine_config,
        lambda llm: make_settings(args, llm, source),
        shard=args.shard,
        rate=None if rates is None else Rate.read(rates),
        program=args.prog,
    )
    return OK if good else FAILED_LINES


def run(args: argparse.Namespace) -> int:
    """Run everything from the parsed flags on. Return the exit status. Raises BatchError,
    KeyboardInterrupt and OSError.
    """
    names = ("format", "max_line_bytes", "columns", "split")
    options = {name: getattr(args, name) for name in names}
    with contextlib.closing(open_source(args.input, **options)) as source:
        if args.check:
            return run_check(args, source)
        check_files(args)
        run_options = RunOptions(
            output=args.output,
            existing=ask(args),
            retry_failed=args.retry_failed,
            ordered=args.ordered,
            window=args.window or 4 * args.replicas * args.engine_config.all_rows,
            grace=args.grace,
            max_error_rate=args.max_error_rate,
            error_style=args.error_style,
            shard=args.shard,
            summary=args.summary,
            program=args.prog,
            again=resuming(args),
        )
        manifest, stats, stdout = manifest_of(args, source), BatchStats(), bytes_of(sys.stdout)
        # Libraries may print (Ray does when an actor dies): keep that out of the answers.
        elsewhere = sys.stderr if args.output == "-" else sys.stdout
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(elsewhere))
            if args.metrics_port:
                stack.enter_context(serve_metrics(stats, args.metrics_host, args.metrics_port))
            if args.report is not None:
                stack.callback(report, args, stats)
            try:
                return run_batch(
                    run_options,
                    source,
                    manifest,
                    lambda: make_llm(args),
                    lambda llm: make_settings(args, llm, source),
                    stats=stats,
                    stdout=stdout,
                )
            except KeyboardInterrupt:
                if not stats.engine:  # it had not begun
                    raise
                said = f"interrupted: {stats.done} lines were answered"
                print(f"{args.prog}: {said}", file=sys.stderr, flush=True)
                return 130


def report(args: argparse.Namespace, stats: BatchStats) -> None:
    """Write the page of a run that has begun, however it ended."""
    if not stats.engine:
        return
    from jpaged.integrations.batch.report import render, write_report

    name = os.path.basename(args.output or "-")
    title = "Batch run" if name == "-" else f"Batch run: {name}"
    write_report(args.report, render(stats, title=title, settings=told(args)))


def told(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that are not at their defaults, for the report."""
    settings = {"input": args.input, "model": args.model or "the embedded one"}
    for action in make_parser()._actions:
        value = getattr(args, action.dest, None)
        if action.dest not in settings and value not in (None, {}, action.default):
            settings[action.dest] = "/".join(map(str, value)) if isinstance(value, tuple) else value
    return settings


def main(argv: list[str] | None = None, prog: str = SCRIPT) -> int:
    """Run, and return the exit status. An error is one sentence on stderr (JPAGED_DEBUG=1 adds the
    traceback).
    """
    open_closed_streams()
    args = parse_args(argv, prog)
    gpu_share.take_most()
    try:
        check_streams(args)
        if args.coordinator is None:
            return run(args)
        from jpaged.integrations.batch.peers import run_together

        return run_together(args, run, make_llm, served_of)
    except (BatchError, CheckpointError, ConfigError) as e:
        print(f"{prog}: {e}", file=sys.stderr, flush=True)
        if isinstance(e.__cause__, PeerError):
            os._exit(FATAL)  # threads that wait for the other processes would delay the exit
        if os.environ.get("JPAGED_DEBUG"):
            raise
        return FATAL
    except KeyboardInterrupt:
        print(f"{prog}: interrupted: nothing had run", file=sys.stderr)
        return 130
    except OSError as e:  # errors of writing; those of reading and opening are BatchErrors
        # Otherwise the interpreter fails when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(e, BrokenPipeError):
            return BROKEN_PIPE
        print(f"{prog}: cannot write: {sentence(e)}", file=sys.stderr)
        return FATAL
