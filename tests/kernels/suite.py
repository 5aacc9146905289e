"""The tests that every implementation of paged attention inherits, and the checks that they make."""

import dataclasses
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import reference
from kernels_pallas.paged_attention.cases import DECODE, PREFILL, Case, Inputs, build

CASES = (*DECODE, *PREFILL)
F32_TOLERANCE = 1e-5


def call(implementation: Any, case: Case, inputs: Inputs, **options: Any) -> Any:
    """The case's entry point of an implementation (a module or any object with the two functions)."""
    name = "paged_attention_decode" if case.queries is None else "paged_attention"
    return getattr(implementation, name)(*inputs.args, **case.options, **options)


def check(implementation: Any, case: Case, values: Literal["random", "coded"] = "random") -> None:
    """Hold one call to the float64 reference: f32 to 1e-5, others to twice the reference's own error in that dtype."""
    inputs = build(case, values=values)
    exact = call(reference, case, inputs, exact=True)
    assert np.isfinite(exact).all()
    result = call(implementation, case, inputs)
    assert result.shape == exact.shape and result.dtype == inputs.q.dtype
    tolerance = F32_TOLERANCE
    if case.dtype != "float32":
        tolerance = 2 * _error(call(reference, case, inputs), exact)
        assert tolerance < 0.05
    assert _error(result, exact) <= tolerance  # false for NaN
    padding = inputs.context_lens == 0 if inputs.query_starts is None else slice(inputs.query_starts[-1], None)
    assert not np.asarray(result)[padding].any()


def _error(result: Any, exact: np.ndarray) -> float:
    return float(np.abs(np.asarray(result).astype(np.float64) - exact).max())


class PagedAttentionSuite:
    """Subclass with `implementation`, a module that has paged_attention and paged_attention_decode."""

    implementation: ModuleType

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_equals_the_reference(self, case: Case) -> None:
        check(self.implementation, case)

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_sees_each_position_once(self, case: Case) -> None:
        check(self.implementation, case, "coded")

    @pytest.mark.parametrize("case", [DECODE[0], PREFILL[0]], ids=str)
    def test_layer_may_be_traced(self, case: Case) -> None:
        inputs = build(case)
        arrays = [jnp.asarray(x) for x in inputs.args if isinstance(x, np.ndarray)]

        def run(layer: jax.Array, q: jax.Array, pool: jax.Array, *rest: jax.Array) -> jax.Array:
            traced = dataclasses.replace(inputs, q=q, pool=pool, layer=layer)  # pyright: ignore[reportArgumentType]
            return call(self.implementation, case, traced)

        q, pool, *rest = arrays
        result = jax.jit(run)(jnp.int32(case.layer), q, pool, *rest)
        assert np.array_equal(result, call(self.implementation, case, inputs))

    @pytest.mark.parametrize("case", [DECODE[0], PREFILL[0]], ids=str)
    def test_width_of_the_block_table_changes_nothing(self, case: Case) -> None:
        inputs = build(case)
        wide = dataclasses.replace(inputs, block_table=np.pad(inputs.block_table, ((0, 0), (0, 50))))
        assert np.array_equal(call(self.implementation, case, inputs), call(self.implementation, case, wide))
