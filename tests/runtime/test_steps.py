"""The compiled steps: every pool is updated in place, and the small functions around the model do
what they say.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.engine.layout import input_sections, output_sections
from jpaged.engine.packing import Batch, unpack
from jpaged.engine.shapes import DecodeShape, DraftShape, PrefillShape, SampleShape, Shape
from jpaged.models.config import ModelConfig
from jpaged.models.forward import bind
from jpaged.models.layers.attention import AttentionConfig
from jpaged.runtime import choices, paged_kv, steps
from jpaged.runtime.choices import Choices, choose
from jpaged.runtime.compiled_steps import CompiledSteps
from jpaged.runtime.device_state import RowState, set_counts
from jpaged.runtime.kv_cache import PoolSpec, pool_specs
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import Runner
from kernels_cpu.library import unavailable
from kernels_cpu.rates import Rates
from tests.hlo import first_operations, forbid_donation, in_place
from tests.recurrent import HYBRID, hybrid
from tests.tiny import CONFIG, config, engine, make_params

ONE_DEVICE = Placement(mesh=None, axis=None, device=jax.devices()[0])
TWO_GROUPS = config(sliding_windows=(None, 7))
SECOND = CONFIG.layers[1].mixer
assert isinstance(SECOND, AttentionConfig)
NARROW = dataclasses.replace(  # values of another width than keys, in a group of their own
    CONFIG,
    layers=(
        CONFIG.layers[0],
        dataclasses.replace(CONFIG.layers[1], mixer=dataclasses.replace(SECOND, value_dim=8)),
    ),
)
BUCKETS = {
    "prefill": PrefillShape(tokens=16, rows=8, tables=1, blocks=16),
    "decode": DecodeShape(rows=8, tables=1, blocks=16),
    "decode full": DecodeShape(rows=8, tables=1, blocks=16, sampler="full"),
    "decode 4 steps": DecodeShape(rows=8, tables=1, blocks=16, steps=4),
    "draft": DraftShape(rows=8, blocks=16, steps=3, sampler="filtered"),
    "sample": SampleShape(rows=8),
    "sample full": SampleShape(rows=8, sampler="full"),
    "prefill prompt": PrefillShape(tokens=16, rows=8, tables=1, blocks=16, scores=True),
}
# Blocks of each group. So many that no other array of a step has as many elements, or is as large.
MANY, FEW = (8191, 8179), (127, 113)


def make_steps(
    num_blocks: tuple[int, ...],
    model: ModelConfig = CONFIG,
    *,
    dtype: Any = jnp.float32,
    mixed: bool = False,
) -> CompiledSteps:
    """Steps over a pool of so many blocks for each group of the model's layers."""
    settings = engine(num_blocks=num_blocks[0], mixed=mixed).resolve(model)
    params = bind(model, make_params(0, model, dtype))
    choices = choose(model, settings, ONE_DEVICE, dtype)
    specs = pool_specs(model, settings, ONE_DEVICE, choices.attention, num_blocks[0], dtype)
    pools = (
        dataclasses.replace(spec, num_blocks=number)
        for spec, number in zip(specs, num_blocks, strict=False)
    )
    setting = steps.StepSetting(model=model, config=settings, pools=tuple(pools), choices=choices)
    form = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=ONE_DEVICE.replicated), params
    )
    return CompiledSteps(setting, ONE_DEVICE, form)


def step_of(bucket: Shape, *, mixed: bool = False) -> Any:
    """A bucket of the tiny model, to call the parts of its step."""
    settings = engine(mixed=mixed).resolve(CONFIG)
    choices = Choices(dtype=jnp.dtype(jnp.float32), attention=())
    setting = steps.StepSetting(model=CONFIG, config=settings, pools=(), choices=choices)
    return steps._Step(bucket, setting)


@functools.cache
def compiled(
    name: str, num_blocks: tuple[int, ...], model: ModelConfig = CONFIG, mixed: bool = False
) -> tuple[Any, tuple[PoolSpec, ...]]:
    table = make_steps(num_blocks, model, mixed=mixed)
    bucket = BUCKETS[name]
    if bucket.tables:
        bucket = dataclasses.replace(bucket, tables=len(table.setting.pools))
    return table.lower(bucket).compile(), table.setting.pools


SLOW, MIDDLE = pytest.mark.slow, pytest.mark.middle
KINDS = [
    pytest.param("prefill", CONFIG, False, marks=MIDDLE, id="prefill"),
    pytest.param("decode", CONFIG, False, marks=SLOW, id="decode"),
    pytest.param("decode full", CONFIG, False, id="decode full"),
    pytest.param("decode 4 steps", CONFIG, False, marks=MIDDLE, id="decode 4 steps"),
    pytest.param("prefill prompt", CONFIG, False, marks=SLOW, id="prefill prompt"),
    pytest.param("prefill", TWO_GROUPS, True, id="prefill mixed of two groups"),
    pytest.param("prefill prompt", TWO_GROUPS, True, marks=SLOW, id="prompt mixed of two groups"),
    pytest.param("decode full", TWO_GROUPS, False, marks=MIDDLE, id="decode full of two groups"),
    pytest.param("decode 4 steps", TWO_GROUPS, False, id="decode 4 steps of two groups"),
    pytest.param("prefill", NARROW, True, marks=MIDDLE, id="prefill of narrow values"),
    pytest.param("decode 4 steps", NARROW, False, id="decode 4 steps of narrow values"),
    pytest.param("prefill", HYBRID, True, id="prefill mixed with states"),
    pytest.param("decode 4 steps", HYBRID, False, id="decode 4 steps with states"),
]


FIELDS = {
    TWO_GROUPS: [["kv"], ["kv"]],
    NARROW: [["kv"], ["kv"]],
    HYBRID: [["state", "inputs"], ["kv"]],
}


@pytest.mark.parametrize(("name", "model", "mixed"), KINDS)
def test_the_pools_are_updated_in_place(name: str, model: ModelConfig, mixed: bool) -> None:
    step, pools = compiled(name, MANY, model, mixed)
    copies, is_small = in_place(step, pools)
    assert copies == [] and is_small
    assert [list(pool.of_rows(1)) for pool in pools] == FIELDS.get(model, [["kv"]])


@pytest.mark.middle
@pytest.mark.parametrize("name", ["draft", "prefill", "decode 4 steps"])
def test_those_of_a_draft_model_too(name: str) -> None:
    settings = engine(num_blocks=MANY[0], speculative={"method": "draft"}).resolve(CONFIG)
    smaller = config(num_layers=1, hidden_size=16)
    target, draft = (bind(model, make_params(0, model)) for model in (CONFIG, smaller))
    runner = Runner(CONFIG, settings, ONE_DEVICE, target, (smaller, draft))
    bucket = dataclasses.replace(BUCKETS[name], tables=2)
    copies, is_small = in_place(runner.compiled.lower(bucket).compile(), runner.pools)
    assert copies == [] and is_small and len(runner.pools) == 2


@pytest.mark.skipif(unavailable() is not None, reason=f"the CPU kernels: {unavailable()}")
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_so_it_is_under_the_cpu_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "rates", lambda: Rates(ratios={512: 0.5}))
    table = make_steps(MANY, config(head_dim=32, intermediate_size=64), dtype=jnp.bfloat16)
    step = table.lower(BUCKETS[name]).compile()
    calls = {"linear", "paged_attention", "head_write", "mlp", "norm"}
    assert {f"jpaged_{call}" for call in calls} <= set(
        re.findall(r'custom_call_target="(\w+)"', step.as_text())
    )
    copies, is_small = in_place(step, table.setting.pools)
    assert copies == [] and is_small
    if name == "decode":  # XLA:CPU would wake a second thread for one of each layer
        assert not [op for op in first_operations(step.as_text()) if "iota" in op]


@pytest.mark.parametrize(
    ("name", "model", "mixed"),
    [
        pytest.param("decode", TWO_GROUPS, False, id="decode"),
        pytest.param("prefill", TWO_GROUPS, True, marks=MIDDLE, id="prefill"),
        pytest.param("prefill", HYBRID, True, id="prefill with states"),
        pytest.param("decode 4 steps", HYBRID, False, marks=MIDDLE, id="decode with states"),
    ],
)
def test_without_donation_a_copy_of_each_shows(
    monkeypatch: pytest.MonkeyPatch, name: str, model: ModelConfig, mixed: bool
) -> None:
    """The control: what the test above looks for is there when the pools must survive."""
    forbid_donation(monkeypatch)
    table = make_steps(MANY, model, mixed=mixed)
    bucket = dataclasses.replace(BUCKETS[name], tables=2)
    copies, is_small = in_place(table.lower(bucket).compile(), table.setting.pools)
    fields = sum(map(len, FIELDS[model]))
    assert len(copies) == fields and all(" copy(" in copy for copy in copies) and not is_small


@pytest.mark.parametrize(
    ("name", "model", "mixed"),
    [
        pytest.param("decode full", CONFIG, False, id="decode full"),
        pytest.param("prefill", CONFIG, False, marks=SLOW, id="prefill"),
        pytest.param("prefill", TWO_GROUPS, True, id="prefill mixed of two groups"),
    ],
)
def test_temporaries_do_not_depend_on_the_pool(name: str, model: ModelConfig, mixed: bool) -> None:
    """So that the number of blocks that fit can be computed from a step compiled for few."""
    small, large = (compiled(name, blocks, model, mixed)[0] for blocks in (FEW, MANY))
    sizes = [step.memory_analysis().temp_size_in_bytes for step in (small, large)]
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize(
    ("name", "model", "attending", "feeding"),
    [
        pytest.param("prefill", CONFIG, {16, 8}, {16, 8}, id="prefill"),
        pytest.param("prefill prompt", CONFIG, {16}, {16}, id="prefill prompt"),
        pytest.param("prefill", hybrid((1, 2)), {16}, {16, 8}, id="a state in the last layer"),
    ],
)
def test_the_last_layer_computes_what_is_drawn_after(
    name: str, model: ModelConfig, attending: set[int], feeding: set[int]
) -> None:
    """A step has 16 tokens of 8 rows. Products are told by their inputs: what attention gives has
    64 numbers, and a feed-forward part's second product takes 48.
    """
    table = make_steps((127,) * 2, model)
    bucket = dataclasses.replace(BUCKETS[name], tables=len(table.setting.pools))
    products = re.findall(
        r"dot_general.* : \(tensor<(\d+)x(\d+)xf32>", table.lower(bucket).as_text()
    )
    rows = {inputs: {int(T) for T, E in products if inputs == E} for inputs in ("64", "48")}
    assert rows == {"64": attending, "48": feeding}


def test_locate_and_slots() -> None:
    """Rows of 3, 0 and 5 new tokens (contexts of 7 and 5), a padding row, 4 padding tokens; blocks
    of 4.
    """
    starts, contexts = np.array([0, 3, 3, 8, 8], np.int32), np.array([7, 0, 5, 0], np.int32)
    table = np.array([[9, 4, 0], [0, 0, 0], [2, 7, 0], [0, 0, 0]], np.int32)
    row, position = paged_kv.locate(jnp.asarray(starts), jnp.asarray(contexts), 12)
    assert row.tolist() == [0] * 3 + [2] * 5 + [4] * 4
    assert position.tolist() == [4, 5, 6, 0, 1, 2, 3, 4] + [-1] * 4
    slots = paged_kv.slot_mapping(row, position, jnp.asarray(table), 4, rows=2 * 11).tolist()
    assert slots[:8] == [4 * 4 + p % 4 for p in (4, 5, 6)] + [
        2 * 4,
        2 * 4 + 1,
        2 * 4 + 2,
        2 * 4 + 3,
        7 * 4,
    ]
    assert all(slot >= 11 * 4 for slot in slots[8:]), "padding goes past the end"


def test_set_counts() -> None:
    """A long prompt in chunks, its counts 2 * (occurrences in the output) + (1 if in the
    prompt).
    """
    vocab, chunk = 7, 5
    counts = jnp.full((3, vocab), 9, jnp.int32)
    tokens, prompt_len = [1, 1, 4, 0, 4, 2, 6, 6, 1], 6
    for start in range(0, len(tokens), chunk):
        part = np.full(chunk, vocab, np.int32)
        part[: len(tokens[start : start + chunk])] = tokens[start : start + chunk]
        scalars = [jnp.int32(v) for v in (1, max(prompt_len - start, 0), start == 0)]
        counts = set_counts(counts, scalars[0], jnp.asarray(part), *scalars[1:])
    prompt, output = tokens[:prompt_len], tokens[prompt_len:]
    expected = [2 * output.count(v) + (v in prompt) for v in range(vocab)]
    assert counts.tolist() == [[9] * vocab, expected, [9] * vocab]


@pytest.mark.parametrize("name", ["decode", "decode full", "decode 4 steps", "sample full"])
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
    packed = step_of(bucket).pack({k: jnp.asarray(v) for k, v in outputs.items()})
    batch = Batch(bucket=bucket, sample=bucket, packed=np.zeros(0), num_tokens=5, num_rows=5)
    result = unpack(batch, settings, [np.asarray(packed)], weight_version=1)[0]
    for field, value in outputs.items():
        if field in ("num_drawn", "tokens", "logprobs"):  # a list a row
            value = value.T[:5]
        np.testing.assert_array_equal(getattr(result, field), value, err_msg=field)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", BUCKETS)
def test_inputs_are_sliced_as_they_were_laid_out(name: str, mixed: bool) -> None:
    settings, bucket = engine(mixed=mixed).resolve(CONFIG), BUCKETS[name]
    sections, size = input_sections(bucket, settings)
    fields = step_of(bucket, mixed=mixed).unpack(jnp.arange(size, dtype=jnp.int32))
    assert fields.keys() == sections.keys()
    joined = np.concatenate([np.asarray(fields[field]).ravel() for field in sections])
    np.testing.assert_array_equal(joined, np.arange(size))
    assert all(fields[field].shape == section.shape for field, section in sections.items())


def test_controls_travel_as_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """uint32 keys beyond int32, f32 temperatures: bitcast, never converted. The rest of the row are
    stop ids.
    """
    bucket, seen = BUCKETS["sample full"], {}

    def spy(logits: Any, controls: Any, full: Any, mask: Any, **how: Any) -> Any:
        seen.update(vars(controls) | vars(full))
        return sample(logits, controls, full, mask, **how)

    sample = steps.sample
    monkeypatch.setattr(steps, "sample", spy)
    row = np.zeros((8, len(steps.CONTROLS) + 4), np.int32)
    names = [control.name for control in steps.CONTROLS]
    row[:, names.index("temperature")] = np.float32(0.7).view(np.int32)
    row[:, names.index("key_hi")] = np.uint32(0xFFFFFFF0).view(np.int32)
    row[:, names.index("top_k")] = 7
    for name in ("top_p", "repetition"):
        row[:, names.index(name)] = np.float32(1).view(np.int32)
    row[:, -4:] = 11, 12, 2**31 - 1, 2**31 - 1
    zeros = functools.partial(np.zeros, dtype=np.int32)
    fields = {
        "controls": row,
        "device_rows": np.arange(8),
        "bias_ids": zeros((8, 4)),
        "bias": zeros((8, 4)),
    }
    logits = np.where(np.arange(97) == 12, 100.0, 0.0).astype(np.float32) * np.ones(
        (8, 1), np.float32
    )
    open_after = jnp.asarray([0, -1, 1, 2, 0, 0, 0, 0], jnp.int32)
    fields = {name: jnp.asarray(field, jnp.int32) for name, field in fields.items()}
    counts = jnp.zeros((8, 97), jnp.int32)
    last = jnp.zeros(8, jnp.int32)
    rows = RowState(last_token_R=last, context_len_R=last, counts_RV=counts)
    context_lens = jnp.full(8, 5, jnp.int32)
    step = step_of(bucket)

    @jax.jit
    def draw(*given: Any) -> Any:
        drawn = steps._draw(step, *given)
        return {"token": drawn.token_S, "stops": drawn.stops_S, "last": drawn.last_S}, dict(seen)

    drawn, seen = draw(jnp.asarray(logits), fields, context_lens, rows, open_after)
    assert seen["temperature_S"][0] == np.float32(0.7) and seen["top_k_S"][0] == 7
    assert seen["key_S2"].dtype == jnp.uint32 and int(seen["key_S2"][0, 0]) == 0xFFFFFFF0
    assert seen["position_S"][0] == 5
    # A stop id that may not come yet neither comes nor stops.
    assert drawn["stops"].tolist() == [True, True, False, False] + [True] * 4
    tokens = drawn["token"].tolist()
    assert tokens[:2] == [12, 12] and 12 not in tokens[2:4] and 11 not in tokens[2:4]
    assert drawn["last"].tolist() == [-1, -1, *tokens[2:4], *[-1] * 4]
