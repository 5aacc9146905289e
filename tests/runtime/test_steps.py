"""The compiled steps: the pool is updated in place, and the small functions around the model do what they say."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.engine.batch import Bucket, input_sections, output_sections, unpack_result
from jpaged.runtime import steps
from jpaged.runtime.runner import Placement, Runner
from tests.hlo import pool_copies
from tests.tiny import CONFIG, engine, make_params

ONE_DEVICE = Placement(mesh=None, axis=None, device=jax.devices()[0])
BUCKETS = {
    "prefill": Bucket(phase="prefill", tokens=16, rows=8, blocks=16),
    "decode": Bucket(phase="decode", tokens=8, rows=8, blocks=16),
    "decode full": Bucket(phase="decode", tokens=8, rows=8, blocks=16, features="full"),
    "prefill prompt": Bucket(phase="prefill", tokens=16, rows=8, blocks=16, features="prompt"),
}


def make_runner(num_blocks: int) -> Runner:
    runner = Runner(CONFIG, engine(num_blocks=num_blocks).resolve(CONFIG), ONE_DEVICE, jnp.float32)
    runner.params = dict(make_params())
    return runner


def in_place(compiled: Any, runner: Runner) -> tuple[list[str], bool]:
    """Pool-sized copies in the HLO, and whether temporaries and new outputs are smaller than the pool."""
    memory, pool_bytes = compiled.memory_analysis(), runner.layout.block_bytes * runner.layout.num_blocks
    fresh = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return pool_copies(compiled.as_text(), math.prod(runner.layout.shape)), fresh < pool_bytes


@functools.cache
def compiled(name: str, num_blocks: int) -> tuple[Any, Runner]:
    runner = make_runner(num_blocks)
    return runner.lower(BUCKETS[name]).compile(), runner


SLOW = pytest.mark.slow
# 8191 blocks: no other array has as many elements, and none is as large.


@pytest.mark.parametrize(
    "name", ["prefill", "decode full", *(pytest.param(n, marks=SLOW) for n in ("decode", "prefill prompt"))]
)
def test_the_pool_is_updated_in_place(name: str) -> None:
    copies, is_small = in_place(*compiled(name, 8191))
    assert copies == [] and is_small


def test_without_donation_a_copy_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the test above looks for is there when the pool must survive."""
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda step, *, donate_argnums, **how: jit(step, **how))
    runner = make_runner(8191)
    copies, is_small = in_place(runner.lower(BUCKETS["decode"]).compile(), runner)
    assert len(copies) == 1 and " copy(" in copies[0] and not is_small


@pytest.mark.parametrize("name", ["decode full", pytest.param("prefill", marks=SLOW)])
def test_temporaries_do_not_depend_on_the_pool(name: str) -> None:
    """So that the number of blocks that fit can be computed from a step compiled for few."""
    (small, _), (large, _) = compiled(name, 127), compiled(name, 8191)
    assert small.memory_analysis().temp_size_in_bytes == large.memory_analysis().temp_size_in_bytes > 0


def test_locate_and_slots() -> None:
    """Rows of 3, 0 and 5 new tokens (contexts of 7 and 5), a padding row, 4 padding tokens; blocks of 4."""
    starts, contexts = np.array([0, 3, 3, 8, 8], np.int32), np.array([7, 0, 5, 0], np.int32)
    table = np.array([[9, 4, 0], [0, 0, 0], [2, 7, 0], [0, 0, 0]], np.int32)
    row, position = steps._locate(jnp.asarray(starts), jnp.asarray(contexts), 12)
    assert row.tolist() == [0] * 3 + [2] * 5 + [4] * 4
    assert position.tolist() == [4, 5, 6, 0, 1, 2, 3, 4] + [-1] * 4
    pool = jnp.zeros((2 * 11, 4, 2, 8))
    slots = steps._slots(row, position, jnp.asarray(table), 4, pool).tolist()
    assert slots[:8] == [4 * 4 + p % 4 for p in (4, 5, 6)] + [2 * 4, 2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 7 * 4]
    assert all(slot >= 11 * 4 for slot in slots[8:]), "padding goes past the end"


def test_set_counts() -> None:
    """A long prompt in chunks, its counts 2 * (occurrences in the output) + (1 if in the prompt)."""
    vocab, chunk = 7, 5
    counts = jnp.full((3, vocab), 9, jnp.int32)
    tokens, prompt_len = [1, 1, 4, 0, 4, 2, 6, 6, 1], 6
    for start in range(0, len(tokens), chunk):
        part = np.full(chunk, vocab, np.int32)
        part[: len(tokens[start : start + chunk])] = tokens[start : start + chunk]
        scalars = [jnp.int32(v) for v in (1, max(prompt_len - start, 0), start == 0)]
        counts = steps.set_counts(counts, scalars[0], jnp.asarray(part), *scalars[1:])
    prompt, output = tokens[:prompt_len], tokens[prompt_len:]
    expected = [2 * output.count(v) + (v in prompt) for v in range(vocab)]
    assert counts.tolist() == [[9] * vocab, expected, [9] * vocab]


@pytest.mark.parametrize("name", ["decode", "decode full", "prefill prompt"])
def test_outputs_keep_their_bits(name: str) -> None:
    """Packed on the device, taken apart on the host: floats and NaNs travel as they are."""
    settings, bucket = engine().resolve(CONFIG), BUCKETS[name]
    rng = np.random.default_rng(0)
    outputs = {}
    for field, section in output_sections(bucket, settings)[0].items():
        if field.endswith("logprobs"):
            outputs[field] = rng.standard_normal(section.shape).astype(np.float32)
            outputs[field].flat[:2] = np.nan, -np.inf
        else:
            outputs[field] = rng.integers(0, 97, section.shape).astype(np.int32)
    packed = steps._pack_outputs({k: jnp.asarray(v) for k, v in outputs.items()}, bucket, settings)
    result = unpack_result(np.asarray(packed), bucket, settings, 5)
    for field, value in outputs.items():
        given = value[:5] if field in ("tokens", "logprobs") else value
        np.testing.assert_array_equal(getattr(result, field), given, err_msg=field)


@pytest.mark.parametrize("name", BUCKETS)
def test_inputs_are_sliced_as_they_were_laid_out(name: str) -> None:
    settings, bucket = engine().resolve(CONFIG), BUCKETS[name]
    sections, size = input_sections(bucket, settings)
    fields = steps._unpack(jnp.arange(size, dtype=jnp.int32), bucket, settings)
    assert fields.keys() == sections.keys()
    joined = np.concatenate([np.asarray(fields[field]).ravel() for field in sections])
    np.testing.assert_array_equal(joined, np.arange(size))
    assert all(fields[field].shape == section.shape for field, section in sections.items())


def test_controls_travel_as_bits() -> None:
    """uint32 keys beyond int32, f32 temperatures: bitcast, never converted."""
    row = np.zeros((1, len(steps.CONTROLS)), np.int32)
    names = [field for field, _ in steps.CONTROLS]
    row[0, names.index("temperature")] = np.float32(0.7).view(np.int32)
    row[0, names.index("key_hi")] = np.uint32(0xFFFFFFF0).view(np.int32)
    row[0, names.index("top_k")] = 7
    fields = {"controls": jnp.asarray(row), "context_lens": jnp.asarray([5], jnp.int32)}
    controls = steps._controls(fields)
    assert controls.temperature_S[0] == np.float32(0.7) and controls.top_k_S[0] == 7
    assert controls.key_S2.dtype == jnp.uint32 and int(controls.key_S2[0, 0]) == 0xFFFFFFF0
    assert controls.position_S[0] == 5
