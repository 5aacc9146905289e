"""Time a batch file against LLM.generate: the same engine, the same requests, in turn; then the ratio of the two.

    python scripts/bench_batch.py --random 60m --max-num-batched-tokens 1024
    python scripts/bench_batch.py path/to/checkpoint --requests 256 --rounds 5

The batch run reads a JSONL file, parses, seeds, formats and writes each line, and flushes as answers finish; `generate`
gets lists of token ids. Flags are bench.py's; prompts are random ids, EOS is ignored. A first round of each compiles.
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

from jpaged.engine.sampling_params import SamplingParams
from jpaged.errors import JpagedError
from jpaged.integrations.batch.lines import Settings
from jpaged.integrations.batch.manifest import make_manifest
from jpaged.integrations.batch.run import OK, Job, run_batch
from jpaged.integrations.batch.source import open_source


def write_lines(path: Path, prompts: list[list[int]], outputs: list[int], temperature: float) -> None:
    with open(path, "w") as file:
        for prompt, length in zip(prompts, outputs, strict=True):
            line = {"prompt_token_ids": prompt, "max_tokens": length, "temperature": temperature, "ignore_eos": True}
            file.write(json.dumps(line) + "\n")


def time_batch(llm: Any, source: Path, output: Path) -> float:
    """Seconds of one batch run, from opening the input to the output's last byte on the disk."""
    began = time.perf_counter()
    opened = open_source(str(source))
    job = Job(output=str(output), existing="overwrite", window=4 * llm.engine_config.max_num_seqs)
    manifest = make_manifest(model={}, settings={}, source=opened.identity(), shard=None)
    with contextlib.closing(opened), contextlib.redirect_stdout(io.StringIO()):
        status = run_batch(job, opened, manifest, lambda: llm, lambda llm: Settings(defaults=SamplingParams()))
    seconds = time.perf_counter() - began
    assert status == OK, f"exit status {status}"
    return seconds


def time_generate(llm: Any, prompts: list[list[int]], outputs: list[int], temperature: float) -> float:
    """Seconds of one call."""
    params = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in outputs]
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


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
    times: dict[str, list[float]] = {"generate": [], "batch": []}
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        write_lines(source, prompts, outputs, work.temperature)
        for _ in range(1 + args.repeat):
            times["generate"].append(time_generate(llm, prompts, outputs, work.temperature))
            times["batch"].append(time_batch(llm, source, output))
    tokens = sum(outputs)
    for name, found in times.items():
        later = sorted(found[1:])
        rates = ", ".join(f"{tokens / s:.1f}" for s in later)
        print(f"{name:<9} {tokens / statistics.median(later):8.1f} output tok/s in the median ({rates})")
    ratio = statistics.median(a / b for a, b in zip(times["generate"][1:], times["batch"][1:], strict=True))
    print(f"ratio     {ratio:8.3f} (median of {args.repeat} rounds, batch by generate)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
