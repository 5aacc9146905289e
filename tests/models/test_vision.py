"""Vision towers against transformers (tests/golden/towers.npz), and their parameters as those of
any layer: loaded, written, trained, split and quantised.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from safetensors.numpy import save_file

import jpaged
from jpaged.errors import CheckpointError, ConfigError, UnsupportedError
from jpaged.images.encode import ImageEncoder, bind_tower, run_tower
from jpaged.images.spans import Prepared, packed, rows_grid
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.forward import bind
from jpaged.models.layers.linear import StepContext
from jpaged.models.params import Params, param_specs, param_table, random_params
from jpaged.models.served import quantized_tree
from jpaged.models.vision.tower import Grid, patches_per_row
from jpaged.runtime.encode_images import step_for
from kernels_cpu import library
from tests.golden import towers

NAMES = tuple(towers.CONFIGS)
CLOSE = 2e-5  # of the largest number; measured: up to 1.2e-6


def write(name: str, folder: Path, **renamed: str) -> Path:
    """Write the files of a model, with its tensors under the names that transformers gives them.
    renamed: parts of names, by what stands for them instead.
    """
    golden = towers.load(name)
    tensors = towers.tensors(name, golden.shapes)
    for new, old in renamed.items():
        tensors = {key.replace(old, new.replace("__", ".")): x for key, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(golden.config))
    return folder


def prepared(name: str, config: ModelConfig) -> list[Prepared]:
    assert config.vision is not None
    images = zip(towers.patches(name), towers.GRIDS[name], strict=True)
    return [
        Prepared(patches=x, grid=Grid(*grid), digest=bytes([i]))
        for i, (x, grid) in enumerate(images)
    ]


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    name = request.param
    folder = write(name, tmp_path_factory.mktemp(name))
    return name, jpaged.load_params(folder, images=True)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("alone", [False, True])
def test_rows_are_those_of_transformers(loaded: tuple[str, Params], alone: bool) -> None:
    """Several images of odd sizes in a call, with padding, and each in a call of its own."""
    name, params = loaded
    vision, golden = params.config.vision, towers.load(name)
    assert vision is not None
    images = prepared(name, params.config)
    total = sum(rows_grid(image.grid, vision).size for image in images)
    encoder = ImageEncoder(vision, buckets=(total + 3,), alone=alone)
    spans = encoder.encode(bind_tower(params), images)
    assert encoder.stats()["image_calls"] == (len(images) if alone else 1)
    for i, (span, rows) in enumerate(zip(spans, golden.rows, strict=True)):
        assert span.embeddings.shape == rows.shape and span.digest == bytes([i])
        assert span.grid.size == len(rows)
        assert difference(span.embeddings, rows) < CLOSE
    if golden.deepstack is None:
        assert all(span.deepstack is None for span in spans)
        return
    for span, deep in zip(spans, golden.deepstack, strict=True):
        assert span.deepstack is not None and span.deepstack.shape == deep.shape
        assert difference(span.deepstack, deep) < CLOSE


def test_a_patch_of_another_image_changes_nothing(loaded: tuple[str, Params]) -> None:
    """To the bit, in a call with it."""
    name, params = loaded
    vision = params.config.vision
    assert vision is not None
    images = prepared(name, params.config)
    other = Prepared(patches=images[0].patches[::-1] ** 2, grid=images[0].grid, digest=b"other")
    encoder = ImageEncoder(vision, buckets=(64,))
    first = encoder.encode(bind_tower(params), images)
    second = encoder.encode(bind_tower(params), [other, *images[1:]])
    assert difference(first[0].embeddings, second[0].embeddings) > 1e-2
    for x, y in zip(first[1:], second[1:], strict=True):
        assert np.abs(x.embeddings - y.embeddings).max() == 0


def test_configs_are_written_and_read_back(loaded: tuple[str, Params], tmp_path: Path) -> None:
    _, params = loaded
    config = params.config
    raw = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(raw, images=True) == config
    assert ModelConfig.from_hf(raw).vision is None
    jpaged.save_params(params, tmp_path / "saved")
    again = jpaged.load_params(tmp_path / "saved", images=True)
    assert again.config == config
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), params, again))
    text = jpaged.load_params(tmp_path / "saved")
    assert text.config.vision is None and "vision" not in text


def test_no_tensor_is_left_over(loaded: tuple[str, Params], tmp_path: Path) -> None:
    """A tensor of the tower that nothing takes, or one that is not there, is an error; the text
    part loads with either.
    """
    name, params = loaded
    golden = towers.load(name)
    tensors = towers.tensors(name, golden.shapes)
    key = next(key for key in tensors if "vis" in key and key.endswith("weight"))
    (tmp_path / "config.json").write_text(json.dumps(golden.config))
    save_file(tensors | {f"{key}2": tensors[key]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not in this architecture"):
        jpaged.load_params(tmp_path, images=True)
    assert jpaged.load_params(tmp_path).config.vision is None
    save_file({k: x for k, x in tensors.items() if k != key}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="missing"):
        jpaged.load_params(tmp_path, images=True)
    count = sum(np.size(x) for x in tensors.values())
    assert count == sum(x.size for x in jax.tree.leaves(params))


def test_older_names_are_read(tmp_path: Path) -> None:
    old = write("gemma3", tmp_path, vision_tower__vision_model="vision_tower")
    params = jpaged.load_params(old, images=True)
    other = tmp_path / "other"
    other.mkdir()
    newer = jpaged.load_params(
        write("gemma3", other, model__vision_tower="vision_tower"), images=True
    )
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), params, newer))


def test_newer_names_are_read(tmp_path: Path) -> None:
    name = "gemma4_unified"
    golden = towers.load(name)
    tensors = {}
    for key, x in towers.tensors(name, golden.shapes).items():
        key = key.replace("embed_vision.", "embed_vision.multimodal_embedder.")
        tensors[key.replace("vision_embedder.", "embed_vision.")] = x
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(golden.config))
    jpaged.load_params(tmp_path, images=True)


def test_gradients_reach_every_parameter(loaded: tuple[str, Params]) -> None:
    """Through the tower alone, and they are those of finite differences."""
    name, params = loaded
    vision = params.config.vision
    assert vision is not None
    images = prepared(name, params.config)
    total = sum(rows_grid(image.grid, vision).size for image in images)
    batch = packed(images, vision, total)
    weight = np.random.default_rng(0).normal(size=(total, vision.hidden_size)).astype(np.float32)

    @jax.jit
    @jax.value_and_grad
    def loss(tree: Params) -> jax.Array:
        encoded = bind_tower(tree)(batch, StepContext())
        total = (encoded.rows_RE * weight).sum()
        if encoded.deepstack_JRE is not None:
            total = total + (encoded.deepstack_JRE * weight[None]).sum()
        return total

    gradient = loss(params)[1]["vision"]
    leaves, _ = jax.tree_util.tree_flatten_with_path(gradient)
    zero = [jax.tree_util.keystr(path) for path, x in leaves if not jnp.abs(x).max() > 0]
    assert all("bounds" in name for name in zero), zero
    assert all(bool(jnp.isfinite(x).all()) for _, x in leaves)
    if any("bounds" in jax.tree_util.keystr(path) for path, _ in leaves):
        return  # it is not smooth where it is bounded
    rng = np.random.default_rng(1)
    step = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params["vision"])

    def moved(size: float) -> float:
        vision = jax.tree.map(lambda x, d: x + size * d, params["vision"], step)
        return float(loss(Params(dict(params) | {"vision": vision}, params.config))[0])

    slope = (moved(1e-4) - moved(-1e-4)) / 2e-4
    exact = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float((g * d).sum()), gradient, step)))
    assert slope == pytest.approx(exact, rel=2e-2)


def test_the_same_over_devices(loaded: tuple[str, Params]) -> None:
    name, params = loaded
    vision = params.config.vision
    assert vision is not None
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    specs = param_specs(params.config, "tp", 2)
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), dict(params), specs
    )
    split = [x for x in jax.tree.leaves(placed["vision"]) if not x.sharding.is_fully_replicated]
    assert split, "some of it is split"
    spans = ImageEncoder(vision, buckets=(64,)).encode(
        bind_tower(Params(placed, params.config)), prepared(name, params.config)
    )
    for span, rows in zip(spans, towers.load(name).rows, strict=True):
        assert difference(span.embeddings, rows) < CLOSE


def test_served_modules_have_the_tower(loaded: tuple[str, Params]) -> None:
    """As the engine binds them, and as flax's module holds them."""
    name, params = loaded
    assert params.config.vision is not None
    model, decoder = bind(params.config, params), Decoder(params.config, tree=dict(params))
    again = bind_tower(Params(decoder_tree(decoder), params.config))
    encoder = ImageEncoder(params.config.vision, buckets=(64,))
    images = prepared(name, params.config)
    assert model.vision is not None
    first, second = (encoder.encode(tower, images)[0].embeddings for tower in (model.vision, again))
    assert np.array_equal(first, second)


def decoder_tree(decoder: Decoder) -> dict[str, object]:
    from jpaged.models.trees import to_tree

    return to_tree(decoder)


def test_scratch_is_a_bound(loaded: tuple[str, Params]) -> None:
    """What XLA says that a call takes, at three sizes of it."""
    _, params = loaded
    vision, tower = params.config.vision, bind_tower(params)
    assert vision is not None
    for rows in (16, 100, 400):
        lowered = run_tower.lower(tower, packed((), vision, rows), StepContext())
        taken = lowered.compile().memory_analysis()
        assert taken is not None
        total = taken.temp_size_in_bytes + taken.output_size_in_bytes
        bound = vision.scratch(rows)
        assert total <= bound < 8 * total, (rows, total, bound)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4_standardized"])
def test_in_int8(name: str, tmp_path: Path) -> None:
    params = jpaged.load_params(write(name, tmp_path), images=True)
    assert params.config.vision is not None
    tree = quantized_tree(params, "int8")
    encoder = ImageEncoder(params.config.vision, buckets=(64,))
    spans = encoder.encode(bind_tower(Params(tree, params.config)), prepared(name, params.config))
    differences = [
        difference(span.embeddings, rows)
        for span, rows in zip(spans, towers.load(name).rows, strict=True)
    ]
    assert 1e-4 < max(differences) < 5e-2


def test_in_bfloat16(loaded: tuple[str, Params]) -> None:
    """By XLA and, where they are, by the C++ products of the text model's layers."""
    name, params = loaded
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert params.config.vision is not None
    by_xla, by_kernels = StepContext(), step_for(half, deterministic=True)
    assert (by_kernels.products is None) == (library.unavailable() is not None)
    made = []
    for step in dict.fromkeys([by_xla, by_kernels]):
        encoder = ImageEncoder(params.config.vision, buckets=(32,), step=step)
        spans = encoder.encode(bind_tower(half), prepared(name, params.config))
        made.append([span.embeddings.astype(np.float32) for span in spans])
        for span, rows in zip(spans, towers.load(name).rows, strict=True):
            assert span.embeddings.dtype == jnp.bfloat16
            assert difference(span.embeddings.astype(np.float32), rows) < 0.1
    for x, y in zip(made[0], made[-1], strict=True):
        assert difference(x, y) < 0.05


def test_untrained_towers_are_finite(loaded: tuple[str, Params]) -> None:
    name, params = loaded
    fresh = random_params(params.config)
    assert params.config.vision is not None
    encoder = ImageEncoder(params.config.vision, buckets=(64,))
    for span in encoder.encode(bind_tower(fresh), prepared(name, params.config)):
        assert np.isfinite(span.embeddings).all() and np.abs(span.embeddings).max() > 0


def test_what_is_refused() -> None:
    raw = towers.CONFIGS["qwen3_vl"]
    with pytest.raises(UnsupportedError, match="no vision tower of model_type='qwen3_vl_text'"):
        ModelConfig.from_hf(
            raw["text_config"] | {"architectures": ["Qwen3VLTextModel"]}, images=True
        )
    bad = {**raw, "vision_config": {**raw["vision_config"], "out_hidden_size": 25}}
    with pytest.raises(ConfigError, match="out_hidden_size=25 must be 24"):
        ModelConfig.from_hf(bad, images=True)
    bad = {**raw, "vision_config": {**raw["vision_config"], "num_heads": 3}}
    with pytest.raises(ConfigError, match="num_heads=3"):
        ModelConfig.from_hf(bad, images=True)
    text = ModelConfig.from_hf(raw)
    with pytest.raises(ConfigError, match="no vision tower: load_params"):
        bind_tower(random_params(text))
    whole = {**towers.CONFIGS["gemma4_clipped"], "vision_config": None}
    with pytest.raises(UnsupportedError, match="has no vision_config"):
        ModelConfig.from_hf(whole, images=True)


def test_sizes_of_released_models() -> None:
    """Towers of the sizes that their configs have by default hold as many numbers as transformers'
    modules of these configs.
    """
    for name, count in {"qwen3_5": 453_650_672, "qwen3_vl": 566_949_104}.items():
        raw = {**towers.CONFIGS[name], "vision_config": {"model_type": f"{name}_vision"}}
        raw["text_config"] = {**raw["text_config"], "hidden_size": 3584}
        config = ModelConfig.from_hf(raw, images=True)
        table = param_table(config)
        assert config.vision is not None and patches_per_row(config.vision) == 4
        specs = [spec for ours, spec in table.items() if ours.startswith("vision.")]
        assert sum(int(np.prod(spec.shape)) for spec in specs) == count


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_text_is_as_without_the_tower(name: str, tmp_path: Path) -> None:
    """An engine serves params with a tower, with equal tokens and logprobs to the bit."""
    folder = write(name, tmp_path)
    outs = []
    for images in (False, True):
        params = jpaged.load_params(folder, images=images)
        asked = jpaged.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        llm = jpaged.LLM(params, num_blocks=32, block_size=16, max_num_seqs=8, max_model_len=64)
        outs.append(llm.generate([[3, 5, 7], [4] * 20], asked, use_tqdm=False))
        llm.close()
    for text, whole in zip(*outs, strict=True):
        first, second = text.outputs[0], whole.outputs[0]
        assert first.token_ids == second.token_ids
        assert np.array_equal(first.token_logprobs, second.token_logprobs)
