"""llama.cpp as bench_peers.py drives it, by llama-cpp-python's bindings of its C functions, in an
environment of its own: llama-cpp-python, gguf and numpy.

Prompts are computed in batches of 2,048 tokens and micro-batches of 512, its defaults, with a cache
a sequence, and rows leave the batch as they end. Greedy tokens are numpy's argmax, which is faster
than the library's own sampler; others are drawn by that.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

from _peers_driver import Engine, New, Setup, serve
from _peers_gguf import gguf_file

BATCH = 2048
FORMS = {"bf16": ("bf16", "bf16"), "int8": ("q8_0", "q8_0"), "int4": ("q4_0", "q4_0, head q8_0")}


class Llama:
    """A model, and a context that is made anew for requests of other sizes: its cache has a part
    for every sequence. Flash attention is on or off for a size as it was faster with it.
    """

    def __init__(self, setup: Setup):
        import llama_cpp  # pyright: ignore[reportMissingImports]

        kind, self.form = FORMS[setup.weights]
        self._lib, self._threads = llama_cpp, setup.threads
        self.version = llama_cpp.__version__
        llama_cpp.llama_backend_init()
        file = gguf_file(setup.folder, setup.models, kind).encode()
        self._model = llama_cpp.llama_model_load_from_file(
            file, llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file.decode()}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._ways: dict[tuple[int, int], int] = {}
        self._context: Any = None
        self._made: tuple[int, int, int] | None = None

    def warm(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> None:
        """Choose between attention with and without "flash" for requests of this size."""
        size, seconds = _size(prompts, lengths), dict[int, float]()
        for way in (0, 1):
            self._ways[size] = way
            for _ in range(2):  # the second counts
                self._prepare(prompts, lengths)
                began = time.perf_counter()
                self.generate(prompts, lengths, temperature)
                seconds[way] = time.perf_counter() - began
        self._ways[size] = min(seconds, key=lambda way: seconds[way])
        self._prepare(prompts, lengths)

    def generate(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> list[list[int]]:
        drawn: list[list[int]] = [[] for _ in prompts]
        for new in self.stream(prompts, lengths, temperature):
            for index, ids in new:
                drawn[index] += ids
        return drawn

    def stream(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> Iterator[New]:
        self._prepare(prompts, lengths)
        sampler = self._sampler(temperature)
        left, last = list(lengths), [0] * len(prompts)
        pieces = [
            (index, position, token, position == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        while pieces:
            for begin in range(0, len(pieces), BATCH):
                new = self._decode(pieces[begin : begin + BATCH], sampler)
                for index, ids in new:
                    last[index] = ids[0]
                    left[index] -= 1
                yield new
            pieces = [
                (index, len(prompts[index]) + lengths[index] - left[index] - 1, last[index], True)
                for index in range(len(prompts))
                if left[index]
            ]
        if sampler is not None:
            self._lib.llama_sampler_free(sampler)

    def _decode(self, pieces: list[tuple[int, int, int, bool]], sampler: Any) -> New:
        """Compute these tokens (sequence, position, id, whether one is drawn after it)."""
        batch = self._batch
        batch.n_tokens = len(pieces)
        for i, (index, position, token, draws) in enumerate(pieces):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, draws
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = index
        if status := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        return [
            (index, [self._draw(i, sampler)])
            for i, (index, _, _, draws) in enumerate(pieces)
            if draws
        ]

    def _draw(self, i: int, sampler: Any) -> int:
        if sampler is not None:
            return self._lib.llama_sampler_sample(sampler, self._context, i)
        import numpy as np

        logits = self._lib.llama_get_logits_ith(self._context, i)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def _sampler(self, temperature: float) -> Any:
        if not temperature:
            return None
        lib = self._lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(1))
        return chain

    def _prepare(self, prompts: list[list[int]], lengths: list[int]) -> None:
        """Empty the cache; make a context where the one there is has other sizes."""
        lib, (rows, length) = self._lib, _size(prompts, lengths)
        wanted = rows, length, self._ways.get((rows, length), -1)
        if self._made != wanted:
            if self._context:
                lib.llama_free(self._context)
            params = lib.llama_context_default_params()
            params.n_seq_max, params.n_ctx = rows, rows * length
            params.n_batch, params.flash_attn_type = BATCH, wanted[2]
            params.n_threads = params.n_threads_batch = self._threads
            self._context = lib.llama_init_from_model(self._model, params)
            if not self._context:
                raise RuntimeError(f"llama.cpp makes no context for {rows} x {length} tokens")
            self._made = wanted
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)


def _size(prompts: list[list[int]], lengths: list[int]) -> tuple[int, int]:
    """Return the number of sequences, and what the longest takes in the cache, in whole 256s."""
    longest = max(len(prompt) + n for prompt, n in zip(prompts, lengths, strict=True))
    return len(prompts), -(-longest // 256) * 256


def make(setup: Setup) -> Engine:
    return Llama(setup)


if __name__ == "__main__":
    sys.exit(serve(make))
