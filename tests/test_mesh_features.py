"""Everything that an engine does, on one device and on meshes of 2, 4 and 8: equal results; and
equal bits on one mesh, whatever else runs there.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jpaged import LLM
from jpaged.models.layers.linear import StepContext
from tests.features import (
    PARAMS,
    PROMPTS,
    SETTINGS,
    assert_as_on_one_device,
    everything,
    sampled,
    settings_of,
)


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    llm = LLM(PARAMS, **vars(SETTINGS))
    found = everything(llm)
    llm.close()
    return found


DEVICES = np.array(jax.devices())
MIDDLE, SLOW = pytest.mark.middle, pytest.mark.slow
PAIR = Mesh(DEVICES[:4].reshape(2, 2), ("data", "tp"))
MESHES = [  # and how many devices share the model
    pytest.param(Mesh(DEVICES[:2], ("data",)), "auto", 1, id="data 2", marks=MIDDLE),
    pytest.param(Mesh(DEVICES[:4], ("data",)), "auto", 1, id="data 4", marks=SLOW),
    pytest.param(PAIR, "auto", 2, id="data 2, tp 2", marks=MIDDLE),
    pytest.param(Mesh(DEVICES[:2], ("tp",)), "auto", 2, id="tp 2", marks=SLOW),
    pytest.param(Mesh(DEVICES[:4], ("tp",)), "auto", 4, id="tp 4", marks=SLOW),
    pytest.param(
        Mesh(DEVICES.reshape(2, 4), ("x", "y")), ("x", "y"), 8, id="two axes", marks=MIDDLE
    ),
    pytest.param(
        Mesh(DEVICES.reshape(4, 2), ("fsdp", "tp")), "auto", 2, id="data 4, tp 2", marks=SLOW
    ),
]


@pytest.mark.parametrize(("mesh", "axis", "size"), MESHES)
def test_everything_is_as_on_one_device(
    mesh: Mesh, axis: Any, size: int, wanted: dict[str, Any]
) -> None:
    settings = dataclasses.replace(settings_of(mesh.size // size), tensor_axis=axis)
    llm = LLM(PARAMS, mesh=mesh, **vars(settings))
    assert_as_on_one_device(everything(llm), wanted)
    where = llm.session.runner.placement
    assert (where.axis_size, where.replicas) == (size, mesh.size // size)
    llm.close()


VARIED: dict[str, dict[str, Any]] = {
    "chunks of 11": {"max_num_batched_tokens": 11},
    "2 rows": {"max_num_seqs": 2},
    "preempted": {"num_blocks": 20, "swap_space_gib": 0.01},
    "no prefix cache": {"enable_prefix_caching": False},
}


HOW = [sampled(temperature=t, seed=i, max_tokens=16) for i, t in enumerate((0, 1.0, 0.7, 0))]


def one_by_one(mesh: Mesh, **changed: Any) -> LLM:
    """An engine whose steps of any size depend on what its settings say alone."""
    settings = vars(dataclasses.replace(SETTINGS, deterministic=True, num_blocks=64))
    sizes = {"token_buckets": None, "seq_buckets": None, "max_num_batched_tokens": 64}
    return LLM(PARAMS, mesh=mesh, **(settings | sizes | changed))


def bits(llm: LLM, at: list[int]) -> dict[int, Any]:
    """By request, of these requests in this order."""
    outs = llm.generate([PROMPTS[i] for i in at], [HOW[i] for i in at], use_tqdm=False)
    made = [(out.outputs[0].token_ids, out.outputs[0].token_logprobs.tobytes()) for out in outs]
    return dict(zip(at, made, strict=True))


def are_alike_alone(llm: LLM, expected: dict[int, Any]) -> bool:
    """Each request among others, and by itself."""
    return all(bits(llm, [i]) == {i: expected[i]} for i in expected)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(DEVICES[:2], ("tp",)), id="tp 2", marks=MIDDLE),
        pytest.param(Mesh(DEVICES[:2], ("data",)), id="data 2", marks=SLOW),
        pytest.param(PAIR, id="data 2, tp 2", marks=MIDDLE),
        pytest.param(Mesh(DEVICES[:4], ("tp",)), id="tp 4", marks=SLOW),
    ],
)
def test_bits_on_one_mesh(mesh: Mesh) -> None:
    """With deterministic=True they depend on the request alone: not on what runs beside it, its
    place, its replica, chunks, preemption or hits.
    """
    llm = one_by_one(mesh)
    expected = bits(llm, [0, 1, 2, 3])
    assert bits(llm, [3, 2, 1, 0]) == expected, "another order, from the cache"
    assert are_alike_alone(llm, expected)
    llm.close()
    for name, changed in VARIED.items():
        other = one_by_one(mesh, **changed)
        assert bits(other, [2, 0, 3, 1]) == expected, name
        other.close()


@pytest.mark.slow
@pytest.mark.own_steps
@pytest.mark.parametrize("deterministic", [False, True])
def test_products_that_differ_with_the_number_of_rows(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the comparison fails without it, on a processor whose products sum in an order
    that the number of rows decides.
    """
    whole = StepContext.product

    def in_two_parts(self: StepContext, x: Any, weight_NE: Any, dtype: Any) -> Any:
        at = x.shape[0] % 13 + 1
        parts = (whole(self, x[..., s], weight_NE[:, s], dtype) for s in np.s_[:at, at:])
        return functools.reduce(operator.add, parts)

    monkeypatch.setattr(StepContext, "product", in_two_parts)
    llm = one_by_one(PAIR, deterministic=deterministic)
    assert are_alike_alone(llm, bits(llm, [0, 1, 2, 3])) == deterministic
    llm.close()
