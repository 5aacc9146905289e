"""Everything that an engine does, on one device and on meshes of 2, 4 and 8: equal results."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jpaged import LLM
from tests.features import PARAMS, SETTINGS, everything
from tests.tiny import assert_same


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    llm = LLM(PARAMS, **vars(SETTINGS))
    found = everything(llm)
    llm.close()
    return found


DEVICES = np.array(jax.devices())
MIDDLE, SLOW = pytest.mark.middle, pytest.mark.slow
MESHES = [  # and how many devices share the model
    pytest.param(Mesh(DEVICES[:2], ("tp",)), "auto", 2, id="tp 2", marks=SLOW),
    pytest.param(Mesh(DEVICES[:4], ("tp",)), "auto", 4, id="tp 4", marks=SLOW),
    pytest.param(
        Mesh(DEVICES.reshape(2, 4), ("x", "y")), ("x", "y"), 8, id="two axes", marks=MIDDLE
    ),
    pytest.param(Mesh(DEVICES.reshape(4, 2), ("fsdp", "tp")), "auto", 2, id="2 of 8", marks=SLOW),
]


@pytest.mark.parametrize(("mesh", "axis", "size"), MESHES)
def test_everything_is_as_on_one_device(
    mesh: Mesh, axis: Any, size: int, wanted: dict[str, Any]
) -> None:
    llm = LLM(PARAMS, mesh=mesh, **(vars(SETTINGS) | {"tensor_axis": axis}))
    found = everything(llm)
    assert found.keys() == wanted.keys()
    for name, outs in found.items():
        if name == "scores":
            for a, b in zip(outs, wanted[name], strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
            continue
        assert_same(outs, wanted[name])
        for a, b in zip(outs, wanted[name], strict=True):
            for x, y in zip(a.outputs, b.outputs, strict=True):
                np.testing.assert_allclose(x.token_logprobs, y.token_logprobs, atol=1e-5)
    assert llm.session.runner.placement.axis_size == size
    llm.close()
