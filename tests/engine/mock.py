"""A device that is a list, and a loop that checks the engine's invariants after every step.

The "KV" of a token is a number that follows from the token and the KV before it, as a real model's does, and the next
token follows from all KV read back through the block table: a wrong, stale, missing or foreign block shows as a wrong
token, and a slot that nothing has written raises.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine.batch import Batch, Section, StepResult, input_sections, output_sections, unpack_result
from jpaged.engine.engine import Engine
from jpaged.engine.sampling_params import SamplingParams
from jpaged.engine.sequence import Sequence

VOCAB = 101
POISON = -1
MODEL = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=2,
    intermediate_size=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    max_position_embeddings=4096,
)


def next_kv(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 1) % (2**61 - 1)


def next_token(kv: list[int], banned: Iterable[int] = ()) -> int:
    token = zlib.crc32(np.array(kv, np.int64).tobytes()) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def prompt_score(kv: int, target: int) -> float:
    return -float((kv + target) % 997) / 8


class MockRunner:
    """Engine's Runner. `fail` holds (method, how many calls of it come first) of calls that are to raise."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.fail: set[tuple[str, int]] = set()
        self.calls = {"dispatch": 0, "fetch": 0}
        self.dispatched: list[tuple[str, list[tuple[int, int]]]] = []  # (phase, [(start, end) of each row])
        self.recover()

    def recover(self) -> None:
        assert self.config.num_blocks is not None
        self.pool = [POISON] * (self.config.num_blocks * self.config.block_size)
        self.last = [POISON] * self.config.max_num_seqs

    def dispatch(self, batch: Batch, num_rows: int) -> tuple[Batch, np.ndarray, int]:
        """Everything happens here, in the order of the dispatches; `fetch` only reads."""
        self._may_fail("dispatch")
        sections, size = input_sections(batch.bucket, self.config)
        assert batch.packed.shape == (size,) and batch.packed.dtype == np.int32
        view = _views(batch.packed, sections)
        assert not view["context_lens"][num_rows:].any()
        assert (view["slots"][num_rows:] == self.config.max_num_seqs).all()
        sections, size = output_sections(batch.bucket, self.config)
        packed = np.full(size, POISON, np.int32)
        out = _views(packed, sections)
        is_decode = batch.bucket.phase == "decode"
        spans, drawn = [], {}
        for row, (slot, end) in enumerate(zip(view["slots"][:num_rows], view["context_lens"], strict=False)):
            first, past = (0, 1) if is_decode else view["query_starts"][row : row + 2]
            tokens = [self.last[slot]] if is_decode else view["tokens"][first:past].tolist()
            assert tokens and POISON not in tokens, f"row {row} decodes from a slot without a token"
            kv = self._attend(view["block_table"][row], int(end), tokens)
            out["tokens"][row] = next_token(kv, view["ban_ids"][row].tolist() if "ban_ids" in view else ())
            out["logprobs"].view(np.float32)[row] = -out["tokens"][row] / 8
            if view["samples"][row]:
                drawn[slot] = int(out["tokens"][row])
            if "ranks" in out:
                out["ranks"][row] = 1
                out["top_ids"][row] = np.arange(self.config.max_logprobs)
                out["top_logprobs"].view(np.float32)[row] = 0.5
            if "prompt_logprobs" in out:
                scores = map(prompt_score, kv[-len(tokens) :], view["targets"][first:past].tolist())
                out["prompt_logprobs"].view(np.float32)[first:past] = list(scores)
                out["prompt_ranks"][first:past] = 1
                out["prompt_top_ids"][first:past] = np.arange(self.config.max_logprobs)
                out["prompt_top_logprobs"].view(np.float32)[first:past] = 0.25
            spans.append((int(end) - len(tokens), int(end)))
        for slot, token in drawn.items():
            self.last[slot] = token
        self.dispatched.append((batch.bucket.phase, spans))
        return batch, packed, num_rows

    def _attend(self, table: np.ndarray, end: int, tokens: list[int]) -> list[int]:
        """Write the KV of a row's tokens, the last of its context of `end`; returns the KV of the whole context."""
        size = self.config.block_size
        places = [int(table[p // size]) * size + p % size for p in range(end)]
        kv = [self.pool[place] for place in places[: end - len(tokens)]]
        assert POISON not in kv, "a row reads a slot that nothing has written"
        for place, token in zip(places[len(kv) :], tokens, strict=True):
            kv.append(next_kv(kv[-1] if kv else 0, token))
            self.pool[place] = kv[-1]
        return kv

    def fetch(self, handle: tuple[Batch, np.ndarray, int]) -> StepResult:
        self._may_fail("fetch")
        batch, packed, num_rows = handle
        return unpack_result(packed, batch.bucket, self.config, num_rows)

    def computed(self, phase: str) -> int:
        """Tokens dispatched in a phase so far."""
        return sum(end - start for p, spans in self.dispatched if p == phase for start, end in spans)

    def _may_fail(self, method: str) -> None:
        call = (method, self.calls[method])
        self.calls[method] += 1
        if call in self.fail:
            raise RuntimeError(f"{method} fails")


def _views(packed: np.ndarray, sections: dict[str, Section]) -> dict[str, np.ndarray]:
    return {k: packed[s.offset : s.offset + math.prod(s.shape)].reshape(s.shape) for k, s in sections.items()}


@functools.lru_cache(maxsize=4096)
def _stream(prompt: tuple[int, ...], count: int, eos: frozenset[int], min_tokens: int) -> list[int]:
    kv = list(itertools.accumulate(prompt, next_kv, initial=0))[1:]
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(next_token(kv, eos if len(tokens) < min_tokens else ()))
        if tokens[-1] in eos:
            break
        kv.append(next_kv(kv[-1], tokens[-1]))
    return tokens


def expected(seq: Sequence) -> list[int]:
    """The tokens that a sequence gets when it is alone with an endless pool."""
    prompt = tuple(seq.token_ids[: seq.prompt_len])
    count = 0 if seq.score_only else max(seq.end - seq.prompt_len, 1)
    return _stream(prompt, count, seq.eos_ids | seq.stop_ids, seq.params.min_tokens)


def generated(seq: Sequence) -> list[int]:
    return seq.token_ids[seq.prompt_len :]


class Letters:
    """A tokenizer whose token t is a letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + t % 26) for t in ids)


class Host:
    """An engine over a mock device: small blocks, every step checked, and no more steps than any test needs."""

    def __init__(self, depth: int = 1, **settings: Any):
        sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16}
        config = EngineConfig(**{**sizes, "max_model_len": 128, "max_logprobs": 3, **settings})
        self.config = config.resolve(MODEL)
        self.runner = MockRunner(self.config)
        self.engine = Engine(self.config, self.runner, depth=depth)
        self._ids = itertools.count()
        self._steps_left = 5000

    @property
    def blocks(self):
        return self.engine.scheduler.blocks

    def sequence(self, prompt: Iterable[int], max_tokens: int | None = 8, **options: Any) -> Sequence:
        own = {k: options.pop(k) for k in ("eos_ids", "text", "score_only", "request_id") if k in options}
        request_id = own.pop("request_id", None) or str(next(self._ids))
        params = SamplingParams(max_tokens=max_tokens, **options)
        assert self.config.max_model_len is not None
        return Sequence(request_id, list(prompt), params, max_model_len=self.config.max_model_len, **own)

    def add(self, prompt: Iterable[int], max_tokens: int | None = 8, **options: Any) -> Sequence:
        seq = self.sequence(prompt, max_tokens, **options)
        self.engine.add(seq)
        return seq

    def step(self) -> list[Sequence]:
        self._steps_left -= 1
        assert self._steps_left, "the engine hangs"
        ended = self.engine.step()
        self.engine.scheduler.check_integrity()
        for seq in ended:
            if seq.error is None and seq.finish_reason != "abort":
                want = expected(seq)
                want = want[: seq.num_generated] if isinstance(seq.stop_reason, str) else want
                assert generated(seq) == want, f"{seq!r} has another request's tokens"
        return ended

    def run(self) -> list[Sequence]:
        """Step until nothing is unfinished."""
        ended = []
        while self.engine.has_unfinished():
            ended += self.step()
        assert self.blocks.num_used == 0, "blocks leaked"
        return ended

    def generate(self, *prompts: Iterable[int], max_tokens: int | None = 8, **options: Any) -> list[Sequence]:
        """One call: all prompts admitted together, run to their end."""
        seqs = [self.add(prompt, max_tokens, **options) for prompt in prompts]
        self.run()
        return seqs
