"""Keys on the host equal jax.random's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.keys import fold_in, key_from_seed

words = st.integers(0, 2**32 - 1)


def data(key: jax.Array) -> tuple[int, int]:
    high, low = np.asarray(jax.random.key_data(key)).tolist()
    return high, low


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31 - 1, 2**31, 2**32 - 1])
def test_seeds_of_32_bits(seed: int):
    assert key_from_seed(seed) == data(jax.random.key(seed))


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**40 + 3, 2**63 - 1, -1, -5, -(2**63)])
def test_seeds_of_64_bits(seed: int):
    """What jax does where it has 64 bits; elsewhere it drops the upper ones."""
    with jax.enable_x64(True):
        assert key_from_seed(seed) == data(jax.random.key(seed))


@settings(max_examples=30)
@given(st.tuples(words, words), words)
def test_fold_in(key: tuple[int, int], value: int):
    wrapped = jax.random.wrap_key_data(jnp.array(key, jnp.uint32))
    assert fold_in(key, value) == data(jax.random.fold_in(wrapped, np.uint32(value)))


def test_fold_in_takes_the_low_32_bits():
    assert fold_in((1, 2), 2**32 + 5) == fold_in((1, 2), 5) and fold_in((1, 2), -1) == fold_in(
        (1, 2), 2**32 - 1
    )


def test_folds_are_distinct():
    keys = {
        fold_in(fold_in(key_from_seed(seed), i), j)
        for seed in range(4)
        for i in range(20)
        for j in range(20)
    }
    assert len(keys) == 4 * 20 * 20
