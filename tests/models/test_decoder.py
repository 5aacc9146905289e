"""One definition, two ways to run it: dense (training) and paged (serving)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jpaged.models.config import ModelConfig, RopeScaling
from jpaged.models.decoder import Decoder
from jpaged.models.forward import Forward, bind
from jpaged.models.kv_view import DenseKV
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.params import Params
from jpaged.models.trees import to_tree
from jpaged.runtime.choices import choose
from jpaged.runtime.kv_cache import pool_specs
from jpaged.runtime.mesh import Placement
from jpaged.runtime.paged_kv import Packed, PagedKV, view_of
from tests.hlo import filled
from tests.tiny import CONFIG, config, engine, make_params, make_prompts

VARIANTS = {
    "qwen3_tied_window_mix": config(
        tie_word_embeddings=True, num_layers=3, sliding_windows=(5, None, 5)
    ),
    "biases_yarn": config(
        family="llama",
        qk_norm=False,
        qkv_bias=True,
        out_bias=True,
        num_heads=6,
        rope_scaling=RopeScaling(
            kind="yarn", factor=4.0, original_max_position=16, attention_factor=1.1
        ),
    ),
}
BLOCK = 4


@functools.partial(jax.jit, static_argnames="model_config")
def dense(
    model_config: ModelConfig, tree: Any, tokens: jax.Array, positions: jax.Array | None = None
) -> jax.Array:
    return bind(model_config, tree)(tokens, positions)[0]


@functools.partial(jax.jit, static_argnames="model_config", donate_argnames="kv")
def paged(
    model_config: ModelConfig, tree: Any, tokens: jax.Array, positions: jax.Array, kv: PagedKV
):
    return bind(model_config, tree)(tokens, positions, kv)


@pytest.mark.parametrize("model_config", VARIANTS.values(), ids=VARIANTS)
def test_paged_equals_dense(model_config: ModelConfig) -> None:
    """Two rows in shuffled blocks of a dirty pool: two chunks of prefill packed together, then
    tokens one by one.
    """
    tree = dict(make_params(1, model_config))
    rows = make_prompts(19, 14)
    expected = [np.asarray(dense(model_config, tree, jnp.asarray([row])))[0] for row in rows]
    blocks = np.random.default_rng(0).permutation(12)
    table = np.array([[*blocks[:5], 0], [*blocks[5:9], 0, 0]], np.int32)
    settings = engine(block_size=BLOCK, attention="xla").resolve(model_config)
    where = Placement(mesh=None, axis=None, device=jax.devices()[0])
    kernels = choose(model_config, settings, where, jnp.float32).attention
    specs = tuple(
        dataclasses.replace(spec, num_blocks=12)
        for spec in pool_specs(model_config, settings, where, kernels, 12, jnp.float32)
    )
    pools = tuple(filled(spec, 7.0) for spec in specs)

    def run(spans: list[tuple[int, int]], decode: bool) -> list[np.ndarray]:
        """Compute tokens [start, end) of each row, padded to 24 packed tokens; hidden states of
        each row.
        """
        nonlocal pools
        at = [(row, p) for row, (start, end) in enumerate(spans) for p in range(start, end)]
        size = len(spans) if decode else 24
        tokens = np.zeros(size, np.int32)
        row_T, positions = np.full(size, len(spans), np.int32), np.full(size, -1, np.int32)
        for i, (row, p) in enumerate(at):
            tokens[i], row_T[i], positions[i] = rows[row][p], row, p
        starts = np.cumsum([0] + [end - start for start, end in spans])
        packed = Packed(
            tokens_T=jnp.asarray(tokens),
            block_tables_GSM=jnp.asarray(np.stack([table] * len(specs))),
            context_lens_S=jnp.asarray([end for _, end in spans], jnp.int32),
            query_start_loc_S1=jnp.asarray(starts, jnp.int32),
            num_rows=jnp.int32(len(at)),
        )
        at_T = (jnp.asarray(row_T), jnp.asarray(positions))
        kv = view_of(specs, pools, packed, *at_T, is_decode=decode)
        hidden, kv = paged(
            model_config, tree, jnp.asarray(tokens), jnp.asarray(positions.clip(0)), kv
        )
        pools = kv.pools
        out = np.asarray(hidden)
        return [out[[i for i, (r, _) in enumerate(at) if r == row]] for row in range(len(spans))]

    steps = [([(0, 11), (0, 6)], False), ([(11, 17), (6, 12)], False), ([(17, 18), (12, 13)], True)]
    for spans, decode in [*steps, ([(18, 19), (13, 14)], True)]:
        for row, (hidden, (start, end)) in enumerate(zip(run(spans, decode), spans, strict=True)):
            np.testing.assert_allclose(hidden, expected[row][start:end], atol=2e-5, rtol=2e-5)
    spare = np.setdiff1d(np.arange(12), blocks[:9])
    for spec, pool in zip(specs, pools, strict=True):
        written = np.asarray(pool["kv"]).reshape(spec.num_layers, 12, *spec.shape[1:])
        assert (written[:, spare] == 7.0).all(), "blocks of no row are untouched"


def test_dense_is_causal_and_batched() -> None:
    tree = dict(make_params())
    a, b = make_prompts(12, 12)
    both = np.asarray(dense(CONFIG, tree, jnp.asarray([a, b])))
    assert both.shape == (2, 12, CONFIG.hidden_size)
    np.testing.assert_allclose(both[1:], dense(CONFIG, tree, jnp.asarray([b])), atol=1e-5)
    changed = np.asarray(dense(CONFIG, tree, jnp.asarray([a[:7] + b[7:], b])))
    np.testing.assert_allclose(changed[0, :7], both[0, :7], atol=1e-5)
    assert np.abs(changed[0, 7:] - both[0, 7:]).max() > 0.1


def test_a_window_hides_what_is_before_it() -> None:
    one_layer = config(num_layers=1, sliding_windows=(4,))
    tree = dict(make_params(0, one_layer))
    (row,) = make_prompts(12)
    other = [95 if i == 3 else token for i, token in enumerate(row)]
    assert row[3] != 95
    change = np.abs(
        np.asarray(
            dense(one_layer, tree, jnp.asarray([row]))
            - dense(one_layer, tree, jnp.asarray([other]))
        )
    )
    seen = change[0].max(axis=-1) > 1e-4
    assert seen.tolist() == [3 <= p < 3 + 4 for p in range(12)]


def test_positions_turn_the_keys() -> None:
    """The same tokens elsewhere: equal attention (rotary embeddings are relative), unless the gaps
    change.
    """
    tree = dict(make_params())
    tokens, steps = jnp.asarray(make_prompts(6)), jnp.arange(6)[None]
    here = np.asarray(dense(CONFIG, tree, tokens))
    np.testing.assert_allclose(dense(CONFIG, tree, tokens, steps + 20), here, atol=1e-4)
    assert np.abs(dense(CONFIG, tree, tokens, 3 * steps) - here).max() > 0.05


def test_a_module_takes_the_arrays_as_they_are() -> None:
    params = make_params(0, config(num_layers=11))  # "10" sorts before "2"
    model = Decoder(params.config, tree=dict(params))
    back = to_tree(model)
    assert jax.tree.structure(back) == jax.tree.structure(dict(params))
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True))
    assert model.layers[10].mlp.down[...] is params["layers"]["10"]["mlp"]["down"]
    state = to_tree(nnx.state(model))
    assert all(a is b for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True))
    tokens = jnp.asarray(make_prompts(6))
    hidden, _ = model(tokens)
    expected, _ = bind(params.config, dict(params))(tokens)
    assert np.array_equal(model.logits(hidden), bind(params.config, back).logits(expected))


@pytest.mark.parametrize("tied", [True, False])
def test_head(tied: bool) -> None:
    c = config(tie_word_embeddings=tied)
    params = make_params(0, c, jnp.bfloat16)
    model = bind(c, dict(params))
    hidden, cache = model(jnp.asarray(make_prompts(5)))
    assert isinstance(cache, DenseKV) and hidden.dtype == jnp.bfloat16
    logits = model.logits(hidden)
    assert logits.dtype == jnp.float32 and logits.shape == (1, 5, c.vocab_size)
    table = params["embed" if tied else "lm_head"]["weight"].astype(jnp.float32)
    np.testing.assert_allclose(logits, hidden.astype(jnp.float32) @ table.T, rtol=1e-4, atol=1e-4)


def test_linear_accumulates_in_f32() -> None:
    """4096 products of 1: bfloat16 would stop counting at 256."""
    x, w = jnp.ones((1, 4096), jnp.bfloat16), jnp.ones((3, 4096), jnp.bfloat16)
    linear, step = Linear(weight=w), StepContext()
    assert linear(x, step).dtype == jnp.bfloat16
    assert linear(x, step, jnp.float32).dtype == jnp.float32
    np.testing.assert_array_equal(linear(x, step, jnp.float32), 4096.0)


def loss_of(model: Decoder | Forward, tokens: jax.Array) -> jax.Array:
    hidden, _ = model(tokens[:, :-1])
    logprobs = jax.nn.log_softmax(model.logits(hidden))
    return -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1))


@pytest.mark.parametrize("model_config", VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_has_a_gradient(model_config: ModelConfig) -> None:
    params = make_params(0, model_config)
    tokens = jnp.asarray(make_prompts(16, 16, 16, 16))
    grads = jax.jit(jax.grad(lambda p: loss_of(bind(p.config, dict(p)), tokens)))(params)
    assert isinstance(grads, Params)
    for path, grad in jax.tree.leaves_with_path(grads):
        where = jax.tree_util.keystr(path)
        assert np.isfinite(grad).all(), where
        if where.endswith(
            "['qkv_bias']"
        ):  # one constant added to all keys moves no softmax but for the rotation
            grad = np.asarray(grad)[:, [*range(grad.shape[1] - 2), grad.shape[1] - 1]]
        assert np.abs(grad).max() > 1e-6, where


@pytest.mark.train
def test_training_lowers_the_loss() -> None:
    """The module as a flax user trains it, from its own initial weights."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    tokens = jnp.asarray(make_prompts(24, 24, 24, 24))

    @nnx.jit
    def step(model: Decoder, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(12)]
    assert losses[0] == pytest.approx(np.log(CONFIG.vocab_size), abs=0.3), (
        "fresh weights know nothing"
    )
    assert all(np.isfinite(losses)) and losses[-1] < 0.7 * losses[0]


def test_initial_weights_are_seeded() -> None:
    make = jax.jit(lambda key: to_tree(Decoder(config(num_layers=1), rngs=nnx.Rngs(key))))
    a, b, c = (make(jax.random.key(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert not np.array_equal(a["embed"]["weight"], c["embed"]["weight"])
    flat = [*jax.tree.leaves(a["layers"]["0"]["mlp"]), a["embed"]["weight"], a["lm_head"]["weight"]]
    assert len({float(leaf.ravel()[0]) for leaf in flat}) == len(flat), (
        "no two weights share a stream"
    )
