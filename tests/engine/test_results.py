"""StepResult: what a step's output buffers hold, taken apart."""

import math

import numpy as np
import pytest

from jpaged.engine.layout import output_sections
from jpaged.engine.packing import Batch, unpack
from jpaged.engine.shapes import DecodeShape, PrefillShape, Sampler, SampleShape, Shape
from tests.engine.test_packing import CONFIG, entry


def filled(bucket: Shape, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A step's output buffer of random values, and what it holds."""
    sections, size = output_sections(bucket, CONFIG)
    rng = np.random.default_rng(seed)
    packed, want = np.zeros(size, np.int32), {}
    for name, section in sections.items():
        is_real = name.endswith("logprobs")
        values = (
            -rng.random(section.shape, np.float32)
            if is_real
            else rng.integers(0, 99, section.shape, np.int32)
        )
        want[name] = values
        packed[section.offset : section.offset + values.size] = values.view(np.int32).ravel()
    return packed, want


def batch_of(
    bucket: PrefillShape | DecodeShape, sample: SampleShape | None, num_rows: int
) -> Batch:
    return Batch(bucket=bucket, sample=sample, packed=np.zeros(0), num_tokens=1, num_rows=num_rows)


@pytest.mark.parametrize("sampler", ["plain", "full"])
@pytest.mark.parametrize("steps", [1, 3])
def test_results_round_trip(sampler: Sampler, steps: int):
    bucket = DecodeShape(rows=2, tables=1, blocks=3, steps=steps, sampler=sampler)
    packed, want = filled(bucket, 0)
    result = unpack(batch_of(bucket, None, 1), CONFIG, [packed], weight_version=1)[0]
    assert result.num_drawn == want["num_drawn"][:1].tolist()
    assert result.tokens == [want["tokens"][:, 0].tolist()] and result.logprobs == [
        want["logprobs"][:, 0].tolist()
    ]
    for name in ("ranks", "top_ids", "top_logprobs"):
        value = getattr(result, name)
        assert (value is None) == (sampler == "plain")
        if value is not None:
            np.testing.assert_array_equal(value, want[name])
    assert result.prompt_logprobs is None
    if sampler == "plain":
        return
    for step in range(steps):
        ids, logprobs = want["top_ids"][step, 0], want["top_logprobs"][step, 0]
        top = [
            (int(i), float(p), rank) for i, p, rank in zip(ids, logprobs, (1, 2, 3), strict=True)
        ]
        own = (result.tokens[0][step], result.logprobs[0][step], int(want["ranks"][step, 0]))
        assert [result.top(0, k, step) for k in (0, 1, 3)] == [[own], [own, top[0]], [own, *top]]


def test_a_prefill_returns_what_was_drawn_and_what_was_scored():
    sample = SampleShape(rows=2)
    scored = PrefillShape(tokens=4, rows=2, tables=1, blocks=3, scores=True)
    (one, tokens), (two, prompt) = filled(sample, 1), filled(scored, 2)
    result = unpack(batch_of(scored, sample, 2), CONFIG, [one, two], weight_version=1)[0]
    assert result.tokens == tokens["tokens"].T.tolist() and result.prompt_logprobs is not None
    np.testing.assert_array_equal(result.prompt_logprobs, prompt["prompt_logprobs"])
    result = unpack(batch_of(scored, None, 0), CONFIG, [two], weight_version=1)[0]
    assert result.tokens == result.num_drawn == [] and result.prompt_ranks is not None
    plain = PrefillShape(tokens=4, rows=2, tables=1, blocks=3)
    assert (
        unpack(batch_of(plain, sample, 1), CONFIG, [one], weight_version=1)[0].logprobs
        == tokens["logprobs"][:, :1].T.tolist()
    )
    assert unpack(batch_of(plain, None, 0), CONFIG, [], weight_version=1)[0].tokens == []


def test_prompt_rows():
    """Position p scores the prompt token at p + 1; the last token of the prompt scores nothing."""
    bucket = PrefillShape(tokens=8, rows=5, tables=1, blocks=3, scores=True)
    sections, size = output_sections(bucket, CONFIG)
    packed = np.zeros(size, np.int32)
    for name, unit in (("prompt_logprobs", 1.0), ("prompt_top_logprobs", 10.0)):
        offset, shape = sections[name]
        values = unit * np.arange(8, dtype=np.float32)
        packed[offset : offset + math.prod(shape)] = np.repeat(values, math.prod(shape) // 8).view(
            np.int32
        )
    offset, _ = sections["prompt_ranks"]
    packed[offset : offset + 8] = np.arange(8) + 100
    rows = (
        entry(0, 3, prompt=3),
        entry(2, 2, prompt=6, device_row=1, prompt_logprobs=1, draws=0),
        entry(3, 3, prompt=5, generated=1, device_row=2, prompt_logprobs=0),
    )
    result = unpack(batch_of(bucket, None, 0), CONFIG, [packed], weight_version=1)[0]
    assert [list(row.scored) for row in rows] == [[], [2, 3], [3]]
    assert result.prompt_rows(rows[1], 3) == [
        [(13, 3.0, 103), (0, 30.0, 1)],
        [(14, 4.0, 104), (0, 40.0, 1)],
    ]
    assert result.prompt_rows(rows[2], 5) == [
        [(14, 5.0, 105)]
    ]  # 3 tokens were computed, one has a prompt token after it
    past = entry(5, 1, prompt=5, generated=1, prompt_logprobs=0)
    assert result.prompt_rows(past, 0) == []
