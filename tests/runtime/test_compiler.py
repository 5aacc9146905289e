"""Compile options: accepted by the installed jax, without effect on results, left out where they are unknown."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.runtime import compiler


def lowered():
    return jax.jit(lambda x: jnp.exp(x).sum(axis=0)).lower(jax.ShapeDtypeStruct((32, 100), jnp.float32))


def test_options_are_known_and_change_nothing(caplog):
    x = jax.random.normal(jax.random.key(0), (32, 100))
    compiled = compiler.compile_step(lowered(), "cpu")
    assert not caplog.records
    np.testing.assert_array_equal(compiled(x), lowered().compile()(x))


def test_other_platforms_have_none():
    assert compiler.compile_options("cuda") == compiler.compile_options("tpu") == {}
    compiler.compile_options("cpu").clear()
    assert compiler.compile_options("cpu")


def test_unknown_options_are_left_out(monkeypatch, caplog):
    monkeypatch.setitem(compiler.OPTIONS, "cpu", {"xla_cpu_no_such_option": 1})
    compiler.compile_step(lowered(), "cpu")
    assert "xla_cpu_no_such_option" in caplog.text
    monkeypatch.setitem(compiler.OPTIONS, "cpu", {"xla_cpu_prefer_vector_width": "wide"})
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError, TypeError)):
        compiler.compile_step(lowered(), "cpu")
