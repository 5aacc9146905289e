"""Numbers are rounded as they are written, whatever the shape and the program around them.

XLA is asked to optimise here, as it does for users: what it leaves out or joins is what is tested.
"""

import dataclasses
import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jpaged import ModelConfig
from jpaged.models.forward import bind
from jpaged.models.kv_groups import dense_view
from jpaged.models.kv_view import DenseKV, Place
from jpaged.models.layers.arithmetic import (
    Function,
    added,
    apply_by_xla,
    mean_of_squares,
    multiplied,
    rounded,
    scaled,
    sum_of_last,
)
from jpaged.models.layers.linear import StepContext
from jpaged.models.layers.router import RouterConfig, route
from jpaged.models.rows import Rows, Slots, State
from kernels_cpu import functions, gated_delta, mamba2
from kernels_cpu.library import unavailable
from kernels_cpu.linear import NativeProducts
from tests.test_exact_layers import MODELS
from tests.tiny import make_params

needs_library = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
SERVING = StepContext(products=NativeProducts(most_rows=None), delta=gated_delta, scan=mamba2)
COUNTS = (1, 2, 3, 5, 8, 16, 33)  # of rows, whose bits are those among ROWS
ROWS = 72


def numbers(*shape: int, dtype: Any = jnp.float32) -> Array:
    values = np.random.default_rng(len(shape)).standard_normal(shape) * 4
    return jnp.asarray(values.astype(np.float32)).astype(dtype)


def bits(x: Any) -> list[np.ndarray]:
    """The leaves as integers: zeros have signs, and no number is a NaN's equal."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(x)]
    return [leaf.view(f"uint{8 * leaf.dtype.itemsize}") for leaf in leaves]


def assert_bits(x: Any, y: Any) -> None:
    for one, other in zip(bits(x), bits(y), strict=True):
        np.testing.assert_array_equal(one, other)


@needs_library
@pytest.mark.parametrize("name", get_args(Function.__value__))
def test_functions_have_the_bits_of_a_number_in_any_shape(name: Function) -> None:
    """In loops of all widths that compilers unroll, beside what a fusion would join."""
    x = numbers(24 * 1024)
    alone = functions.apply(name, x)
    np.testing.assert_allclose(alone, apply_by_xla(name, x), rtol=1e-4, atol=1e-6)
    for width in (1, 3, 4, 6, 8, 12, 16):
        shaped = x.reshape(-1, width)
        assert_bits(jax.jit(lambda x: functions.apply(name, x))(shaped), alone.reshape(-1, width))
        turned = jax.jit(lambda x: 2 * functions.apply(name, -x.T).T)(-shaped)
        assert_bits(turned, 2 * alone.reshape(-1, width))


def test_what_is_rounded_is_not_left_out() -> None:
    """Beside what reads it, as numpy rounds it step by step."""
    x, y, z = numbers(3, 64, 96, dtype=jnp.bfloat16)
    a, b, c = (np.asarray(v) for v in (x, y, z))
    assert_bits(jax.jit(lambda x, y, z: added(added(x, y), z))(x, y, z), (a + b) + c)
    assert_bits(jax.jit(lambda x, y, z: added(multiplied(x, y), z))(x, y, z), (a * b) + c)
    assert_bits(jax.jit(lambda x, y: added(scaled(x, 0.3), y))(x, y), a * a.dtype.type(0.3) + b)
    in_f32 = jax.jit(
        lambda x: rounded(jnp.exp2(x.astype(jnp.float32)), x.dtype).astype(jnp.float32)
    )
    assert not np.any(bits(in_f32(x))[0] & 0xFFFF)
    a, b, c = (v.astype(np.float32) * np.float32(1.1) for v in (a, b, c))
    assert_bits(jax.jit(lambda x, y, z: multiplied(x, y) + z)(a, b, c), a * b + c)


def test_sums_of_rows_do_not_depend_on_their_number() -> None:
    for width in (4, 6, 24, 60, 128, 300):
        x = numbers(ROWS, width)
        for function in (sum_of_last, mean_of_squares):
            all_rows = np.asarray(jax.jit(function)(x))
            for count in COUNTS:
                assert_bits(jax.jit(function)(x[:count]), all_rows[:count])


@needs_library
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("num_experts", [4, 6, 60, 128])
def test_routes_do_not_depend_on_the_number_of_rows(score: Any, num_experts: int) -> None:
    config, logits = RouterConfig(score=score, normalized=True), numbers(ROWS, num_experts)

    @jax.jit
    def routes(logits: Array) -> tuple[Array, Array]:
        return route(config, logits, None, 3, apply=SERVING.apply)

    chosen, weight = (np.asarray(x) for x in routes(logits))
    for count in COUNTS:
        assert_bits(routes(logits[:count]), (chosen[:count], weight[:count]))


@dataclasses.dataclass
class Told:
    """A KVView of sequences of one token, which keeps what a mixer tells it. in_decode: whether the
    mixer knows that every row has one token.
    """

    dense: DenseKV
    in_decode: bool
    state: State = dataclasses.field(default_factory=dict)
    replayed: State = dataclasses.field(default_factory=dict)

    def rows(self, place: Place) -> Rows:
        rows = self.dense.rows(place)
        return rows if self.in_decode else dataclasses.replace(rows, length=None)

    def slots(self, place: Place) -> Slots:
        return self.dense.slots(place)

    def with_slots(self, place: Place, pool: State) -> "Told":
        return dataclasses.replace(self, state=pool)

    def with_replayed(self, place: Place, tokens: State) -> "Told":
        return dataclasses.replace(self, replayed=tokens)


def told(mixer: Any, config: ModelConfig, x: Array, in_decode: bool) -> Any:
    """Return what a mixer, that of the config's layer, makes of sequences of one token x [T, E]."""
    view: Any = Told(dense_view(config, x[:, None]), in_decode)
    y, view = mixer(x, SERVING, None, view, (Place(0, np.int32(0)),))
    return y, view.state, view.replayed


@needs_library
@pytest.mark.parametrize(
    "name", ["delta rule", "delta rule by channel", "Mamba-2", "short convolutions"]
)
def test_states_do_not_depend_on_the_step(name: str) -> None:
    """Outputs, states and what they were made of, in f32: no last bit of it is another, in a
    prefill of many sequences or few, and in decode.
    """
    config = MODELS[name]
    model = bind(config, dict(make_params(0, config, jnp.bfloat16)))
    x = (numbers(1024, config.hidden_size) / 8).astype(jnp.bfloat16)
    for layer, kept in zip(model.layers, config.layers, strict=True):
        if kept.keeps()[0].has_keys:
            continue
        one = dataclasses.replace(config, layers=(kept,))
        step = jax.jit(functools.partial(told, layer.mixer, one), static_argnums=1)
        of_all = jax.tree.map(np.asarray, step(x, False))
        for count, in_decode in ((3, False), (2, True), (8, True), (1024, True)):
            for first in range(0, 1024 - count + 1, max(count, 5)):
                few = slice(first, first + count)
                wanted = jax.tree.map(lambda x, few=few: x[few], of_all)
                assert_bits(step(x[few], in_decode), wanted)
