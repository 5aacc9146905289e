"""From sources to embeddings: encode_images, its buckets and its cache."""

import base64
import io
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import jpaged
from jpaged.errors import ConfigError, RequestError
from jpaged.images.cache import EmbeddingCache
from jpaged.images.encode import ImageEncoder, bind_tower
from jpaged.images.prepare import ImagePreparer
from jpaged.models.params import Params
from jpaged.runtime.encode_images import encode_images
from tests.images.test_prepare import image_of, write_settings
from tests.models.test_vision import difference, write
from tests.tiny import compiles

NAME = "qwen3_vl"


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Params:
    folder = tmp_path_factory.mktemp("model")
    write_settings(NAME, folder)
    return jpaged.load_params(write(NAME, folder), images=True)


def test_sources_to_embeddings(params: Params, tmp_path: Path) -> None:
    """In every form, one that occurs twice once, in order."""
    first, second = image_of(30, 50), image_of(64, 20)
    file, out = tmp_path / "a.png", io.BytesIO()
    Image.fromarray(second).save(file)
    Image.fromarray(first).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    vision = params.config.vision
    assert vision is not None
    encoder = ImageEncoder(vision, buckets=(8, 64))
    spans = encode_images(params, [first, file, url, Image.fromarray(second)], encoder=encoder)
    assert encoder.stats()["images_encoded"] == 2 and encoder.stats()["image_calls"] == 1
    assert spans[0] is spans[2] and spans[1] is spans[3]
    assert spans[0].digest != spans[1].digest
    for span in spans:
        assert span.embeddings.shape == (span.grid.size, 24) and span.deepstack is not None
        assert span.deepstack.shape == (2, span.grid.size, 24)
    alone = encode_images(params, [second], encoder=ImageEncoder(vision, buckets=(64,)))
    assert difference(alone[0].embeddings, spans[1].embeddings) < 1e-5
    assert encode_images(params, []) == []


def test_what_is_kept_is_not_encoded(params: Params) -> None:
    cache, vision = EmbeddingCache(2**20), params.config.vision
    assert vision is not None
    encoder, images = ImageEncoder(vision, buckets=(64,)), [image_of(30, 50), image_of(64, 20)]
    first = encode_images(params, images, encoder=encoder, cache=cache, weights=1)
    again = encode_images(params, images[::-1], encoder=encoder, cache=cache, weights=1)
    assert again[0] is first[1] and again[1] is first[0]
    assert encoder.stats()["images_encoded"] == 2
    moved = Params(jax.tree.map(lambda x: x * 1.5, dict(params)), params.config, params.source)
    other = encode_images(moved, images, encoder=encoder, cache=cache, weights=2)
    assert encoder.stats()["images_encoded"] == 4
    assert difference(other[0].embeddings, first[0].embeddings) > 1e-2


def test_a_program_a_bucket(params: Params) -> None:
    """New images and new weights of a bucket compile nothing."""
    vision, tower = params.config.vision, bind_tower(params)
    assert vision is not None and params.source is not None
    preparer = ImagePreparer(params.source, vision)
    encoder = ImageEncoder(vision, buckets=(4, 24))
    encoder.warmup(tower)
    assert [*encoder.programs] == [4, 24]
    prepared = [preparer.prepare(image_of(*size)) for size in ((16, 16), (30, 50), (64, 20))]
    with compiles() as names:
        for tree in (params, jax.tree.map(lambda x: x * 0.5, params)):
            for image in prepared:
                encoder.encode(bind_tower(tree), [image] * 2)
    assert not [name for name in names if "run_tower" in name] and len(encoder.programs) == 2
    assert encoder.stats()["image_rows_padded"] > 0


def test_groups_fill_the_largest_bucket(params: Params) -> None:
    vision = params.config.vision
    assert vision is not None and params.source is not None
    preparer = ImagePreparer(params.source, vision)
    image = preparer.prepare(image_of(16, 24))
    rows = image.rows(vision).size
    encoder = ImageEncoder(vision, buckets=(2 * rows + 1,))
    spans = encoder.encode(bind_tower(params), [image] * 5)
    assert len(spans) == 5 and encoder.stats()["image_calls"] == 3
    assert all(np.array_equal(x.embeddings, spans[0].embeddings) for x in spans[::2])
    with pytest.raises(RequestError, match=rf"an image of {rows} rows .* buckets=\(2,\)"):
        ImageEncoder(vision, buckets=(2,)).encode(bind_tower(params), [image])
    with pytest.raises(ConfigError, match="buckets="):
        ImageEncoder(vision, buckets=())


def test_errors_name_the_image(params: Params) -> None:
    with pytest.raises(RequestError, match="damaged"):
        encode_images(params, [image_of(20, 20), b"\x89PNG\r\n\x1a\n" + bytes(30)])
    with pytest.raises(ConfigError, match="of no known folder"):
        encode_images(Params(dict(params), params.config), [image_of(20, 20)])
    assert params.source is not None
    with pytest.raises(ConfigError, match="no vision tower"):
        encode_images(jpaged.load_params(params.source), [image_of(20, 20)])
