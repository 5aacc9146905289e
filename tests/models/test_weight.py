"""A weight on its way: in a form that only this file knows, and counted byte by byte."""

import dataclasses
import functools
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import EngineConfig, ModelConfig, SamplingParams
from jpaged.checkpoint import load, load_params
from jpaged.checkpoint.load import find_weights, read_params
from jpaged.checkpoint.tensors import flat
from jpaged.models import hf_quantization, quantized, weight
from jpaged.models.forward import bind
from jpaged.models.hf_quantization import Format
from jpaged.models.quantized import QuantizedWeight, WeightForm, is_quantized
from jpaged.models.served import served_config
from jpaged.runtime import placing
from jpaged.runtime.mesh import Placement
from jpaged.runtime.weights import ServingWeights
from kernels_pallas.experts import tiles, triton
from kernels_pallas.experts.interface import ExpertWeights
from tests.checkpoint.conftest import SMALL, make_tensors, write_folder
from tests.checkpoint.test_quantized import ENGINE, RAW, folders
from tests.tiny import by_name, config, make_params

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ONE_DEVICE = Placement(mesh=None, axis=None, device=jax.devices()[0])


# A form that only this file knows: signed powers of two, a byte each


def decode(numbers: Any) -> Any:
    xp = jnp if isinstance(numbers, jax.Array) else np
    exponent = numbers.astype(np.int32) & 127
    size = xp.exp2((exponent - 96).astype(np.float32))
    return xp.where(numbers > 127, -size, size)


def encode(x: jax.Array) -> jax.Array:
    exponent = jnp.clip(jnp.round(jnp.log2(jnp.maximum(jnp.abs(x), 2.0**-31))), -31, 30)
    return (exponent.astype(jnp.int32) + 96 + jnp.where(x < 0, 128, 0)).astype(jnp.uint8)


POWERS = WeightForm(
    name="powers", dtype=np.dtype(np.uint8), decode=decode, encode=encode, largest=1.0
)


class Powers(Format):
    """Codes [N, E] and a scale for each output."""

    def tensors(self, base: str, N: int, E: int, names: Mapping[str, Any]) -> Any:
        if f"{base}.codes" not in names:
            return None
        return {f"{base}.codes": ((N, E), ("U8",)), f"{base}.scale": ((N,), ("float32",))}

    def read(
        self, read: Any, base: str, N: int, E: int, names: Mapping[str, Any]
    ) -> QuantizedWeight:
        return self.weight(read(f"{base}.codes"), read(f"{base}.scale")[:, None])


@pytest.fixture
def powers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that makes a form known: one line here, and one for a file that holds it."""
    monkeypatch.setitem(quantized.FORMS, "powers", POWERS)
    monkeypatch.setitem(hf_quantization.METHODS, "powers", lambda _: Powers(form=POWERS))


def folder_of_powers(tmp_path: Path) -> tuple[Path, Path]:
    """A folder in that form, and one of what it stands for in f32."""
    rng, tensors, stored = np.random.default_rng(0), make_tensors(RAW), {}
    for key, tensor in list(tensors.items()):
        if "proj" not in key:
            stored[key] = tensors[key] = tensor * 0.1 if tensor.ndim > 1 else 1 + tensor * 0.1
            continue
        codes = (rng.integers(88, 97, tensor.shape) + rng.choice([0, 128], tensor.shape)).astype(
            np.uint8
        )
        scale = rng.uniform(0.05, 0.1, len(tensor)).astype(np.float32)
        stored |= {key.replace(".weight", ".codes"): codes, key.replace(".weight", ".scale"): scale}
        size = np.array([2.0 ** (int(code & 127) - 96) for code in codes.flat])
        meant = np.where(codes > 127, -1, 1) * size.reshape(codes.shape)
        tensors[key] = (meant * scale[:, None]).astype(np.float32)
    raw = RAW | {"quantization_config": {"quant_method": "powers"}}
    return (
        write_folder(tmp_path / "powers", raw, stored),
        write_folder(tmp_path / "plain", RAW, tensors),
    )


@pytest.mark.usefixtures("powers")
@pytest.mark.own_steps
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.middle)])
def test_a_made_up_form_goes_from_file_to_product(tmp_path: Path, devices: int) -> None:
    held, plain = folder_of_powers(tmp_path)
    kept, exact = (flat(load_params(path), is_quantized) for path in (held, plain))
    for name, leaf in exact.items():
        if any(part in name for part in ("qkv", "out", "gate_up", "down")):
            assert kept[name].form == POWERS and kept[name].values.dtype == np.uint8
            np.testing.assert_allclose(kept[name].whole(), leaf, rtol=1e-6)
        else:
            np.testing.assert_array_equal(kept[name], leaf)
    planned = jpaged.plan_memory(held, EngineConfig(**ENGINE))
    assert planned.weights == sum(leaf.nbytes for leaf in kept.values())
    answers = []
    for folder in (held, plain):
        llm = jpaged.LLM(folder, tensor_parallel_size=devices, **ENGINE)
        outs = llm.generate([[5, 9, 23], [70, 3]], GREEDY, use_tqdm=False)
        answers.append([(o.outputs[0].token_ids, o.outputs[0].token_logprobs) for o in outs])
        llm.close()
    for (ours, logprobs), (theirs, expected) in zip(*answers, strict=True):
        assert ours == theirs and np.abs(logprobs - expected).max() < 5e-5


@pytest.mark.usefixtures("powers")
@pytest.mark.own_steps
def test_kernels_leave_a_form_that_they_do_not_know_to_xla(tmp_path: Path) -> None:
    """In bf16, where the C++ products multiply int8, int4 and fp8."""
    held, plain = folder_of_powers(tmp_path)
    scores = []
    for folder in (held, plain):
        settings: Any = ENGINE | {"dtype": "bfloat16"}
        llm = jpaged.LLM(folder, **settings)
        scores.append(llm.score([[5, 9, 23, 70, 3]])[0][1:])
        assert llm.stats()["quantized_activations"] == ("plain" if folder == held else None)
        llm.close()
    assert np.abs(np.subtract(*scores)).max() < 0.1, "in bf16"


@pytest.mark.usefixtures("powers")
@pytest.mark.parametrize("devices", [1, 2])
def test_plain_weights_are_made_into_it(devices: int) -> None:
    params, where = make_params(0, config(head_dim=32, intermediate_size=64)), ONE_DEVICE
    if devices == 2:
        mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
        where = Placement(mesh=mesh, axis="tp", device=jax.devices()[0])
    weights = ServingWeights(where, None, "powers")
    weights.update(params)
    served = served_config(params.config, devices)
    tree = by_name(served, weights.modules(params))
    plain = flat(params)
    made = {name for name, leaf in tree.items() if is_quantized(leaf)}
    assert "layers.1.mlp.down" in made and "lm_head.weight" in made and len(made) == 9
    for name in made:
        assert tree[name].form == POWERS
        exact = np.asarray(plain[name])
        found = np.asarray(tree[name].whole())[: len(exact)]  # a mesh pads the vocabulary
        assert np.abs(found - exact).max() < 0.5 * np.abs(exact).max(), name
        assert (np.sign(found) == np.sign(exact))[exact != 0].all()


@pytest.mark.usefixtures("powers")
def test_experts_in_it_go_through_tiles() -> None:
    rng = np.random.default_rng(0)
    made = [
        quantized.quantized(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16), POWERS, outputs)
        for shape, outputs in (((4, 2, 32, 64), 3), ((4, 64, 32), 2))
    ]
    weights = ExpertWeights(gate_up=made[0], gate_up_bias=None, down=made[1])
    x = jnp.asarray(rng.standard_normal((6, 64)), jnp.bfloat16)
    chosen = jnp.asarray(rng.integers(0, 4, (6, 2)), jnp.int32)
    args = (x, chosen, jnp.full((6, 2), 0.5, jnp.float32), weights, lambda gate, up: gate * up)
    found = functools.partial(triton.experts, interpret=True)(*args)
    np.testing.assert_array_equal(found, tiles.experts(*args))


# Bytes


@dataclasses.dataclass
class Traffic:
    """What a load did on the host. put: bytes of numpy arrays that went to devices; copied: those
    of arrays that are none of the loader's buffers. live: bytes of its buffers that are alive;
    peak: the most that were.
    """

    put: int = 0
    copied: int = 0
    live: int = 0
    peak: int = 0
    bases: set[int] = dataclasses.field(default_factory=set)

    def allocated(self, array: np.ndarray) -> np.ndarray:
        base: Any = array.base
        self.live += array.nbytes
        self.peak = max(self.peak, self.live)
        self.bases.add(id(base))
        weakref.finalize(base, self._freed, id(base), array.nbytes)
        return array

    def sent(self, array: np.ndarray) -> None:
        self.put += array.nbytes
        self.copied += 0 if id(array.base) in self.bases else array.nbytes

    def _freed(self, base: int, size: int) -> None:
        self.bases.remove(base)
        self.live -= size


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Devices that copy what they are given, as an accelerator does; jax on CPU may take a buffer
    over and keep it alive.
    """
    seen, device_put, aligned = Traffic(), jax.device_put, weight.aligned

    def put(x: Any, *args: Any) -> Any:
        def one(leaf: Any) -> Any:
            if not isinstance(leaf, np.ndarray):
                return leaf
            seen.sent(leaf)
            return leaf.copy()

        return device_put(jax.tree.map(one, x), *args)

    monkeypatch.setattr(placing.jax, "device_put", put)
    monkeypatch.setattr(weight, "aligned", lambda *args: seen.allocated(aligned(*args)))
    monkeypatch.setattr(load, "_takes_buffers_over", lambda: False)
    yield seen


def wide(tmp_path: Path) -> tuple[Path, int]:
    """A folder in bf16 and its bytes."""
    raw = SMALL | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 192}
    raw |= {"vocab_size": 256}  # whole tiles, which a mesh of two does not pad
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in make_tensors(raw).items()}
    return write_folder(tmp_path / "wide", raw, tensors), sum(x.nbytes for x in tensors.values())


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_load_puts_every_byte_once(
    tmp_path: Path, traffic: Traffic, dtype: str | None, devices: int
) -> None:
    folder, size = wide(tmp_path)
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()[:2]), ("tp",))
    params = load_params(folder, dtype=dtype, mesh=mesh)
    assert traffic.put == size * (1 if dtype is None else 2) and traffic.copied == 0
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert traffic.peak == largest and traffic.live == 0, "one buffer at a time"
    where = ONE_DEVICE
    if mesh is not None:
        where = Placement(mesh=mesh, axis="tp", device=jax.devices()[0])
    weights, before = ServingWeights(where, None), traffic.put
    with jax.transfer_guard("disallow"):
        weights.update(params)
    served = jax.tree.leaves(weights.modules(params))
    own = jax.tree.leaves(bind(params.config, params))
    assert all(a is b for a, b in zip(served, own, strict=True))
    assert traffic.put == before and weights.moved_bytes == 0, "what fits is served as it is"


@pytest.mark.parametrize("name", ["fp8", "awq", "compressed_int8"])
def test_a_weight_in_8_or_4_bits_crosses_as_it_is_stored(
    tmp_path: Path, traffic: Traffic, name: str
) -> None:
    """Never widened, and never copied once it is there."""
    folder, _, _ = folders(tmp_path, name)
    params = load_params(folder, dtype="float32")
    leaves = flat(params, is_quantized)
    assert any(map(is_quantized, leaves.values()))
    assert traffic.put == sum(leaf.nbytes for leaf in leaves.values())
    packed = [leaf for leaf in leaves.values() if is_quantized(leaf) and leaf.form.bits == 4]
    assert traffic.copied == sum(w.values.nbytes + w.zeros.nbytes for w in packed)
    # Numbers of 4 bits are unpacked on the host first, a byte for each.
    largest = max(
        np.prod(leaf.shape) + 2 * leaf.scales.nbytes if is_quantized(leaf) else leaf.nbytes
        for leaf in leaves.values()
    )
    assert traffic.peak <= largest and traffic.live == 0
    weights, before = ServingWeights(ONE_DEVICE, None), traffic.put
    with jax.transfer_guard("disallow"):
        weights.update(params)
    assert traffic.put == before and weights.moved_bytes == 0
    served = jax.tree.leaves(weights.modules(params))
    own = jax.tree.leaves(bind(params.config, params))
    assert all(a is b for a, b in zip(served, own, strict=True))


def test_plain_files_are_quantised_one_by_one(
    tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain array of the last weight is gone when the next is read."""
    folder, size = wide(tmp_path)
    alive: list[weakref.ref[Any]] = []
    quantize, read = placing.Placer._quantized, weight.Weight.read

    def watched(self: Any, plain: Any, weight: Any) -> Any:
        alive.append(weakref.ref(plain))
        return quantize(self, plain, weight)

    def checked(self: Any) -> Any:
        assert not any(ref() is not None for ref in alive)
        return read(self)

    monkeypatch.setattr(placing.Placer, "_quantized", watched)
    monkeypatch.setattr(weight.Weight, "read", checked)
    params = read_params(folder, quantization="int8")
    assert len(alive) == 9 and traffic.put == size, "four of each layer, and the head"
    made = [leaf for leaf in flat(params, is_quantized).values() if is_quantized(leaf)]
    assert len(made) == len(alive)


def test_nothing_is_read_before_it_is_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = wide(tmp_path)

    def fail(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("jpaged.checkpoint.hf.read_entry", fail)
    monkeypatch.setattr(weight, "aligned", fail)
    found = find_weights(folder, ModelConfig.coerce(folder))
    assert len(found) > 9 and all(w.is_stored for w in found.values())
    with pytest.raises(AssertionError, match="a tensor was read"):
        found["norm.scale"].read()


def test_the_end_of_a_large_array_wastes_no_huge_page() -> None:
    """At most an eighth of the array."""
    for nbytes, lies_on in ((4 << 20, 4), (3 << 20, 2), (31 << 19, 16), ((28 << 20) + 1, 30)):
        assert weight.huge_bytes(nbytes) == lies_on << 20
    for shape in ((5,), (1 << 20, 3), ((2 << 20) + 1,)):
        made = weight.aligned(shape, np.dtype(np.uint8))
        made[...] = 7
        assert made.shape == shape and made.ctypes.data % weight.CACHE_LINE == 0 and made.all()
