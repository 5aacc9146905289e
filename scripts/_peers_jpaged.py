"""jpaged as bench_peers.py drives it: a process like those of its peers."""

import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Any, Literal

from _peers_driver import Engine, New, Setup, serve

BLOCK = 64


class JPaged:
    """The engine with its defaults, but for a pool of the size asked for, decode steps of few rows,
    and no program of their own for draws, so that nothing compiles while it is timed.
    """

    def __init__(self, setup: Setup):
        import jpaged

        self._jpaged = jpaged
        quantization: dict[str, Literal["int8", "int4"]] = {"int8": "int8", "int4": "int4"}
        activations: Any = setup.activations
        rows = [rows for rows in (1, 4, 8, 16, 32, 64, 128) if rows < setup.rows]
        self._llm = jpaged.LLM(
            setup.folder,
            dtype="bfloat16",
            quantization=quantization.get(setup.weights),
            quantized_activations=activations,
            max_model_len=setup.max_len,
            max_num_seqs=setup.rows,
            seq_buckets=(*rows, setup.rows),
            block_size=BLOCK,
            num_blocks=-(-setup.tokens // BLOCK) + setup.rows,
            enable_prefix_caching=False,
            separate_draw=False,
        )
        self.version = importlib.metadata.version("jpaged")
        self.form = {
            "bf16": "bf16",
            "int8": "int8, a scale an output",
            "int4": "int4, a scale for 32; head int8",
        }[setup.weights]
        if (served := self._llm.stats()["quantized_activations"]) is not None:
            self.form += f", activations {served}"

    def warm(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> None:
        """Compile the steps that the request takes, by taking them."""
        for _ in self.stream(prompts, lengths, temperature):
            pass

    def generate(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> list[list[int]]:
        params = self._params(lengths, temperature)
        outs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outs]

    def stream(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> Iterator[New]:
        for chunk in self._llm.stream(prompts, self._params(lengths, temperature)):
            yield [(chunk.request_index, list(chunk.token_ids_delta))]

    def _params(self, lengths: list[int], temperature: float) -> list:
        asked = self._jpaged.SamplingParams
        return [asked(max_tokens=n, ignore_eos=True, temperature=temperature) for n in lengths]


def make(setup: Setup) -> Engine:
    return JPaged(setup)


if __name__ == "__main__":
    sys.exit(serve(make))
