"""The compiled steps of a mesh: what passes between devices, and that nothing is ever whole."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

from jpaged.engine.shapes import DecodeShape, PrefillShape, SampleShape, Shape
from jpaged.models.config import ModelConfig
from jpaged.models.forward import bind
from jpaged.models.params import param_shapes, param_specs
from jpaged.models.served import served_config
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import Runner
from jpaged.runtime.vocabulary import Vocabulary
from tests.hlo import collectives, forbid_donation, pool_copies
from tests.tiny import config, engine

ROWS, BLOCKS, LAYERS = 8, 1021, 2
MODEL = config(num_heads=8, num_kv_heads=2, num_layers=LAYERS, vocab_size=3000, head_dim=16)
DECODE = DecodeShape(rows=ROWS, tables=1, blocks=16)


def make_runner(devices: int, model: ModelConfig = MODEL, replicas: int = 1) -> Runner:
    """Over shapes alone: it compiles and never runs. devices: that share the model."""
    grid = np.array(jax.devices()[: replicas * devices]).reshape(replicas, devices)
    mesh = Mesh(grid, ("data", "tp"))
    where = Placement(mesh=mesh, axis="tp", device=jax.devices()[0])
    served = served_config(model, devices)
    shapes = jax.tree.leaves(param_shapes(served), is_leaf=lambda node: isinstance(node, tuple))
    specs, treedef = jax.tree.flatten(param_specs(served, "tp", devices))
    form = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where.sharding(spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    settings = engine(num_blocks=BLOCKS).resolve(model)
    return Runner(model, settings, where, bind(served, treedef.unflatten(form)))


def hlo(runner: Runner, bucket: Shape = DECODE) -> str:
    return runner.compiled.lower(bucket).compile().as_text()


def whole_logits(text: str, devices: int) -> list[str]:
    """Arrays of rows times the vocabulary, or its padded size."""
    sizes = {MODEL.vocab_size, served_config(MODEL, devices).vocab_size}
    return [f"[{ROWS},{size}]" for size in sizes if f"[{ROWS},{size}]" in text]


@pytest.mark.parametrize("devices", [4, pytest.param(2, marks=pytest.mark.middle)])
def test_what_passes_between_devices(devices: int) -> None:
    """A layer's two sums and the embedding's; for the draw, the tile's logits and the token's; the
    maxima and sums of tiles.
    """
    runner = make_runner(devices)
    text = hlo(runner)
    always, sometimes = collectives(text)
    assert always == {"all-reduce": 2 * LAYERS + 1 + 2, "all-gather": 2}
    assert set(sometimes) <= {"all-reduce", "all-gather"}
    assert whole_logits(text, devices) == []
    assert pool_copies(text, math.prod(runner.pools[0].shape) // devices) == []


def test_nothing_passes_between_replicas() -> None:
    """Each has the sums and gathers of its own devices; with one device each, none at all."""
    runner = make_runner(2, replicas=2)
    text = hlo(runner)
    assert collectives(text)[0] == {"all-reduce": 2 * LAYERS + 1 + 2, "all-gather": 2}
    groups = set(re.findall(r"replica_groups=(.*?), [a-z]", text))
    assert groups == {"mesh['data'=2,'tp'=2] {'tp'}"}
    assert pool_copies(text, math.prod(runner.pools[0].shape) // 2) == []
    alone = make_runner(1, replicas=4)
    text = hlo(alone)
    assert collectives(text) == ({}, {})
    assert pool_copies(text, math.prod(alone.pools[0].shape)) == []


@pytest.mark.middle
@pytest.mark.parametrize("features", ["plain", "full"])
def test_nor_in_any_other_step(features: Any) -> None:
    """Of prefills, draws and decodes of several tokens; and copies of blocks."""
    wide: dict[str, Any] = {"tables": 1, "blocks": 16}
    steps = dataclasses.replace(DECODE, steps=4, sampler=features)
    prefill = PrefillShape(tokens=16, rows=ROWS, scores=features == "full", **wide)
    sample = SampleShape(rows=ROWS, sampler=features)
    alone, pairs = make_runner(1, replicas=2), make_runner(2, replicas=2)
    for bucket in (steps, prefill, sample):
        assert collectives(hlo(alone, bucket)) == ({}, {})
        groups = set(re.findall(r"replica_groups=(.*?), [a-z]", hlo(pairs, bucket)))
        assert groups == {"mesh['data'=2,'tp'=2] {'tp'}"}, bucket
    for move in (alone.compiled.copy_blocks(), alone.compiled.set_counts()):
        assert collectives(move.as_text()) == ({}, {})


def test_a_control_gathered_logits_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(self: Vocabulary, logits_SV: Any) -> Any:
        z_SV = lax.all_gather(logits_SV, self.axis, axis=1, tiled=True)
        first = self.first(logits_SV)
        return lax.dynamic_slice_in_dim(z_SV, first, logits_SV.shape[1], axis=1)

    monkeypatch.setattr(Vocabulary, "masked", gathered)
    text = hlo(make_runner(4))
    assert collectives(text)[0]["all-gather"] == 3
    assert whole_logits(text, 4) == [f"[{ROWS},{served_config(MODEL, 4).vocab_size}]"]


@pytest.mark.middle
def test_a_control_without_donation_the_share_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_donation(monkeypatch)
    runner = make_runner(2)
    assert pool_copies(hlo(runner), math.prod(runner.pools[0].shape) // 2) != []


@pytest.mark.middle
def test_weights_and_temporaries_of_a_device() -> None:
    """A share of everything that divides: less than half of what half as many devices hold of
    logits and counts.
    """
    full = DecodeShape(rows=ROWS, tables=1, blocks=16, sampler="full")
    found = {}
    for devices in (2, 8):
        memory = make_runner(devices).compiled.lower(full).compile().memory_analysis()
        found[devices] = (memory.argument_size_in_bytes, memory.temp_size_in_bytes)
    vocab = 4 * MODEL.vocab_size
    assert found[2][0] - found[8][0] > (2 * MODEL.hidden_size + 2 * ROWS) * vocab / 4
    assert found[8][1] < found[2][1]
