"""Who multiplies is chosen when an engine starts, and never asked for while a step is traced."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged.engine.buckets import bucket_table
from jpaged.models.decoder import bind
from jpaged.runtime.mesh import Placement
from jpaged.runtime.products import choose_products
from jpaged.runtime.runner import Runner
from kernels_cpu import library, linear, paged_attention
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


@pytest.mark.parametrize("chosen", ["chosen", "native"])
def test_tracing_a_step_never_asks_for_the_library(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of every phase; with whatever this processor has, and as if it had the C++ one."""
    if chosen == "native":
        monkeypatch.setattr("jpaged.runtime.runner.choose_products", lambda *_: linear)
    settings = engine().resolve(CONFIG)
    params = jax.device_put(dict(make_params(0, CONFIG, jnp.bfloat16)), ONE_DEVICE.replicated)
    runner = Runner(CONFIG, settings, ONE_DEVICE, params)
    for module in (library, paged_attention):
        monkeypatch.setattr(module, "unavailable", asked)
    table = {bucket.phase: bucket for bucket in sorted(bucket_table(settings))}
    assert set(table) == {"prefill", "sample", "decode"}
    for bucket in table.values():
        lowered = runner.steps.lower(bucket).as_text()
        assert ("jpaged_linear" in lowered) == (runner.steps.setting.products is linear)


@pytest.mark.train
def test_training_never_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", asked)
    params = make_params(0, CONFIG, jnp.bfloat16)

    def loss(params: Any) -> jax.Array:
        model = bind(CONFIG, params)
        return jnp.sum(model.logits(model(jnp.asarray(make_prompts(6)))[0]))

    jax.jit(jax.grad(loss)).lower(params)
