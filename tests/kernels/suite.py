"""The tests that every implementation of paged attention inherits, the checks that they make, and a
case's inputs.
"""

import contextlib
import dataclasses
import faulthandler
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from kernels_pallas.paged_attention import reference
from kernels_pallas.paged_attention.pool_layout import ScaledPool, plain_pool_layout, scaled
from scripts._attention_cases import DECODE, PREFILL, Case

CASES = (*DECODE, *PREFILL)
F32_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of one call, in numpy; query_start_loc is None for decode, sinks and ends where a
    case has none.
    """

    q: np.ndarray
    pool: Any  # of an array, or a ScaledPool of two
    layer: int
    block_table: np.ndarray
    context_lens: np.ndarray
    query_start_loc: np.ndarray | None
    sinks: np.ndarray | None = None
    ends: np.ndarray | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the call."""
        args = (self.q, self.pool, self.layer, self.block_table, self.context_lens)
        return args if self.query_start_loc is None else (*args, self.query_start_loc)


def build(
    case: Case, *, values: Literal["random", "coded"] = "random", poison: bool = True, seed: int = 0
) -> Inputs:
    """Inputs of a case: block ids permuted, block 0 used by nobody, NaN (if `poison`) in every slot
    that no query sees.

    values: "random" is standard normal. "coded" has q = 0, so that a query weighs all that it sees
    equally, and for the token at position t the value vector that is one at t % V and zero
    elsewhere: what comes out is a histogram of the positions seen, in which a single dropped,
    doubled or added token shows.
    """
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    P, K, D = case.P, case.K, case.D
    V = case.options.attention.value_width(D)
    blocks = [-(-n // P) for n in case.contexts]
    N = sum(blocks) + 2
    ids = rng.permutation(np.arange(1, N))
    table = np.zeros((len(blocks), max(1, *blocks) + case.extra_blocks), np.int32)
    token = plain_pool_layout(K, *case.vectors)
    E, of_value = case.options.attention.places(D)
    shape = (case.num_layers * N, P, token.rows, token.width)
    pool = np.full(shape, np.nan if poison else 0.0, np.float32)
    for row, (context, queries, used) in enumerate(
        zip(case.contexts, case.query_lens, blocks, strict=True)
    ):
        table[row, :used], ids = ids[:used], ids[used:]
        first = (
            0
            if case.sliding_window is None
            else max(0, context - queries + 1 - case.sliding_window)
        )
        seen = np.arange(first if queries else context, context)
        new = rng.standard_normal((len(seen), K, E), np.float32)
        if values == "coded":
            new[..., of_value] = (np.arange(V) == seen[:, None] % V)[:, None]
        new = new.reshape(len(seen), token.rows, token.width)
        pool[case.layer * N + table[row, seen // P], seen % P] = new
    starts, tokens = None, len(case.contexts)
    if case.queries is not None:
        starts = np.concatenate([[0], np.cumsum(case.queries)]).astype(np.int32)
        tokens = int(starts[-1]) + case.extra_tokens
    q = rng.standard_normal((tokens, case.H, D), np.float32)
    q = (q if values == "random" else 0 * q).astype(dtype)
    contexts = np.asarray(case.contexts, np.int32)
    # Some take almost all, some nothing.
    sinks = np.linspace(-6, 8, case.H).astype(np.float32) if case.sinks else None
    kv: Any = pool.astype(dtype)
    if case.kv_dtype is not None:
        kv = in_8_bits(pool, case.kv_dtype, token.key_width)
    ends = ends_of(case, starts, tokens) if case.images and starts is not None else None
    return Inputs(q, kv, case.layer, table, contexts, starts, sinks, ends)


def ends_of(case: Case, starts: np.ndarray, tokens: int) -> np.ndarray:
    """The position after its image of each packed query that is of one."""
    ends = np.zeros(tokens, np.int32)
    for row, start, end in case.images:
        before = int(starts[row + 1]) - case.contexts[row]  # of position 0 among the packed tokens
        assert before + start >= starts[row], "an image is computed whole"
        ends[before + start : before + end] = end
    return ends


def in_8_bits(pool: np.ndarray, kv_dtype: str, key_width: int | None = None) -> ScaledPool:
    """The pool with scales; where it is NaN so are they, and the values are as large as can be (or
    NaN too).
    """
    made = scaled(jnp.asarray(np.nan_to_num(pool)), kv_dtype, key_width=key_width)
    poisoned, values, scales = np.isnan(pool), np.array(made.values), np.array(made.scales)
    of_scales = poisoned.any(axis=-1).repeat(scales.shape[-1] // values.shape[2], axis=-1)
    values[poisoned], scales[of_scales] = 127 if kv_dtype == "int8" else np.nan, np.nan
    return ScaledPool(values, scales, key_width=key_width)


def call(
    implementation: Any,
    case: Case,
    inputs: Inputs,
    *,
    how: dict[str, Any] | None = None,
    **own: Any,
) -> Any:
    """The case's entry point of an implementation (a module or any object with the two functions),
    over a pool in 8 bits as its pool_layout has it.

    how: fields of its Options beside the case's. own: arguments that this implementation alone
    takes.
    """
    options = dataclasses.replace(case.options, **(how or {}))
    function = implementation.decode if case.queries is None else implementation.prefill
    if isinstance(inputs.pool, ScaledPool) and hasattr(implementation, "pool_layout"):
        layout = implementation.pool_layout(case.K, *case.vectors)
        if layout.slots_last and not inputs.pool.slots_last:
            inputs = dataclasses.replace(inputs, pool=layout.pack_scaled(inputs.pool))
    own |= {} if inputs.sinks is None else {"sinks_H": inputs.sinks}
    own |= {} if inputs.ends is None else {"ends_T": inputs.ends}
    return function(*inputs.args, options=options, **own)


def prepared(implementation: Any, case: Case, inputs: Inputs) -> Any:
    """What an implementation prepares once a step for a case's prefill."""
    assert inputs.query_start_loc is not None
    ends = {} if inputs.ends is None else {"ends_T": jnp.asarray(inputs.ends)}
    return implementation.prepare(
        jnp.asarray(inputs.query_start_loc),
        jnp.asarray(inputs.context_lens),
        num_tokens=len(inputs.q),
        shapes=case.shapes,
        window=case.sliding_window,
        **ends,
    )


def check(
    implementation: Any, case: Case, values: Literal["random", "coded"] = "random", **own: Any
) -> None:
    """Hold one call to the float64 reference: f32 to 1e-5, others to twice the reference's own
    error in that dtype.
    """
    inputs = build(case, values=values)
    exact = call(reference, case, inputs, exact=True)
    assert np.isfinite(exact).all()
    result = call(implementation, case, inputs, **own)
    assert result.shape == exact.shape and result.dtype == inputs.q.dtype
    tolerance = F32_TOLERANCE
    if case.dtype != "float32":
        tolerance = 2 * _error(call(reference, case, inputs), exact)
        assert tolerance < 0.05
    assert _error(result, exact) <= tolerance  # false for NaN
    padding = (
        inputs.context_lens == 0
        if inputs.query_start_loc is None
        else slice(inputs.query_start_loc[-1], None)
    )
    assert not np.asarray(result)[padding].any()


def check_bits_in_any_batch(implementation: Any, **shape: Any) -> None:
    """Whole, in chunks, alone or among others (at one padded shape): what deterministic serving
    will rest on.
    """
    T, S, contexts = 160, 4, (120, 90)
    case = Case(name="batches", contexts=contexts, queries=contexts, P=16, **shape)
    inputs = build(case, poison=False)
    first = (0, 120)  # each row's first packed token in `inputs`

    def run(*rows: tuple[int, int, int]) -> dict[tuple[int, int], np.ndarray]:
        """rows: (row, context, queries). Results by (row, position)."""
        asked = [
            (row, p) for row, context, queries in rows for p in range(context - queries, context)
        ]
        q = np.zeros((T, case.H, case.D), inputs.q.dtype)
        q[: len(asked)] = [inputs.q[first[row] + p] for row, p in asked]
        batch = dataclasses.replace(
            inputs,
            q=q,
            block_table=np.stack(
                [inputs.block_table[rows[i][0] if i < len(rows) else 0] for i in range(S)]
            ),
            context_lens=np.array(
                [context for _, context, _ in rows] + [0] * (S - len(rows)), np.int32
            ),
            query_start_loc=np.cumsum([0, *(n for *_, n in rows), *[0] * (S - len(rows))]).astype(
                np.int32
            ),
        )
        return dict(zip(asked, np.asarray(call(implementation, case, batch)), strict=False))

    whole = run((0, 120, 120))
    for other in (
        run((1, 90, 90), (0, 120, 37)),
        run((0, 120, 1), (1, 60, 3)),
        run((0, 70, 70), (1, 90, 5)),
    ):
        shared = whole.keys() & other.keys()
        assert shared and all(np.array_equal(whole[k], other[k]) for k in shared)


def _error(result: Any, exact: np.ndarray) -> float:
    return float(np.abs(np.asarray(result).astype(np.float64) - exact).max())


@contextlib.contextmanager
def bounded(request: pytest.FixtureRequest, seconds: float) -> Iterator[None]:
    """Ends the process after so many seconds: nothing else ends an interpreted kernel that waits
    for ever.
    """
    stderr = request.config.stash.get(fault_handler_stderr_fd_key, 2)  # past pytest's capture
    faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    try:
        yield
    finally:  # else it ends whatever test runs by then
        faulthandler.cancel_dump_traceback_later()


class PagedAttentionSuite:
    """Subclass with `implementation` (anything that has the two functions), and with what else
    differs.

    cases: held to the reference. coded_cases: again, with values that tell positions apart.
    plain_cases: a decode and a prefill, for what depends on no shape. plain_splits: of that
    decode's context, where their number has to be fixed.
    """

    implementation: Any
    cases: ClassVar[Sequence[Any]] = CASES
    coded_cases: ClassVar[Sequence[Any] | None] = None  # the same
    plain_cases: ClassVar[Sequence[Any]] = (DECODE[0], PREFILL[0])
    plain_splits: int | None = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        coded = self.cases if self.coded_cases is None else self.coded_cases
        for name, cases in (
            ("case", self.cases),
            ("coded_case", coded),
            ("plain_case", self.plain_cases),
        ):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, cases, ids=str)

    def test_equals_the_reference(self, case: Case) -> None:
        check(self.implementation, case)

    def test_sees_each_position_once(self, coded_case: Case) -> None:
        check(self.implementation, coded_case, "coded")

    def test_layer_may_be_traced_and_the_table_wide(self, plain_case: Case) -> None:
        inputs = build(plain_case)
        options: dict[str, Any] = (
            {"splits": self.plain_splits}
            if plain_case.queries is None and self.plain_splits
            else {}
        )

        def run(
            layer: jax.Array, q: jax.Array, pool: jax.Array, table: jax.Array, *rest: jax.Array
        ) -> jax.Array:
            names = ("context_lens", "query_start_loc")
            traced: Any = {"q": q, "pool": pool, "layer": layer, "block_table": table}
            traced |= dict(zip(names, rest, strict=False))
            return call(
                self.implementation, plain_case, dataclasses.replace(inputs, **traced), **options
            )

        wide = dataclasses.replace(
            inputs, block_table=np.pad(inputs.block_table, ((0, 0), (0, 50)))
        )
        arrays = [jax.tree.map(jnp.asarray, x) for x in wide.args if not isinstance(x, int)]
        result = jax.jit(run)(jnp.int32(plain_case.layer), *arrays)
        assert np.array_equal(result, call(self.implementation, plain_case, inputs, **options))

    def test_what_is_prepared_serves_every_layer(self, plain_case: Case) -> None:
        """Bit for bit as when each call prepares for itself."""
        if plain_case.queries is None:
            return
        inputs = build(plain_case)
        ready = prepared(self.implementation, plain_case, inputs)
        result = call(self.implementation, plain_case, inputs, prepared=ready)
        assert np.array_equal(result, call(self.implementation, plain_case, inputs))
