"""A dry run: every line is parsed, rendered, tokenized and checked as the engine would do it, and
no model is run.

The memory that the lines need is planned from the model's config alone, without loading weights.
The time that they take follows from a rate that was given or measured; it is never guessed.
"""

import dataclasses
import json
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.errors import CapacityError, JpagedError
from jpaged.integrations.batch.intake import Intake
from jpaged.integrations.batch.lines import BatchRequest, Settings
from jpaged.integrations.batch.progress import duration
from jpaged.integrations.batch.source import BatchError, Source
from jpaged.integrations.batch.stats import BatchStats
from jpaged.models.config import ModelConfig
from jpaged.request.images import PromptImages
from jpaged.request.inputs import Inputs
from jpaged.request.prompt_reader import PromptReader
from jpaged.runtime.footprint import plan_memory, stored_dtype
from jpaged.runtime.image_rows import most_image_tokens
from jpaged.runtime.mesh import Placement
from jpaged.runtime.resolve import resolve

GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """Output tokens per second of a whole run, prefill included, and how the rate is known.

    mean: tokens of a completion on average, if a run measured them too.
    """

    tokens_per_second: float
    source: str
    mean: float | None = None

    @classmethod
    def read(cls, text: str) -> "Rate | None":
        """Read a rate from a number, or from the summary.json of a run (None if that run answered
        nothing). Raises BatchError.
        """
        try:
            if not 0 < (rate := float(text)) < float("inf"):
                raise BatchError(f"--rates {text}: must be above 0")
            return cls(tokens_per_second=rate, source="as given")
        except ValueError:
            pass  # not a number, so it is a file
        try:
            summary = json.loads(Path(text).read_text())
            rate, lines = float(summary["tokens_per_second"]["out"]), int(summary["lines"]["ok"])
            mean = float(summary["completion_tokens"]["mean"]) if lines else 0.0
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BatchError(
                f"--rates {text}: neither a number nor the summary.json of a run ({e})"
            ) from None
        measured = f"measured over the {lines} answers of {text}"
        return cls(tokens_per_second=rate, source=measured, mean=mean) if lines else None


class Checker(PromptReader):
    """Checks a line: the part of LLM that needs neither weights nor a device."""

    def __init__(self, folder: str, config: EngineConfig):
        model = ModelConfig.coerce(folder, images=config.images)
        place = Placement(mesh=None, axis=None, device=jax.devices()[0])
        dtype = config.dtype or stored_dtype(folder)
        self.plan = plan_memory(folder, config)
        planned = dataclasses.replace(config, max_num_seqs=self.plan.max_num_seqs)
        resolved, _ = resolve(model, planned, place, dtype)
        self._max_model_len = resolved.max_model_len or 0
        vision, images = model.vision, None
        if resolved.images and vision is not None:
            most = most_image_tokens(vision, resolved)
            images = PromptImages(Path(folder), vision, resolved, most=most)
        inputs = Inputs(model, self._max_model_len, None, Path(folder), images=images)
        super().__init__(model, resolved, inputs)

    def tokens(self, request: BatchRequest) -> tuple[int, int]:
        """Return the tokens of the prompt, and the most that its completions can have. Raises
        RequestError.
        """
        if request.pooled is not None:
            request.pooled.task(self.model_config)
            return sum(map(len, request.pooled.token_lists(self.inputs))), 0
        params = request.params
        params.validate(self.engine_config, self.model_config.vocab_size)
        one = dataclasses.replace(params, n=1)
        checked = self.inputs.prompt(request.prompt_for(self))
        self.builder.completion(checked, one, (0, 0))
        prompt, most = len(checked.ids), self._max_model_len
        if prompt > (held := self.plan.num_blocks * self.plan.block_size):
            raise CapacityError(
                f"prompt of {prompt} tokens does not fit the KV pool of {held}: raise num_blocks"
            )
        return prompt, params.n * min(params.max_tokens or most, most - prompt)


def check(
    source: Source,
    folder: str,
    config: EngineConfig,
    make_settings: Callable[[Any], Settings],
    *,
    shard: tuple[int, int] | None = None,
    rate: Rate | None = None,
    program: str = "serve_batch",
) -> bool:
    """Print what a run of this input would do. Return whether every line can run. Raises
    BatchError.
    """
    try:
        checker = Checker(folder, config)
    except JpagedError as e:
        raise BatchError(f"cannot plan for {folder}: {e}") from e
    stats, prompts, most, damaged = BatchStats(), array("I"), 0, False
    intake = Intake(source, make_settings(checker), shard=shard)
    try:
        for line in intake.lines():
            stats.ignored.update(line.request.ignored)
            try:
                if line.error is not None:
                    raise line.error
                prompt, completion = checker.tokens(line.request)
            except Exception as e:  # an error of one line must not end the check
                stats.fail(line.request.number, e)
                continue
            prompts.append(prompt)
            most += completion
    except Exception as e:
        said = f"cannot read the input any further: {type(e).__name__}: {e}"
        print(f"{program}: {said}", file=sys.stderr)
        damaged = True
    rows = {
        "lines": f"{len(prompts) + stats.failed} ({len(prompts)} can run, {stats.failed} errors)",
        **stats.trouble(),
        **_of_prompts(prompts, most, rate),
        **_of_memory(checker, prompts, most),
    }
    print("\n".join(f"{name:<14} {value}" for name, value in rows.items()))
    return not (stats.failed or damaged)


def _of_prompts(prompts: array, most: int, rate: Rate | None) -> dict[str, str]:
    if not prompts:
        return {}
    low, median, high, top = np.percentile(prompts, (0, 50, 99, 100))
    said = f"{sum(prompts):,} in, at most {most:,} out (every answer up to its limit)"
    return {
        "prompts": f"min {low:.0f}, median {median:.0f}, p99 {high:.0f}, max {top:.0f} tokens",
        "tokens": said,
        "time": _time(len(prompts), most, rate),
    }


def _of_memory(checker: Checker, prompts: array, most: int) -> dict[str, str]:
    plan, config = checker.plan, checker.engine_config
    held = plan.num_blocks * plan.block_size
    rows = {"memory": f"{plan.limit / GIB:.2f} GiB can be used; steps: {plan.needs.source}"}
    for name, size in {**plan.account, "unused": plan.waste}.items():
        rows[f"  {name}"] = f"{size / GIB:8.3f} GiB"
    blocks = f"{plan.num_blocks:,} blocks, {held:,} tokens"
    rows["KV pool"] = f"{blocks} (decided by {plan.decided_by})"
    if prompts:
        mean = -(-(most + sum(prompts)) // len(prompts))
        at_once = min(held // max(mean, 1), config.num_rows) * (config.data_parallel_size or 1)
        rows["at once"] = f"{at_once:,} requests of mean length, their answers up to their limit"
    return rows


def _time(lines: int, most: int, rate: Rate | None) -> str:
    if rate is None:
        return "not known: --rates takes tokens a second, or the summary.json of an earlier run"
    told = f"at {rate.tokens_per_second:,.0f} output tok/s ({rate.source})"
    limit = f"at most {duration(most / rate.tokens_per_second)}"
    if rate.mean is None:
        return f"{limit} {told}, if every answer reaches its limit"
    likely = min(lines * rate.mean, most) / rate.tokens_per_second
    return (
        f"{duration(likely)} if answers are as long as there (mean {rate.mean:.0f} "
        f"tokens), {limit}; {told}"
    )
