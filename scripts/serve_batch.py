"""Answer a file of prompts: OpenAI batch requests, bare objects, plain text or a table in, JSONL
out.

    python scripts/serve_batch.py prompts.jsonl                          # prints prompts and
    answers to read python scripts/serve_batch.py batch.jsonl --model DIR --output answers.jsonl
    python scripts/serve_batch.py batch.jsonl --model DIR --output answers.jsonl --resume python
    scripts/serve_batch.py batch.jsonl --model DIR --check       # validates and plans, runs nothing
    cat prompts.txt | python scripts/serve_batch.py - --format text --output -

The input is read as a stream, a bounded window at a time; answers are written as they finish. A bad
line is an error line, never the end of the run. A run that was killed goes on with --resume. Forms
of lines, rules of resuming, shards: docs/batch.md. Exit status: 0 all answered; 2 some lines
failed; 1 nothing could run, or the engine or the input failed on the way; 3 stopped by
--max-error-rate; 130 or 143 stopped by Ctrl-C or SIGTERM; 141 the reader of stdout went away.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError, RequestError
from jpaged.integrations.batch.journal import Existing, shard_path
from jpaged.integrations.batch.lines import Settings
from jpaged.integrations.batch.manifest import make_manifest, model_identity
from jpaged.integrations.batch.metrics import serve_metrics
from jpaged.integrations.batch.report import render, write_report
from jpaged.integrations.batch.run import (
    BROKEN_PIPE,
    FAILED_LINES,
    FATAL,
    OK,
    Job,
    run_batch,
    sentence,
)
from jpaged.integrations.batch.source import BatchError, Source, guess_format, open_source
from jpaged.integrations.batch.stats import BatchStats
from jpaged.request.sampling_params import SamplingParams

FORMATS = ("auto", "jsonl", "text", "parquet", "dataset")
SAMPLING = ("max_tokens", "temperature", "top_p")
ENGINE = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "dtype",
    "memory_utilization",
    "swap_space_gib",
    "enable_prefix_caching",
)


class Parser(argparse.ArgumentParser):
    """argparse exits 2, which here means that some lines failed."""

    def error(self, message: str) -> NoReturn:
        self.exit(FATAL, f"serve_batch: {message} (--help lists the flags)\n")


def make_parser() -> Parser:
    """Every flag, in groups; flags that were not given are None, and the engine's or the model's
    defaults hold.
    """
    parser = Parser(
        prog="serve_batch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    switch: Any = argparse.BooleanOptionalAction

    add = parser.add_argument_group("input").add_argument
    add(
        "input",
        nargs="?",
        default=argparse.SUPPRESS,
        help="a file of lines (also .gz, .zst), a Parquet file or a "
        "folder of them, a data set's folder, hf:NAME, or - for stdin (required, here or "
        "in --config)",
    )
    add(
        "--format",
        choices=FORMATS,
        default="auto",
        help="what the input is (default: auto, by its name)",
    )
    add(
        "--columns",
        nargs="+",
        metavar="[FIELD=]COLUMN",
        help="columns of a table to read, each as the field of its name or as FIELD (default: all)",
    )
    add("--split", help="split of a data set (default: the only one)")
    add(
        "--max-line-bytes",
        type=int,
        default=16 << 20,
        metavar="BYTES",
        help="longer lines are error lines, and never held in memory (default: 16777216)",
    )
    add(
        "--ignore-unknown",
        action=switch,
        default=False,
        help="run lines with unknown fields, without those; they are "
        "counted in the summary (default: an error line)",
    )
    add(
        "--shard",
        metavar="I/N",
        help="answer every N-th line from the I-th on, I from 0, into a file of its own: "
        "scripts/merge_shards.py (default: a SLURM array task's own, else 0/1: all)",
    )

    add = parser.add_argument_group("output").add_argument
    add(
        "--output",
        help="where the JSONL goes, - for stdout (default: print prompts and answers to read)",
    )
    add(
        "--ordered",
        action=switch,
        default=False,
        help="write in input order (default: as answers finish)",
    )
    add(
        "--error-style",
        choices=("openai", "vllm"),
        default="openai",
        help="form of failed batch requests: the error "
        "in the body, or beside the response as vLLM's run_batch has it (default: openai)",
    )
    add(
        "--summary",
        metavar="FILE",
        help="where the run's figures go (default: OUTPUT.summary.json)",
    )
    add(
        "--report",
        metavar="FILE",
        help="a page for any browser: throughput over time, latencies, lengths, errors "
        "(default: none)",
    )
    add(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="answer Prometheus at this port while the run lasts, 0 is off (default: 0)",
        default=0,
    )
    add(
        "--metrics-host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="where to listen for it; 0.0.0.0 is every "
        "address of this machine (default: 127.0.0.1)",
    )

    add = parser.add_argument_group("starting, stopping, resuming").add_argument
    how: dict[str, Any] = {"dest": "existing", "action": "store_const"}
    add(
        "--resume",
        const="resume",
        **how,
        help="go on with the output that is there (default: ask on a terminal, else refuse)",
    )
    add(
        "--overwrite",
        const="overwrite",
        **how,
        help="start the output again (default: as for --resume)",
    )
    add(
        "--retry-failed",
        action=switch,
        default=False,
        help="with --resume: run the lines again that failed; the new "
        "answer supersedes (default: they are done)",
    )
    add(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="for running requests to finish after Ctrl-C or "
        "SIGTERM; a second one stops at once (default: 30)",
    )
    add(
        "--max-error-rate",
        type=float,
        metavar="SHARE",
        help="end the run once more than this share of its lines "
        "failed, 100 lines at the least (default: never)",
    )
    add(
        "--check",
        action="store_true",
        help="validate the whole input, count its tokens, plan memory and time; run "
        "nothing (default: off)",
    )
    add(
        "--rates",
        metavar="TOK_S|SUMMARY",
        help="for --check: tokens a second to expect, or the summary.json of a run "
        "that measured them (default: OUTPUT.summary.json if there is one)",
    )
    add(
        "--config",
        metavar="FILE",
        help="flags by name as YAML or JSON; those given here win (default: none)",
    )

    add = parser.add_argument_group(
        "sampling, for lines that do not say (else the model's generation_config)"
    )
    add = add.add_argument
    add(
        "--max-tokens",
        type=int,
        help="tokens to generate (default: 256 for prompts, 16 for /v1/completions, the rest "
        "of the context for chat)",
    )
    add("--temperature", type=float, help="0 is greedy (default: the model's, else 1)")
    add("--top-p", type=float, help="nucleus sampling, 1 is off (default: the model's, else 1)")
    add(
        "--seed",
        type=int,
        default=0,
        help="mixed with each line's id or number: one line, one stream (default: 0)",
    )

    add = parser.add_argument_group(
        "engines on a Ray cluster, pip install 'jpaged[ray]'"
    ).add_argument
    add(
        "--ray",
        metavar="ADDRESS|local",
        help="run the engines as actors there, auto is the cluster of this machine; "
        "local starts Ray here (default: one engine in this process)",
    )
    add(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="engines, each with all rows of --max-num-seqs (default: 1)",
    )
    add(
        "--replica-resources",
        nargs="+",
        metavar="NAME=COUNT",
        help="what Ray sets aside for an engine: GPU=2 or "
        "TPU=4 (default: a GPU, or a host's TPU chips where the cluster has them, else a CPU)",
    )
    add(
        "--replica-retries",
        type=int,
        default=3,
        metavar="TIMES",
        help="how often a line is run again whose engine "
        "died, before it is an error line (default: 3)",
    )

    add = parser.add_argument_group("engine").add_argument
    add(
        "--model",
        help="checkpoint folder, Hugging Face's layout or Orbax (default: the embedded demo model)",
    )
    add("--window", type=int, help="requests in the engine at once (default: 4 * max_num_seqs)")
    add(
        "--max-model-len",
        type=int,
        help="tokens of prompt and answer together (default: the model's)",
    )
    add(
        "--max-num-seqs",
        type=int,
        help=f"rows that run at once (default: {EngineConfig.max_num_seqs})",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        help=f"prefill tokens a step (default: {EngineConfig.max_num_batched_tokens})",
    )
    add("--block-size", type=int, help=f"tokens a KV block (default: {EngineConfig.block_size})")
    add("--num-blocks", type=int, help="KV blocks (default: from the memory there is)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="serve in this dtype (default: the checkpoint's)",
    )
    add(
        "--memory-utilization",
        type=float,
        help="share of an accelerator's memory to use (default: "
        f"{EngineConfig.memory_utilization})",
    )
    add(
        "--swap-space-gib",
        type=float,
        help="host memory for preempted requests, GiB (default: 0: compute again)",
    )
    add(
        "--prefix-caching",
        dest="enable_prefix_caching",
        action=switch,
        default=None,
        help="compute equal beginnings of prompts once (default: on)",
    )
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line over the file of --config. Exits with status 1 and one sentence where they
    cannot work.
    """
    parser = make_parser()
    argv = sys.argv[1:] if argv is None else argv
    first = parser.parse_args(argv)
    args = (
        parser.parse_args(argv, config_args(parser, first.config))
        if first.config is not None
        else first
    )
    if "input" not in args:
        parser.error("give an input: a file, or - for stdin")
    args.argv = argv
    leasts = (
        ("window", 1),
        ("max_line_bytes", 1),
        ("grace", 0),
        ("replicas", 1),
        ("replica_retries", 0),
    )
    for name, least in leasts:
        if getattr(args, name) is not None and not getattr(args, name) >= least:
            parser.error(
                f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}"
            )
    if args.max_error_rate is not None and not 0 <= args.max_error_rate < 1:
        parser.error(f"--max-error-rate {args.max_error_rate}: must be from 0 to below 1")
    if args.ray is None and (args.replicas != 1 or args.replica_resources):
        parser.error("--replicas and --replica-resources need --ray")
    if args.ray is not None and args.check:
        parser.error("--check plans one engine on this machine: leave out --ray")
    if args.report is not None and not os.path.isdir(os.path.dirname(args.report) or "."):
        parser.error(f"--report {args.report}: no such folder")
    if args.retry_failed and args.existing != "resume":
        parser.error("--retry-failed needs --resume")
    if args.existing == "resume" and args.output in (None, "-"):
        parser.error("--resume needs the --output of the run to go on with")
    args.overrides = {k: getattr(args, k) for k in SAMPLING if getattr(args, k) is not None}
    try:
        args.replica_resources = parse_resources(args.replica_resources or ())
        SamplingParams(**args.overrides).validate(EngineConfig(), vocab_size=1)
        args.shard = parse_shard(args.shard, os.environ)
    except (RequestError, ValueError) as e:
        parser.error(str(e))
    if args.shard is not None and args.output not in (None, "-"):
        args.output = shard_path(args.output, args.shard)
    return args


def config_args(parser: Parser, path: str) -> argparse.Namespace:
    """What the flags of a YAML or JSON file come to: a mapping of names, with - or _, to values."""
    try:
        text = Path(path).read_text()
        if path.endswith(".json"):
            found = json.loads(text)
        else:
            import yaml

            try:
                found = yaml.safe_load(text)
            except yaml.YAMLError as e:
                raise ValueError(" ".join(str(e).split())) from e
    except (OSError, ValueError) as e:
        parser.error(f"--config {path}: {e}")
    if not isinstance(found, dict):
        parser.error(f"--config {path}: must be a mapping of flags by name")
    flags: list[str] = []
    # With its prefix, as it is written: --no-ordered is a flag, "no_ordered" no key.
    known = {
        a.option_strings[0][2:]: a
        for a in parser._actions
        if a.option_strings and a.dest != "config"
    }
    for key, value in found.items():
        name = str(key).replace("_", "-")
        values = [str(v) for v in value] if isinstance(value, list) else [str(value)]
        if name == "input":
            flags = [*values, *flags]
        elif name not in known or name == "help":
            parser.error(
                f"--config {path}: {key!r} is no flag; there are input, {', '.join(sorted(known))}"
            )
        elif isinstance(known[name], argparse.BooleanOptionalAction) and isinstance(value, bool):
            flags += [f"--{name}" if value else f"--no-{name}"]
        elif known[name].nargs == 0 and isinstance(value, bool):
            flags += [f"--{name}"] if value else []
        elif known[name].nargs == 0:
            parser.error(f"--config {path}: {key!r} is {value!r}: must be true or false")
        elif value is not None:
            flags += [f"--{name}", *values]
    own = Parser(prog="serve_batch", parents=[parser], add_help=False, conflict_handler="resolve")
    own.error = lambda message: parser.error(f"--config {path}: {message}")
    return own.parse_args(flags)


def parse_shard(text: str | None, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """(i, N) of "i/N", or of the SLURM array task that this is; None for all lines. Raises
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


def parse_resources(texts: Sequence[str]) -> dict[str, float]:
    """{name: count} of texts "NAME=COUNT". Raises ValueError."""
    found = {}
    for text in texts:
        name, _, count = text.partition("=")
        try:
            found[name] = float(count)
        except ValueError:
            raise ValueError(
                f"--replica-resources {text}: must be NAME=COUNT, as in GPU=1"
            ) from None
    return found


def make_llm(args: argparse.Namespace) -> Any:
    """The engine on the checkpoint, or BatchError with what is wrong with either."""
    given = {name: getattr(args, name) for name in ENGINE}
    given = {k: v for k, v in given.items() if v is not None}
    path = model_path(args)
    try:
        if args.ray is not None:
            from jpaged.integrations.ray_llm import RayLLM

            return RayLLM(
                args.model,
                address=args.ray,
                replicas=args.replicas,
                resources=args.replica_resources,
                max_retries=args.replica_retries,
                seed=args.seed,
                **given,
            )
        import jpaged

        return jpaged.LLM(path, seed=args.seed, **given)
    except Exception as e:
        raise BatchError(f"cannot start the engine on {path}: {sentence(e)}") from e


def model_path(args: argparse.Namespace) -> str:
    if args.model is None:
        from jpaged.demo import MODEL_PATH

        return str(MODEL_PATH)
    if not Path(args.model).is_dir():
        raise BatchError(
            f"--model {args.model}: no such folder (nothing is downloaded: pass a local checkpoint)"
        )
    return args.model


def make_settings(args: argparse.Namespace, defaults: SamplingParams, source: Source) -> Settings:
    name = "jpaged-demo" if args.model is None else Path(args.model).resolve().name
    return Settings(
        defaults=defaults,
        model=name,
        overrides=args.overrides,
        seed=args.seed,
        text=source.text,
        ignore_unknown=args.ignore_unknown,
    )


def manifest_of(args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """Everything that an answer depends on, from files and flags alone."""
    format = guess_format(args.input) if args.format == "auto" else args.format
    settings = {
        name: getattr(args, name)
        for name in ("max_line_bytes", "ignore_unknown", "error_style", "seed")
    }
    settings |= {name: getattr(args, name) for name in (*SAMPLING, "max_model_len", "dtype")}
    return make_manifest(
        model=model_identity(model_path(args)),
        settings={"format": format, **settings},
        source=source.identity(),
        shard=args.shard,
    )


def ask(args: argparse.Namespace) -> Existing:
    """What to do with an output that is there already: a person at a terminal is asked."""
    if args.existing is not None:
        return args.existing
    there = (
        args.output not in (None, "-")
        and os.path.isfile(args.output)
        and os.path.getsize(args.output)
    )
    if not there or args.input == "-" or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "refuse"
    print(
        f"{args.output} exists. Resume it, overwrite it, or quit? [R/o/q] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    answers: dict[str, Existing] = {"": "resume", "r": "resume", "o": "overwrite"}
    return answers.get(sys.stdin.readline().strip().lower()[:1], "refuse")


def resuming(args: argparse.Namespace) -> tuple[str, ...]:
    """The command line that goes on with this run."""
    program = sys.argv[0] if sys.argv[0].endswith("serve_batch.py") else "scripts/serve_batch.py"
    return (
        "python",
        program,
        *(a for a in args.argv if a not in ("--resume", "--overwrite")),
        "--resume",
    )


def run_check(args: argparse.Namespace, source: Source) -> int:
    from jpaged.integrations.batch.check import Rate, check

    given = {name: value for name in ENGINE if (value := getattr(args, name)) is not None}
    earlier = f"{args.output}.summary.json" if args.output not in (None, "-") else ""
    rates = args.rates or (earlier if os.path.exists(earlier) else None)

    def settings_of(llm: Any) -> Settings:
        return make_settings(args, llm.default_sampling_params(), source)

    try:
        config = EngineConfig(**given)
    except ConfigError as e:
        raise BatchError(str(e)) from None
    rate = None if rates is None else Rate.read(rates)
    good = check(source, model_path(args), config, settings_of, shard=args.shard, rate=rate)
    return OK if good else FAILED_LINES


def run(args: argparse.Namespace) -> int:
    """Everything between the command line and the exit status. Raises BatchError,
    KeyboardInterrupt, OSError.
    """
    source = open_source(
        args.input,
        format=args.format,
        max_line_bytes=args.max_line_bytes,
        columns=args.columns,
        split=args.split,
    )
    with contextlib.closing(source):
        if args.check:
            return run_check(args, source)
        if all(map(os.path.exists, (args.output or "-", args.input))) and os.path.samefile(
            args.output, args.input
        ):
            raise BatchError(f"--output {args.output} is the input itself")
        window = args.window or 4 * args.replicas * (args.max_num_seqs or EngineConfig.max_num_seqs)
        job = Job(
            output=args.output,
            existing=ask(args),
            retry_failed=args.retry_failed,
            ordered=args.ordered,
            window=window,
            grace=args.grace,
            max_error_rate=args.max_error_rate,
            error_style=args.error_style,
            shard=args.shard,
            summary=args.summary,
            again=resuming(args),
        )

        def settings_of(llm: Any) -> Settings:
            return make_settings(args, llm.default_sampling_params(), source)

        manifest, stats, stdout = manifest_of(args, source), BatchStats(), sys.stdout.buffer
        with contextlib.ExitStack() as stack:
            # What libraries print (Ray does, when an actor dies) is not to come among the answers.
            stack.enter_context(
                contextlib.redirect_stdout(sys.stderr if args.output == "-" else sys.stdout)
            )
            if args.metrics_port:
                stack.enter_context(serve_metrics(stats, args.metrics_host, args.metrics_port))
            try:
                return run_batch(
                    job,
                    source,
                    manifest,
                    lambda: make_llm(args),
                    settings_of,
                    stats=stats,
                    stdout=stdout,
                )
            finally:
                if args.report is not None and stats.engine:  # it began, however it ended
                    name = os.path.basename(args.output or "-")
                    title = "Batch run" if name == "-" else f"Batch run: {name}"
                    write_report(args.report, render(stats, title=title, settings=told(args)))


def told(args: argparse.Namespace) -> dict[str, Any]:
    """What this run was told, for its report: the flags that are not at their defaults."""
    found = {"input": args.input, "model": args.model or "the embedded one"}
    for action in make_parser()._actions:
        value = getattr(args, action.dest, None)
        if action.dest not in found and value not in (None, {}, action.default):
            found[action.dest] = "/".join(map(str, value)) if isinstance(value, tuple) else value
    return found


def main(argv: list[str] | None = None) -> int:
    """Run and return the exit status; what goes wrong is one sentence on stderr (JPAGED_DEBUG=1
    adds the traceback).
    """
    args = parse_args(argv)
    try:
        return run(args)
    except BatchError as e:
        print(f"serve_batch: {e}", file=sys.stderr)
        if os.environ.get("JPAGED_DEBUG"):
            raise
        return FATAL
    except KeyboardInterrupt:
        print("serve_batch: interrupted: nothing had run", file=sys.stderr)
        return 130
    except OSError as e:  # of writing: reading and opening are BatchErrors
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 1
        )  # else the interpreter complains when it flushes stdout at exit
        if isinstance(e, BrokenPipeError):
            return BROKEN_PIPE
        print(f"serve_batch: cannot write: {sentence(e)}", file=sys.stderr)
        return FATAL


if __name__ == "__main__":
    sys.exit(main())
