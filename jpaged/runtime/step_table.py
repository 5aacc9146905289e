"""The table of steps: every shape that a step of an engine can have, compiled or not."""

import dataclasses
import functools
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal

from tqdm import tqdm

from jpaged.config import EngineConfig
from jpaged.engine.scoring import Scoring
from jpaged.engine.shapes import (
    PrefillShape,
    ReplayShape,
    Shape,
    moved_blocks,
    padded_blocks,
    scored_shapes,
    shape_table,
)
from jpaged.runtime.compiled_steps import CompiledSteps
from jpaged.runtime.kv_cache import PoolSpec
from jpaged.runtime.steps import StepSetting
from kernels_pallas.implementation import CUDA

# Steps that compile side by side on a GPU, where XLA tries products of each with memory of the
# device: a pool leaves room for one (footprint.autotuning_bytes), and steps do not run meanwhile.
TRIALS_AT_ONCE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketReport:
    """One shape of the table of steps (see engine.shapes): how often it ran, and its costs.

    features: what its draw can do, "plain", "filtered" or "full"; "none" for a decode that leaves
    its draw to another step; of a prefill "prompt" if it scores prompts, with what more it returns
    of them ("prompt, top 256, candidates 32, entropy, part": logits of some tokens alone), "states"
    if it returns hidden states, else "plain". masks:
    whether the host makes masks for it, of what may be drawn or is scored.
    padding_waste: the share of its tokens (in a draw: rows) that was padding. compile_seconds and
    the bytes are None until it is compiled. temp_bytes: temporaries while it runs.
    """

    phase: str
    tokens: int
    rows: int
    tables: int
    blocks: int
    steps: int
    features: str
    loras: int
    masks: bool
    hits: int
    padding_waste: float
    compile_seconds: float | None
    executable_bytes: int | None
    temp_bytes: int | None


@dataclasses.dataclass
class Usage:
    """How often a compiled step ran, and over how many tokens (a draw: rows), without padding and
    with it.
    """

    hits: int = 0
    tokens: int = 0
    padded: int = 0


def step_table(
    setting: StepSetting, *, tokens: int | None = None, rows: int | None = None
) -> list[Shape]:
    """Return every shape of a setting, smallest first; see engine.shapes.shape_table."""
    tables, config = len(setting.pools), setting.config
    table = dict.fromkeys(shape_table(config, tables=tables, tokens=tokens, rows=rows))
    if setting.num_replayed:
        prefills = [shape for shape in table if isinstance(shape, PrefillShape)]
        table |= dict.fromkeys(ReplayShape.after(shape, config) for shape in prefills)
    return sorted(table, key=lambda shape: shape.order)


def warmup(
    steps: CompiledSteps,
    *,
    tokens: int | None = None,
    rows: int | None = None,
    scoring: Scoring | None = None,
    use_tqdm: bool = False,
) -> float:
    """Compile the steps of the table that are not compiled yet, in parallel; return the seconds.
    scoring: also those that score so.
    """
    started, config = time.perf_counter(), steps.setting.config
    table = step_table(steps.setting, tokens=tokens, rows=rows)
    if scoring is not None:
        table += scored_shapes(table, scoring, config)
    # The largest first: they take longest.
    jobs: list[Any] = [functools.partial(steps.__getitem__, bucket) for bucket in reversed(table)]
    for group, pool in enumerate(steps.setting.pools):
        moves: tuple[Literal["read_blocks", "write_blocks"], ...] = ()
        if config.swap_space_gib or config.prefix_store is not None:
            moves = ("read_blocks", "write_blocks")
        elif pool.size.experts:  # read when a sequence ends
            moves = ("read_blocks",)
        jobs += [
            functools.partial(steps.move, move, group, size)
            for move in moves
            for size in _sizes_moved(config, pool)
        ]
    jobs += [steps.set_counts, steps.copy_blocks]
    threads = os.cpu_count() or 1
    if steps.placement.device.platform in CUDA:
        threads = min(threads, TRIALS_AT_ONCE)
    with ThreadPoolExecutor(threads) as pool:
        done = as_completed([pool.submit(job) for job in jobs])
        bar: dict[str, Any] = {"unit": "step", "desc": "compiling", "disable": not use_tqdm}
        for future in tqdm(done, total=len(jobs), **bar):
            future.result()
    return time.perf_counter() - started


def _sizes_moved(config: EngineConfig, pool: PoolSpec) -> set[int]:
    """Return the numbers of blocks that moves of a group are compiled for."""
    most = moved_blocks(config, pool.group.record.per)
    return {padded_blocks(n) for n in range(1, most + 1)}


def bucket_reports(steps: CompiledSteps, usage: Mapping[Shape, Usage]) -> list[BucketReport]:
    """Return a report on every shape of the table, compiled or not, and on others that ran,
    smallest first.

    usage: of those that ran.
    """
    reports: list[BucketReport] = []
    shapes = dict.fromkeys([*step_table(steps.setting), *usage])
    for bucket in sorted(shapes, key=lambda shape: shape.order):
        used, memory = usage.get(bucket, Usage()), steps.memory(bucket)
        report = BucketReport(
            **_fields(bucket),
            hits=used.hits,
            padding_waste=1 - used.tokens / used.padded if used.padded else 0.0,
            compile_seconds=steps.seconds.get(bucket),
            executable_bytes=None if memory is None else memory.generated_code_size_in_bytes,
            temp_bytes=None if memory is None else memory.temp_size_in_bytes,
        )
        reports.append(report)
    return reports


def _read_by(shape: PrefillShape) -> str:
    """Return what a prefill returns beside what is drawn after it."""
    named = {
        "prompt": shape.scores,
        f"top {shape.top}": shape.top,
        f"candidates {shape.candidates}": shape.candidates,
        "entropy": shape.entropy,
        "part": shape.skips,
        "states": shape.keeps_states,
    }
    return ", ".join([name for name, has in named.items() if has]) or "plain"


def _fields(shape: Shape) -> dict[str, Any]:
    """Return the fields of a report that say which shape it is about."""
    if isinstance(shape, PrefillShape):
        features = _read_by(shape)
    else:
        features = shape.sampler or "none"
    fields = dataclasses.asdict(shape)
    sizes = {name: fields.get(name, 0) for name in ("tokens", "rows", "tables", "blocks", "loras")}
    kind = {"phase": shape.phase, "features": features, "masks": shape.takes_masks}
    return {**sizes, **kind, "steps": fields.get("steps", 1)}
