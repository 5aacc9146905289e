"""logprobs of prompts with images: what the rollout drew by, with a gradient through the tower."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import ConfigError, EmbeddingSpan, EngineConfig, Params, RequestError, SamplingParams
from jpaged.runtime.encode_images import encode_images
from tests.images.test_prepare import image_of, write_settings
from tests.models.test_vision import write
from tests.tiny import compiles

ENGINE = EngineConfig(
    block_size=8,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    token_buckets=(64,),
    seq_buckets=(8,),
    num_blocks=96,
    images=True,
)
SAMPLING = SamplingParams(n=2, max_tokens=5, seed=3, ignore_eos=True, logprobs_mode="tempered")
IMAGE = 17  # its placeholder in these models; Gemma 3's template writes another
PICTURES = (image_of(16, 24), image_of(20, 20))
# Deepstack and positions on three axes; images whose tokens see each other; one of both ways.
NAMES = ("qwen3_vl", "gemma3")


def prompts_of(name: str) -> list[Any]:
    holder = 18 if name == "gemma3" else IMAGE
    first, second = PICTURES
    return [
        {"prompt_token_ids": [3, holder, 5], "images": [first]},
        {"prompt_token_ids": [holder, 4, 6, holder, 7], "images": [second, first]},
        [9, 8, 7, 6],
    ]


@pytest.fixture(scope="module", params=NAMES)
def drawn(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Params, list[jpaged.RequestOutput]]]:
    name = request.param
    folder = write_settings(name, write(name, tmp_path_factory.mktemp(name)))
    params = jpaged.load_params(folder, images=True)
    outs = jpaged.generate(params, prompts_of(name), SAMPLING, engine_config=ENGINE)
    yield name, params, outs
    jpaged.release(compiled=True)


def test_logprobs_are_those_of_the_rollout(
    drawn: tuple[str, Params, list[jpaged.RequestOutput]],
) -> None:
    """Images that two prompts share are there once. A row that was cut keeps its right end; new
    pictures of as many rows compile nothing.
    """
    name, params, outs = drawn
    arrays = jpaged.to_arrays(outs, max_prompt_len=48)
    images = jpaged.image_arrays(params, outs, max_prompt_len=48, max_rows=32)
    assert images.patches is not None and images.rows is None
    shown = [set(row[row >= 0]) for row in np.asarray(images.row_GP)]
    assert shown[0] and shown[0] < shown[1] and not shown[2]
    assert (images.axes_G3P is None) == (images.ends_GP is not None) == (name == "gemma3")
    told = jax.jit(jpaged.logprobs)
    with compiles() as names:
        logprobs = told(params, arrays, images=images)
    assert names
    np.testing.assert_allclose(logprobs, arrays["logprobs"], atol=2e-5)
    without = np.asarray(jpaged.logprobs(params, arrays))
    assert np.abs(without - arrays["logprobs"])[:4].max() > 1e-2
    np.testing.assert_allclose(without[4:], arrays["logprobs"][4:], atol=2e-5)
    few = [outs[1], outs[2]]
    with compiles() as names:
        told(
            params, arrays, images=jpaged.image_arrays(params, outs, max_prompt_len=48, max_rows=32)
        )
    assert not names
    arrays = jpaged.to_arrays(few)
    again = jpaged.logprobs(params, arrays, images=jpaged.image_arrays(params.config, few))
    np.testing.assert_allclose(again, arrays["logprobs"], atol=2e-5)


@pytest.mark.train
def test_the_tower_has_its_gradient(
    drawn: tuple[str, Params, list[jpaged.RequestOutput]],
) -> None:
    """As a difference of the loss between weights on both sides says."""
    _, params, outs = drawn
    arrays, images = jpaged.to_arrays(outs), jpaged.image_arrays(params, outs)

    @jax.jit
    def loss(vision: Any, rest: Any) -> jax.Array:
        whole = Params({**rest, "vision": vision}, params.config)
        return jnp.sum(jpaged.logprobs(whole, arrays, images=images, remat=True))

    vision = params["vision"]
    rest = {key: x for key, x in params.items() if key != "vision"}
    gradient = jax.grad(loss)(vision, rest)
    for path, x in jax.tree.leaves_with_path(gradient):
        # What is added after the last layer, to tokens of images, no later token reads.
        is_read = "['deepstack']['1']" not in jax.tree_util.keystr(path)
        assert (float(jnp.abs(x).max()) > 0) == is_read, path
    size = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(gradient)))
    step = jax.tree.map(lambda x: x * (1e-2 / size), gradient)
    ahead = loss(jax.tree.map(jnp.add, vision, step), rest)
    behind = loss(jax.tree.map(jnp.subtract, vision, step), rest)
    assert float(ahead - behind) == pytest.approx(2e-2 * float(size), rel=0.03)


def test_embeddings_that_were_passed(
    drawn: tuple[str, Params, list[jpaged.RequestOutput]],
) -> None:
    """They are constants, beside images too; a model without its tower takes them."""
    _, params, outs = drawn
    (span,) = encode_images(params, [PICTURES[0]])
    passed = EmbeddingSpan(span.embeddings, grid=span.grid, deepstack=span.deepstack)
    (start, image), *_ = (outs[0].embeddings or {}).items()
    assert image.grid == passed.grid
    mixed = [dataclasses.replace(outs[0], embeddings={start: passed}), outs[1]]
    arrays, images = jpaged.to_arrays(mixed), jpaged.image_arrays(params, mixed)
    assert images.patches is not None and images.rows is not None
    logprobs = jpaged.logprobs(params, arrays, images=images)
    np.testing.assert_allclose(logprobs, arrays["logprobs"], atol=2e-5)
    text = Params(
        {key: x for key, x in params.items() if key != "vision"},
        dataclasses.replace(params.config, vision=None),
    )
    few = mixed[:1]
    arrays, images = jpaged.to_arrays(few), jpaged.image_arrays(text, few)
    assert images.patches is None
    logprobs = jpaged.logprobs(text, arrays, images=images)
    np.testing.assert_allclose(logprobs, arrays["logprobs"], atol=2e-5)
    with pytest.raises(RequestError, match="an image of another model"):
        jpaged.image_arrays(text, outs)
    images = jpaged.image_arrays(params, outs)
    with pytest.raises(ConfigError, match="images: params without a vision tower"):
        jpaged.logprobs(text, jpaged.to_arrays(outs), images=images)


def test_a_cut_prompt_keeps_its_right_end(
    drawn: tuple[str, Params, list[jpaged.RequestOutput]],
) -> None:
    """What it has lost is text before its image: the same rows stand at the same tokens."""
    _, params, outs = drawn
    few, full = outs[:1], jpaged.image_arrays(params, outs[:1])
    count = len(few[0].prompt_token_ids)
    cut = jpaged.to_arrays(few, max_prompt_len=count - 1, overflow="truncate")
    shorter = [dataclasses.replace(few[0], prompt_token_ids=few[0].prompt_token_ids[1:])]
    (start, image), *_ = (few[0].embeddings or {}).items()
    shorter[0] = dataclasses.replace(shorter[0], embeddings={start - 1: image})
    wanted = jpaged.logprobs(
        params, jpaged.to_arrays(shorter), images=jpaged.image_arrays(params, shorter)
    )
    np.testing.assert_allclose(jpaged.logprobs(params, cut, images=full), wanted, atol=1e-5)


def test_what_does_not_fit_is_named(
    drawn: tuple[str, Params, list[jpaged.RequestOutput]],
) -> None:
    _, params, outs = drawn
    images, arrays = jpaged.image_arrays(params, outs), jpaged.to_arrays(outs)
    with pytest.raises(RequestError, match="no prompt of these outputs has images"):
        jpaged.image_arrays(params, outs[2:])
    with pytest.raises(RequestError, match=r"rows of embeddings are over max_rows=3: raise it"):
        jpaged.image_arrays(params, outs, max_rows=3)
    with pytest.raises(RequestError, match=r"tokens is over max_prompt_len=4: raise it"):
        jpaged.image_arrays(params, outs, max_prompt_len=4)
    with pytest.raises(ConfigError, match="images= with exact=True"):
        jpaged.logprobs(params, arrays, images=images, exact=True)
    lacking = {key: x for key, x in arrays.items() if key != "group_ids"}
    with pytest.raises(RequestError, match="images=: arrays lack 'group_ids'"):
        jpaged.logprobs(params, lacking, images=images)
