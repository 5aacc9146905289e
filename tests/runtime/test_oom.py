"""Out of memory: a typed error that names bytes and settings, raised from the original."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jpaged import CapacityError, ConfigError
from jpaged.runtime import kv_cache
from jpaged.runtime.oom import explained
from tests.tiny import ENGINE

OOM = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 35184372088832 bytes.")
TPU_OOM = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 1.50G. That was not possible."
)


def test_running_out_of_memory_names_what_to_lower() -> None:
    config = dataclasses.replace(ENGINE, num_blocks=7)
    wanted = pytest.raises(ConfigError, match=r"pool of 99 bytes.*num_blocks=7 or memory_utilization=0.9")
    with wanted as caught, explained(config, pool_bytes=99):
        raise OOM
    assert caught.value.__cause__ is OOM
    knobs = r"lower num_blocks=7, memory_utilization=0.9, max_num_batched_tokens=16 or max_num_seqs=8"
    for error, size in ((OOM, "35184372088832 bytes"), (TPU_OOM, "1.50G"), (MemoryError(), "memory")):
        with pytest.raises(CapacityError, match=f"could not get {size}: {knobs}"), explained(config):
            raise error


def test_other_errors_pass() -> None:
    for error in (jax.errors.JaxRuntimeError("INTERNAL: no"), ValueError("RESOURCE_EXHAUSTED")):
        with pytest.raises(type(error)) as caught, explained(ENGINE):
            raise error
        assert caught.value is error


def test_a_real_allocation_that_fails() -> None:
    wanted = pytest.raises(ConfigError, match="KV pool of 70368744177664 bytes")
    with wanted, explained(ENGINE, pool_bytes=1 << 46):
        kv_cache.zeros((1 << 46,), jnp.int8, SingleDeviceSharding(jax.devices()[0]))
