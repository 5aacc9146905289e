"""Compile options: accepted by the installed jax, without effect on results, left out where they
are unknown.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.runtime import compiled_steps


def lowered():
    return jax.jit(lambda x: jnp.exp(x).sum(axis=0)).lower(
        jax.ShapeDtypeStruct((32, 100), jnp.float32)
    )


def test_options_are_known_and_change_nothing(caplog):
    x = jax.random.normal(jax.random.key(0), (32, 100))
    compiled = compiled_steps.compile_step(lowered(), "cpu")
    assert not caplog.records
    np.testing.assert_array_equal(compiled(x), lowered().compile()(x))


def test_other_platforms_have_none():
    """TPUs' is known to the compiler that tests/kernels/aot_tpu.py asks."""
    assert compiled_steps.compile_options("cuda") == {}
    compiled_steps.compile_options("cpu").clear()
    assert compiled_steps.compile_options("cpu")


def test_unknown_options_are_left_out(monkeypatch, caplog):
    monkeypatch.setitem(compiled_steps.OPTIONS, "cpu", {"xla_cpu_no_such_option": 1})
    compiled_steps.compile_step(lowered(), "cpu")
    assert "xla_cpu_no_such_option" in caplog.text
    monkeypatch.setitem(compiled_steps.OPTIONS, "cpu", {"xla_cpu_prefer_vector_width": "wide"})
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError, TypeError)):
        compiled_steps.compile_step(lowered(), "cpu")
