"""Who multiplies is chosen when an engine starts, and never asked for while a step is traced."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged.models.decoder import bind
from jpaged.runtime.products import choose_products
from jpaged.runtime.runner import Placement, Runner
from kernels_cpu import library, linear, paged_attention
from tests.runtime.test_steps import BUCKETS
from tests.tiny import CONFIG, engine, make_params, make_prompts

ONE_DEVICE = Placement(mesh=None, axis=None, device=jax.devices()[0])


def asked() -> str | None:
    raise AssertionError("the library of C++ kernels was asked for")


def test_the_library_is_asked_for_bf16_on_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", lambda: None)
    assert choose_products(ONE_DEVICE.device, jnp.bfloat16) is linear
    monkeypatch.setattr(library, "unavailable", lambda: "no compiler")
    assert choose_products(ONE_DEVICE.device, jnp.bfloat16) is None
    monkeypatch.setattr(library, "unavailable", asked)
    assert choose_products(ONE_DEVICE.device, jnp.float32) is None


@pytest.mark.parametrize("name", ["prefill prompt", "sample", "decode"])
def test_tracing_a_step_never_asks_for_the_library(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(CONFIG, engine().resolve(CONFIG), ONE_DEVICE, jnp.bfloat16)
    runner.params = dict(make_params(0, CONFIG, jnp.bfloat16))
    for module in (library, paged_attention):
        monkeypatch.setattr(module, "unavailable", asked)
    forced: Any = linear
    for products in (runner.products, forced):
        runner.products = products
        lowered: Any = runner.lower(BUCKETS[name])
        assert lowered.as_text()


@pytest.mark.train
def test_training_never_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", asked)
    params = make_params(0, CONFIG, jnp.bfloat16)

    def loss(params: Any) -> jax.Array:
        model = bind(CONFIG, params)
        return jnp.sum(model.logits(model(jnp.asarray(make_prompts(6)))[0]))

    jax.jit(jax.grad(loss)).lower(params)
