"""A device that computes nothing and takes its time by a clock of its own, for scripts/fleet.py:
the real engine runs over it, with its scheduler, block manager, prefix cache and store.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.cache.kinds import GroupSize, Replay
from jpaged.engine.cache.prefix_cache import chain_hash
from jpaged.engine.engine import Engine
from jpaged.engine.layout import input_sections, output_sections
from jpaged.engine.packing import Batch, unpack
from jpaged.engine.plan import StepResult
from jpaged.engine.sequence import Request, Sequence
from jpaged.engine.shapes import DecodeShape, StepShapes
from jpaged.fleet.holdings import Holdings, Report
from jpaged.models.config import ModelConfig
from jpaged.sampling_params import SamplingParams
from jpaged.served_pool import DISPATCHES_IN_FLIGHT

MODEL = ModelConfig(
    family="llama",
    vocab_size=128,
    hidden_size=2,
    intermediate_size=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    max_position_embeddings=1 << 20,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of steps: prefill_step and prefill_token for each of its tokens; decode_step,
    decode_row for each row and decode_context for each token that rows look back at; host_step of
    the host before a step, for which only a device with nothing to do waits. kv_bytes: of a token.
    host_rate, disk_rate: bytes a second from host memory and from files. Attention within a prompt
    is not counted apart: prefill_token is a mean over lengths.
    """

    prefill_step: float
    prefill_token: float
    decode_step: float
    decode_row: float
    decode_context: float
    kv_bytes: int
    host_step: float = 0.0
    host_rate: float = 20e9
    disk_rate: float = 2e9

    @classmethod
    def planned(
        cls, *, billions: float, tflops: float, memory_gb_s: float, kv_kib: float
    ) -> "StepTimes":
        """Plan them: products of 2 operations a parameter and token at `tflops`, weights of 2 bytes
        and KV of kv_kib a token read at memory_gb_s, and half a millisecond a step.
        """
        token = 2 * billions * 1e9 / (tflops * 1e12)
        kv_bytes = int(kv_kib * 1024)
        return cls(
            prefill_step=0.5e-3,
            prefill_token=token,
            decode_step=0.5e-3 + 2 * billions / memory_gb_s,
            decode_row=token,
            decode_context=kv_bytes / (memory_gb_s * 1e9),
            kv_bytes=kv_bytes,
        )

    @classmethod
    def read(cls, path: Path) -> "StepTimes":
        """Read those of a JSON object with these names."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def prefill(self, tokens: float) -> float:
        """Return the seconds of one step of so many tokens."""
        return self.prefill_step + self.prefill_token * tokens

    def decode(self, rows: float, context: float) -> float:
        """Return the seconds of one step. context: tokens that all rows together look back at."""
        return self.decode_step + self.decode_row * rows + self.decode_context * context


class ModelledDevice:
    """The engine's Device. now: the host's clock, in seconds, which waits for results move on.
    free_at: when the device has done all that it was told to do, one after the other.
    """

    shares_blocks = True

    def __init__(self, config: EngineConfig, times: StepTimes):
        self.config, self.times, self.now, self.free_at = config, times, -math.inf, -math.inf
        assert config.num_blocks is not None
        self.kv_groups = (
            GroupSize(config.num_blocks, block_bytes=times.kv_bytes * config.block_size),
        )

    def fit(self, buckets: StepShapes) -> StepShapes:
        return buckets

    def steps_at_once(self, bucket: DecodeShape) -> int:
        return bucket.steps

    def dispatch(self, batch: Batch) -> "RunningStep":
        self.now += self.times.host_step
        sections, _ = input_sections(batch.bucket, self.config)
        if isinstance(batch.bucket, DecodeShape):
            lens = sections["context_lens"]
            first = lens.offset
            context = int(batch.packed[first : first + math.prod(lens.shape)].sum())
            self._work(batch.steps * self.times.decode(batch.num_rows, context))
        else:
            self._work(self.times.prefill(batch.num_tokens))
        return RunningStep(batch, self.free_at)

    def _work(self, seconds: float) -> None:
        """Let the device do one thing more."""
        self.free_at = max(self.free_at, self.now) + seconds

    def draw(self, handle: "RunningStep", masks_SW: np.ndarray | None = None) -> "RunningStep":
        assert masks_SW is None, "no form is asked for"
        return handle

    def fetch(self, handle: "RunningStep") -> list[StepResult]:
        self.now = max(self.now, handle.ends_at)
        batch, outs = handle.batch, []
        for shape in (batch.sample, batch.bucket):
            if shape is None:
                continue
            sections, size = output_sections(shape, self.config)
            if size:
                out = np.zeros(size, np.int32)
                drawn = sections["num_drawn"]
                steps = batch.steps if isinstance(shape, DecodeShape) else 1
                out[drawn.offset : drawn.offset + math.prod(drawn.shape)] = steps
                outs.append(out)
        return unpack(batch, self.config, outs, weight_version=0)

    def replay(self, handle: Batch, rounds: list[list[list[Replay]]]) -> None:
        raise AssertionError("nothing is guessed")

    def read_blocks(self, block_ids: list[list[int]], replica: int = 0) -> list[list[int]]:
        return block_ids  # no step waits for it

    def fetch_blocks(self, handle: list[list[int]]) -> list[list[Any]]:
        return [[True for _ in ids] for ids in handle]

    def write_blocks(
        self, blocks: list[list[Any]], block_ids: list[list[int]], replica: int = 0
    ) -> None:
        count = sum(map(len, block_ids))
        size = count * self.times.kv_bytes * self.config.block_size
        self._work(size / self.times.host_rate)

    def recover(self) -> None:
        raise AssertionError("nothing fails")


class RunningStep(NamedTuple):
    """A step that was dispatched, and when the device has done it."""

    batch: Batch
    ends_at: float


class EngineReplica:
    """A real engine over a ModelledDevice. token_ids: of a request, as the prefix cache sees it."""

    def __init__(
        self,
        times: StepTimes,
        *,
        pool_tokens: int,
        host_tokens: int,
        block_size: int,
        rows: int,
        batched: int = 8192,
    ):
        config = EngineConfig(
            max_num_batched_tokens=batched,
            block_size=block_size,
            num_blocks=max(pool_tokens // block_size, 1),
            max_num_seqs=rows,
            max_model_len=MODEL.max_position_embeddings,
            swap_space_gib=host_tokens * times.kv_bytes / 2**30,
        ).resolve(MODEL)
        self.device = ModelledDevice(config, times)
        self.engine = Engine(config, self.device, depth=DISPATCHES_IN_FLIGHT)
        self._live: dict[str, tuple[Sequence, float]] = {}
        self.firsts: dict[str, float] = {}  # seconds to the first token, by request
        self.ends: dict[str, float] = {}
        self.cached: dict[str, int] = {}
        self._told_begun, self._told_ended = set[str](), set[str]()
        self._holdings = Holdings()

    def submit(self, name: str, token_ids: list[int], answer: int, now: float) -> None:
        """Add a request that arrives at this time."""
        self.run(now)
        self.device.now = max(self.device.now, now)
        params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
        limit = MODEL.max_position_embeddings
        seq = Sequence(name, token_ids, params, max_model_len=limit)
        self._live[name] = seq, now
        self.engine.add(Request([seq]))

    def run(self, until: float = math.inf) -> None:
        """Step until this time, or until nothing is left."""
        while self.engine.has_unfinished() and self.device.now < until:
            ended = {request.request_id for request in self.engine.step()}
            for name, (seq, began) in list(self._live.items()):
                if seq.num_generated and name not in self.firsts:
                    self.firsts[name] = self.device.now - began
                    self.cached[name] = seq.num_cached
                if name in ended:
                    self.ends[name] = self.device.now - began
                    del self._live[name]

    def news(self, until: float) -> tuple[list[str], list[str]]:
        """Step until this time; return the requests that began to draw, and those that ended."""
        self.run(until)
        begun = [name for name in self.firsts if name not in self._told_begun]
        ended = [name for name in self.ends if name not in self._told_ended]
        self._told_begun.update(begun)
        self._told_ended.update(ended)
        return begun, ended

    def keys(self, token_ids: list[int]) -> tuple[list[int], range]:
        """Return the keys of a prompt's blocks, and the tokens that each ends at."""
        params = SamplingParams(max_tokens=1)
        seq = Sequence("keys", token_ids, params, max_model_len=len(token_ids) + 1)
        size = self.engine.replicas[0].blocks.cache.block_size
        count = (len(token_ids) - 1) // size
        keys = [chain_hash(seq, i, size) for i in range(count)]
        return keys, range(size, size * count + 1, size)

    def report(self) -> Report | None:
        """Return what has changed of what it holds."""
        self._holdings.update(self.engine.replicas[0].blocks.cache.keys())
        return self._holdings.report("router")
