"""Time a batch file against LLM.generate: the same engine, the same requests, in turn; then the
ratio of the two.

    python scripts/bench_batch.py --random 60m --max-num-batched-tokens 1024
    python scripts/bench_batch.py path/to/checkpoint --requests 256 --rounds 5

The batch run reads a JSONL file, parses, seeds, formats and writes each line, and flushes as
answers finish; `generate` gets lists of token ids. Flags are bench.py's; prompts are random ids,
EOS is ignored. A first round of each compiles.
"""

import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

from jpaged.errors import JpagedError
from jpaged.integrations.batch.lines import Settings
from jpaged.integrations.batch.manifest import make_manifest
from jpaged.integrations.batch.run import OK, Job, run_batch
from jpaged.integrations.batch.source import open_source
from jpaged.request.sampling_params import SamplingParams


def write_lines(
    path: Path, prompts: list[list[int]], outputs: list[int], temperature: float
) -> None:
    with open(path, "w") as file:
        for prompt, length in zip(prompts, outputs, strict=True):
            line = {
                "prompt_token_ids": prompt,
                "max_tokens": length,
                "temperature": temperature,
                "ignore_eos": True,
            }
            file.write(json.dumps(line) + "\n")


def run_file(llm: Any, source: Path, output: Path) -> None:
    """One batch run, from opening the input to the output's last byte on the disk."""
    opened = open_source(str(source))
    job = Job(output=str(output), existing="overwrite", window=4 * llm.engine_config.max_num_seqs)
    manifest = make_manifest(model={}, settings={}, source=opened.identity(), shard=None)
    with contextlib.closing(opened), contextlib.redirect_stdout(io.StringIO()):
        status = run_batch(
            job, opened, manifest, lambda: llm, lambda llm: Settings(defaults=SamplingParams())
        )
    assert status == OK, f"exit status {status}"


def run_generate(
    llm: Any, prompts: list[list[int]], outputs: list[int], temperature: float
) -> None:
    """The same requests in one call."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in outputs
    ]
    llm.generate(prompts, params, use_tqdm=False)


def main(argv: list[str] | None = None) -> int:
    args = bench.parse_args(argv)
    try:
        config = bench.model_config(args)
        work = bench.workload(args, config.vocab_size)
        prompts, outputs = work.requests_of()
        llm = bench.make_llm(args, config, work)
    except JpagedError as e:
        print(f"bench_batch: {e}", file=sys.stderr)
        return 1
    found: dict[str, list[tuple[float, float]]] = {"generate": [], "batch": []}
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        write_lines(source, prompts, outputs, work.temperature)
        for i in range(1 + args.repeat):
            # Each goes first every other time: what disturbs the machine then disturbs both.
            for name in sorted(found, reverse=bool(i % 2)):
                began = time.perf_counter(), time.process_time()
                if name == "batch":
                    run_file(llm, source, output)
                else:
                    run_generate(llm, prompts, outputs, work.temperature)
                found[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    for i, clock in enumerate(("wall", "CPU")):
        times = {
            name: sorted(pair[i] for pair in pairs[1:]) for name, pairs in found.items()
        }  # the first compiles
        for name, seconds in times.items():
            told = ", ".join(f"{s:.2f}" for s in seconds)
            print(
                f"{clock:<5} {name:<9} {sum(outputs) / seconds[0]:8.1f} output tok/s at "
                f"best; seconds: {told}"
            )
        best = times["generate"][0] / times["batch"][0]
        median = statistics.median(times["generate"]) / statistics.median(times["batch"])
        print(f"{clock:<5} ratio     {best:8.3f} of the best runs, {median:.3f} of the medians")
    return 0


if __name__ == "__main__":
    sys.exit(main())
