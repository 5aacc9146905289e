"""Linear: where it rounds, who multiplies, and how shares of a weight are summed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jpaged.models.forward import bind
from jpaged.models.layers.arithmetic import apply_by_xla
from jpaged.models.layers.attention import Attention
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.low_rank import AdapterTable, LowRank
from jpaged.models.layers.mlp import MLP
from jpaged.models.quantized import quantized
from tests.tiny import config, make_params, make_prompts


class Recorder:
    """Products that notes what it is asked, and leaves the rows that are padding at zero."""

    activations = "plain"

    def __init__(self) -> None:
        self.counts: list[Any] = []

    def supported(self, x: Any, weight: jax.Array) -> bool:
        return x.ndim == weight.ndim == 2

    def linear(self, x: jax.Array, weight: jax.Array, count: Any, dtype: Any) -> jax.Array:
        self.counts.append(count)
        y = jnp.matmul(x, weight.T, preferred_element_type=jnp.float32)
        return jnp.where(jnp.arange(x.shape[0])[:, None] < count, y, 0).astype(dtype)

    def multiplies(self, form: str, width: int) -> bool:
        return form == "int8"

    def interleaves(self, form: str, outputs: int) -> bool:
        return False

    def quantized(
        self,
        x: jax.Array,
        values: jax.Array,
        scales: jax.Array,
        zeros: Any,
        form: str,
        count: Any,
        dtype: Any,
        interleaved: bool = False,
    ) -> jax.Array:
        self.counts.append(count)
        assert form == "int8" and zeros is None and not interleaved
        y = self.linear(x, values.astype(x.dtype), count, jnp.float32) * scales[:, 0][None]
        return y.astype(dtype)

    def norms(self, x: jax.Array, scale: jax.Array) -> bool:
        return False

    def normed(self, *args: Any) -> tuple[jax.Array, jax.Array]:
        raise AssertionError("it has no norms")

    def apply(self, name: Any, x: jax.Array) -> jax.Array:
        return apply_by_xla(name, x)

    def activates(self, activation: str) -> bool:
        return False

    def mlp(self, *args: Any) -> jax.Array:
        raise AssertionError("it has no activation")

    activated = mlp

    def adds(self, x: jax.Array, a: jax.Array) -> bool:
        return x.ndim == 2 and a.ndim == 4

    def add_low_rank(
        self, y: Any, x: Any, a: Any, b: Any, slot_T: Any, count: Any, leads: int
    ) -> jax.Array:
        self.counts.append(count)
        own, h = jnp.minimum(slot_T, a.shape[1] - 1), x.reshape(x.shape[0], a.shape[0], -1)
        if a.shape[3] > 0:
            h = jnp.einsum("te,ptre->tpr", x, a[:, own])
        added = [jnp.einsum("tr,trn->tn", h[:, i], b[i][own]) for i in range(len(b))]
        pieces = [each.reshape(len(each), leads, -1) for each in added]
        whole = jnp.concatenate(pieces, axis=2).reshape(y.shape)
        return y + jnp.where(slot_T[:, None] < a.shape[1], whole, 0.0)


TRAINING = StepContext()


def make(weight: jax.Array, bias: jax.Array | None = None, **how: Any) -> Linear:
    return Linear(weight=weight, bias=bias, **how)


def test_rounds_once_after_the_bias() -> None:
    """257 is no bfloat16: rounded before the bias, 257 - 256 would be 0."""
    x, w = jnp.ones((1, 257), jnp.bfloat16), jnp.ones((1, 257), jnp.bfloat16)
    y = make(w, jnp.asarray([-256], jnp.bfloat16))(x, TRAINING)
    assert y.dtype == jnp.bfloat16 and float(y[0, 0]) == 1.0
    assert float(make(w)(x, TRAINING)[0, 0]) == 256.0
    assert float(make(w)(x, TRAINING, jnp.float32)[0, 0]) == 257.0


def test_outputs_and_inputs_of_several_axes() -> None:
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((3, 5, 8), (2, 4, 8), (2, 4)))
    y = make(jnp.asarray(w), jnp.asarray(b), num_outputs=2)(jnp.asarray(x), TRAINING)
    np.testing.assert_allclose(y, np.einsum("abe,kde->abkd", x, w) + b, rtol=1e-5, atol=1e-5)
    flat = make(jnp.asarray(w.reshape(8, 2, 4)))(jnp.asarray(x), TRAINING)
    np.testing.assert_allclose(flat, x @ w.reshape(8, 8).T, rtol=1e-5, atol=1e-5)


def test_a_quantised_weight_goes_to_the_products_in_bf16_alone() -> None:
    rng = np.random.default_rng(0)
    w = quantized(jnp.asarray(rng.standard_normal((4, 32)), jnp.bfloat16), "int8", 1)
    for dtype, asked in ((jnp.bfloat16, 2), (jnp.float32, 0)):
        recorder = Recorder()
        x = jnp.asarray(rng.standard_normal((5, 32)), dtype)
        linear, step = Linear(weight=w), StepContext(num_rows=jnp.int32(3), products=recorder)
        by_products, by_xla = (linear(x, each, jnp.float32) for each in (step, TRAINING))
        np.testing.assert_allclose(by_products[:3], by_xla[:3], rtol=1e-2)
        assert len(recorder.counts) == asked


@pytest.mark.parametrize("slots", [3, 16])
@pytest.mark.parametrize("joined", [0, 1])
def test_adapters_by_products_that_take_each_rows_own(joined: int, slots: int) -> None:
    """Of a linear layer with parts and of an embedding: what two products over all slots give, and
    where there are more of those than rows, a copy of each row's own.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    parts, whole = (((5, 2), (1, 2)), (6, 2)) if joined == 0 else (((2, 3), (2, 1)), (2, 4))
    slot_T, recorder = jnp.asarray([2, 0, slots, slots - 1, 1], jnp.int32), Recorder()
    adapters = AdapterTable(
        a=normal(2, slots, 4, 2, 16),
        b=(normal(slots, 4, *parts[0]), normal(slots, 4, *parts[1])),
        joined=joined,
    )
    linear = make(normal(*whole, 2, 16), num_outputs=2, name="w")
    x, step = normal(5, 32), StepContext(slot_T=slot_T, adapters={"w": adapters})
    wanted = linear(x, step)
    found = linear(x, dataclasses.replace(step, products=recorder))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    plain = dataclasses.replace(linear, name="another")(x, step)
    is_equal = np.isclose(wanted, plain, atol=1e-4).all(axis=(1, 2))
    assert is_equal.tolist() == [False, False, True, False, False]
    np.testing.assert_array_equal(linear(x, TRAINING), plain, "no row has an adapter")
    assert recorder.counts == [5, 5], "the product and what is added to it"
    many = dataclasses.replace(step, slot_T=jnp.tile(slot_T, slots))
    found = linear(jnp.tile(x, (slots, 1)), many)
    np.testing.assert_allclose(found[-5:], wanted, rtol=1e-4, atol=1e-4)

    table, at_T = normal(7, 6), jnp.asarray([0, 6, 3, 3, -1])
    own = LowRank(a=normal(1, slots, 4, 7), b=(normal(slots, 4, 6),), slot_T=slot_T, joined=0)
    y = table[at_T]
    one_hot = jnp.asarray(np.arange(7) == np.asarray(at_T)[:, None], jnp.float32)
    wanted = own.added(y, one_hot, TRAINING.product, None, 5)
    for adder in (None, recorder):
        found = own.added_of_index(y, at_T, adder, 5)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(wanted[4], y[4])
    found = tiled(own, slots).added_of_index(
        jnp.tile(y, (slots, 1)), jnp.tile(at_T, slots), None, 5 * slots
    )
    np.testing.assert_allclose(found[-5:], wanted, rtol=1e-4, atol=1e-4)


def tiled(own: LowRank, times: int) -> LowRank:
    """The same adapters of so many times the rows, which are then no fewer than slots."""
    return dataclasses.replace(own, slot_T=jnp.tile(own.slot_T, times))


@pytest.mark.parametrize("num_rows", [3, None])
def test_products_are_told_how_many_rows_are_real(num_rows: int | None) -> None:
    recorder = Recorder()
    rows = None if num_rows is None else jnp.int32(num_rows)
    step = StepContext(num_rows=rows, products=recorder)
    x, w = jnp.ones((5, 8)), jnp.ones((4, 8))
    y = make(w)(x, step)
    assert y[:, 0].tolist() == [8.0] * (num_rows or 5) + [0.0] * (5 - (num_rows or 5))
    assert [int(count) for count in recorder.counts] == [num_rows or 5]
    make(w)(x[None], step)
    assert len(recorder.counts) == 1, "what it does not support is multiplied by XLA"


def test_shares_of_the_inputs_are_summed_before_the_bias_and_rounded_once() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    x = jnp.concatenate([jnp.ones((1, 257), jnp.bfloat16), -jnp.ones((1, 257), jnp.bfloat16)], 1)
    x, w = x.at[0, 257].set(0), jnp.ones((1, 514), jnp.bfloat16)
    step = StepContext(tensor_axis="tp", axis_size=2)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return make(w, jnp.ones(1, jnp.bfloat16), split=2)(x, step)

    split = PartitionSpec(None, "tp")
    run = jax.shard_map(
        product, mesh=mesh, in_specs=(split, split), out_specs=PartitionSpec(), check_vma=False
    )
    assert run(x, w).tolist() == [[2.0]], "257 - 256 + 1"


@pytest.mark.parametrize(
    ("width", "summed"), [(48, {"out", "down"}), (45, {"out"})], ids=["ffn splits", "ffn whole"]
)
def test_what_is_summed_follows_from_the_table(width: int, summed: set[str]) -> None:
    c = config(intermediate_size=width)
    step = StepContext(tensor_axis="tp", axis_size=2)
    layer = bind(c, make_params(0, c)).layers[0]
    assert isinstance(layer.ffn, MLP) and isinstance(layer.mixer, Attention)
    linears = {
        "qkv": layer.mixer.qkv,
        "out": layer.mixer.out,
        "gate_up": layer.ffn.gate_up,
        "down": layer.ffn.down,
    }
    over = {name: step.axis_over(linear.split) for name, linear in linears.items()}
    assert over == {name: "tp" if name in summed else None for name in linears}
    assert TRAINING.axis_over(layer.mixer.out.split) is None


def test_every_product_of_a_step_goes_through_the_products_that_it_is_given() -> None:
    """Four of each kind of layer (traced once, and once more for the first layer, before which
    nothing is added) and the head; none of them in training.
    """
    recorder, c = Recorder(), config()
    params, (prompt,) = make_params(0, c), make_prompts(7)

    def step(params: Any, tokens: jax.Array, num_rows: jax.Array) -> jax.Array:
        model, context = bind(c, params), StepContext(num_rows=num_rows, products=recorder)
        return model.logits(model(tokens, step=context)[0], context)

    logits = jax.jit(step)(params, jnp.asarray(prompt), jnp.int32(7))
    assert len(recorder.counts) == 9 and all(count.shape == () for count in recorder.counts)
    dense = bind(c, params)
    np.testing.assert_allclose(
        logits, dense.logits(dense(jnp.asarray([prompt]))[0])[0], rtol=1e-4, atol=1e-4
    )
    assert len(recorder.counts) == 9
