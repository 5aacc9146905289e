"""The Mosaic GPU kernels without a GPU: the shared suite interpreted under race detection, lowered
for CUDA, compiled for sm_90a.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import (
    interpret_pallas_call as interpreter,  # jax has no public name for it
)
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention import mosaic_gpu
from kernels_pallas.paged_attention.cases import GPU, Case
from scripts._common import cannot_compile
from tests.kernels import aot_cuda
from tests.kernels.suite import PagedAttentionSuite, bounded, build, call, check

SECONDS = 120  # that a test may take: a deadlock in a kernel would otherwise never end
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

DECODE, PREFILL = (
    [case for case in GPU if (case.queries is None) == is_decode] for is_decode in (True, False)
)


def _without_races(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function interpreted; each call fails if a race was found in it."""

    def run(*args: Any, **options: Any) -> Any:
        result = jax.block_until_ready(function(*args, interpret=INTERPRET, **options))
        assert isinstance(result, Tracer) or not interpreter.get_races().races_found
        return result

    return run


INTERPRETED = SimpleNamespace(
    paged_attention_decode=_without_races(mosaic_gpu.paged_attention_decode),
    paged_attention=_without_races(mosaic_gpu.paged_attention),
)


@pytest.fixture(autouse=True)
def _watched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the process if a test takes too long, and leaves the interpreter as it was."""
    with bounded(request, SECONDS):
        yield
        interpreter.reset_gpu_interpret_mode_state()


class TestMosaicGpu(PagedAttentionSuite):
    implementation = INTERPRETED
    cases = GPU
    plain_cases = (DECODE[3], PREFILL[5])
    plain_splits = 1  # how many there are otherwise follows from the table's width


@pytest.mark.parametrize(
    "splits",
    [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)],
)
def test_any_number_of_splits(splits: int) -> None:
    """With five, some have no tiles."""
    check(INTERPRETED, DECODE[0], splits=splits)


@pytest.mark.parametrize(
    "group", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 5, 6, 8, 16, 64)]
)
def test_decode_group_sizes(group: int) -> None:
    check(
        INTERPRETED, Case(name="group", contexts=(70, 5), H=2 * group, P=16, D=64, dtype="bfloat16")
    )


@pytest.mark.parametrize(
    "group", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 8)]
)
def test_prefill_group_sizes(group: int) -> None:
    check(
        INTERPRETED,
        Case(
            name="group", contexts=(70,), queries=(66,), H=2 * group, P=16, D=64, dtype="bfloat16"
        ),
    )


def test_tiles_may_come_from_outside() -> None:
    case = PREFILL[5]
    inputs = build(case)
    starts, contexts = jnp.asarray(inputs.query_starts), jnp.asarray(inputs.context_lens)
    tiles = mosaic_gpu.prefill_tiles(
        starts, contexts, num_tokens=len(inputs.q), num_heads=case.H, num_kv_heads=case.K
    )
    check(INTERPRETED, case, tiles=tiles)


@pytest.mark.parametrize("group", [1, 2])
def test_tiles_cover_each_token_once(group: int) -> None:
    lens, contexts = np.array([1, 0, 64, 65, 0, 129, 200]), np.array([7, 9, 64, 100, 0, 129, 333])
    starts, tokens = np.concatenate([[0], np.cumsum(lens)]), int(lens.sum()) + 70
    table = np.asarray(
        mosaic_gpu.prefill_tiles(
            jnp.asarray(starts, jnp.int32),
            jnp.asarray(contexts, jnp.int32),
            num_tokens=tokens,
            num_heads=group,
            num_kv_heads=1,
        )
    )
    seen = []
    for row, token, queries, position, context in table:
        assert 0 <= queries <= (128 if group == 1 else 64)
        seen += range(token, token + queries)
        if queries and row < len(lens):
            assert starts[row] <= token and token + queries <= starts[row + 1]
            assert context == contexts[row] and position == contexts[row] - starts[row + 1] + token
        elif queries:
            assert token >= starts[-1] and context == 0
    assert sorted(seen) == list(range(tokens))


# Mutations: each has to fail, or the checks above prove nothing.

SMALL_DECODE = Case(name="decode", contexts=(150, 40), H=2, K=1, P=16, D=64, dtype="bfloat16")
SMALL_PREFILL = Case(
    name="prefill", contexts=(150,), queries=(40,), H=2, K=1, P=16, D=64, dtype="bfloat16"
)


def _changed(**changes: Callable[[Any], Any]) -> Any:
    """The implementation called with other arguments, by their names."""

    def wrap(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
        def mutant(*args: Any, **options: Any) -> Any:
            named = dict(zip(names, args, strict=True))
            named |= {name: change(named[name]) for name, change in changes.items()}
            return function(*named.values(), **options)

        return mutant

    names = ("q", "pool", "layer", "table", "contexts")
    return SimpleNamespace(
        paged_attention_decode=wrap(INTERPRETED.paged_attention_decode, *names),
        paged_attention=wrap(INTERPRETED.paged_attention, *names, "starts"),
    )


def _swap_keys_and_values(pool: np.ndarray) -> np.ndarray:
    return pool.reshape(*pool.shape[:2], -1, 2, pool.shape[3])[:, :, :, ::-1].reshape(pool.shape)


def _drop_a_block(table: np.ndarray) -> np.ndarray:
    return np.concatenate([table[:, :1], table[:, :1], table[:, 2:]], axis=1)


@pytest.mark.parametrize("case", [SMALL_DECODE, SMALL_PREFILL], ids=str)
def test_nothing_changed_passes(case: Case) -> None:
    check(INTERPRETED, case)


@pytest.mark.parametrize("case", [SMALL_DECODE, SMALL_PREFILL], ids=str)
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(_changed(pool=_swap_keys_and_values), id="keys and values swapped"),
        pytest.param(_changed(table=_drop_a_block), id="a page dropped"),
        pytest.param(_changed(contexts=lambda x: x - 1), id="the last token unseen"),
        pytest.param(_changed(contexts=lambda x: x + 1), id="a token too many"),
        pytest.param(_changed(layer=lambda x: x - 1), id="another layer"),
    ],
)
def test_wrong_arguments_fail(case: Case, mutant: Any) -> None:
    with pytest.raises(AssertionError):
        check(mutant, case, "coded" if case.queries is None else "random")


def test_zeros_fail() -> None:
    def zeros(q: np.ndarray, *_: Any, **__: Any) -> np.ndarray:
        return 0 * q

    with pytest.raises(AssertionError):
        check(SimpleNamespace(paged_attention_decode=zeros), SMALL_DECODE)


@pytest.mark.parametrize("change", ["a tile less", "causal mask off by one"])
def test_wrong_tiles_fail(change: str) -> None:
    inputs = build(SMALL_PREFILL)
    starts, contexts = jnp.asarray(inputs.query_starts), jnp.asarray(inputs.context_lens)
    tiles = mosaic_gpu.prefill_tiles(
        starts, contexts, num_tokens=len(inputs.q), num_heads=2, num_kv_heads=1
    )
    wrong = tiles.at[0, 2].set(0) if change == "a tile less" else tiles.at[:, 3].add(1)
    check(INTERPRETED, SMALL_PREFILL, tiles=tiles)
    with pytest.raises(AssertionError):
        check(INTERPRETED, SMALL_PREFILL, tiles=wrong)


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Replaces a function of the module; nothing compiled with or without it is used on the other
    side.
    """
    functions = (mosaic_gpu.paged_attention_decode, mosaic_gpu.paged_attention)

    def replace(name: str, value: Any) -> None:
        assert callable(getattr(mosaic_gpu, name))
        monkeypatch.setattr(mosaic_gpu, name, value)
        for function in functions:
            function.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]

    yield replace
    for function in functions:
        function.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_split_ignored_fails(mutate: Callable[[str, Any], None]) -> None:
    combine = mosaic_gpu.combine
    mutate("combine", lambda o, lse: combine(o[:, :-1], lse[:, :-1]))
    with pytest.raises(AssertionError):
        check(INTERPRETED, SMALL_DECODE, splits=2)


@pytest.mark.parametrize("case", [SMALL_DECODE, SMALL_PREFILL], ids=str)
def test_unseen_values_let_through_fail(case: Case, mutate: Callable[[str, Any], None]) -> None:
    mutate("_zero_unseen", lambda *_: None)
    with pytest.raises(AssertionError):
        check(INTERPRETED, case)


@pytest.mark.parametrize("case", [SMALL_DECODE, SMALL_PREFILL], ids=str)
def test_a_stage_refilled_too_early_is_a_race(
    case: Case, mutate: Callable[[str, Any], None]
) -> None:
    """The ring with the wait for a free stage after the copies into it."""

    def stream(pool_ref, base, table_ref, context, head, first, count, kv_sm, full, empty):
        (_, C, _), P = kv_sm.shape, pool_ref.shape[1]

        @pl.loop(0, count)
        def _(i):
            for j in range(0, C, P):
                src = pool_ref.at[
                    base + table_ref[jnp.minimum(((first + i) * C + j) // P, context // P)], :, head
                ]
                plgpu.copy_gmem_to_smem(src, kv_sm.at[0, pl.ds(j, P)], full.at[i])

        @pl.loop(0, count)
        def _(i):
            plgpu.barrier_wait(empty.at[i])

    mutate("_stream", stream)
    options = {"splits": 1} if case.queries is None else {}
    try:  # jax 0.11 only notes a race, later versions raise
        jax.block_until_ready(call(mosaic_gpu, case, build(case), interpret=INTERPRET, **options))
    except jax.errors.JaxRuntimeError as error:
        assert "RACE DETECTED" in str(error)
    else:
        assert interpreter.get_races().races_found


# Without interpretation.

SUPPORTED: dict[str, Any] = {
    "dtype": jnp.bfloat16,
    "head_dim": 128,
    "block_size": 64,
    "num_heads": 16,
    "num_kv_heads": 8,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "float32"),
        ({"head_dim": 80}, "head_dim 80"),
        ({"block_size": 20}, "block_size 20"),
        ({"block_size": 192}, "block_size 192"),
        ({"num_heads": 12}, "12 query heads"),
        ({"num_heads": 130, "num_kv_heads": 2}, "130 query heads"),
        ({"compute_capability": "8.0"}, "compute capability 8.0"),
        ({"compute_capability": "10.0"}, "compute capability 10.0"),
    ],
)
def test_unsupported_says_why(change: dict[str, Any], reason: str) -> None:
    arguments: dict[str, Any] = SUPPORTED | change
    assert reason in str(mosaic_gpu.unsupported(**arguments))


def test_supported() -> None:
    for change in (
        {},
        {"compute_capability": "9.0"},
        {"dtype": jnp.float16},
        {"block_size": 256},
        {"num_heads": 56},
    ):
        arguments: dict[str, Any] = SUPPORTED | change
        assert mosaic_gpu.unsupported(**arguments) is None


@pytest.mark.parametrize("queries", [None, (9,)])
def test_unsupported_raises(queries: tuple[int, ...] | None) -> None:
    case = Case(name="f32", contexts=(9,), queries=queries)
    with pytest.raises(NotImplementedError, match="float32"):
        call(mosaic_gpu, case, build(case))


@pytest.mark.parametrize("name", aot_cuda.KERNELS)
def test_lowers_for_cuda(name: str) -> None:
    assert "mosaic_gpu" in aot_cuda.lower(*aot_cuda.kernel(name))


@pytest.mark.slow
@pytest.mark.skipif(cannot_compile("cuda") is not None, reason=str(cannot_compile("cuda")))
def test_compiles_for_sm_90a_without_spills(tmp_path: Path) -> None:
    """In a process of its own: the folder that the compiler reports to has to be known before jax
    is imported.
    """
    environment = os.environ | {
        "MOSAIC_GPU_DUMP_TO": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
    }
    command = [sys.executable, "-m", "tests.kernels.aot_cuda"]
    root = Path(__file__).parents[2]
    child = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=SECONDS
    )
    assert child.returncode == 0, child.stderr[-3000:]
    results = [json.loads(line) for line in child.stdout.splitlines()]
    assert {r["name"] for r in results} == set(aot_cuda.KERNELS)
    # A window and a soft cap together take more registers than there are: some 20 of a thread go to
    # memory and back.
    assert all(r["spills"] <= (256 if r["name"].endswith("window_cap") else 0) for r in results), (
        results
    )
