"""The Mosaic GPU kernels without a GPU: the shared suite interpreted under race detection, lowered
for CUDA, compiled for sm_90a.
"""

import dataclasses
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
from kernels_pallas.paged_attention.interface import Options, Shapes
from kernels_pallas.paged_attention.mosaic_gpu import decode_kernel, prefill_kernel
from scripts._common import cannot_compile
from tests.kernels import aot_cuda
from tests.kernels.suite import PagedAttentionSuite, bounded, build, call, check, prepared

SECONDS = 120  # that a test may take: a deadlock in a kernel would otherwise never end
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

SUPPORTED = Shapes(dtype=jnp.bfloat16, head_dim=128, block_size=64, num_heads=16, num_kv_heads=8)

DECODE, PREFILL = (
    [case for case in GPU if (case.queries is None) == is_decode] for is_decode in (True, False)
)


def _without_races(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function interpreted; each call fails if a race was found in it."""

    def run(*args: Any, options: Options, **own: Any) -> Any:
        options = dataclasses.replace(options, interpret=INTERPRET)
        result = jax.block_until_ready(function(*args, options=options, **own))
        assert isinstance(result, Tracer) or not interpreter.get_races().races_found
        return result

    return run


INTERPRETED = SimpleNamespace(
    prepare=mosaic_gpu.prepare,
    prefill=_without_races(mosaic_gpu.prefill),
    decode=_without_races(mosaic_gpu.decode),
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


@pytest.mark.parametrize("group", [1, 2])
def test_tiles_cover_each_token_once(group: int) -> None:
    lens, contexts = np.array([1, 0, 64, 65, 0, 129, 200]), np.array([7, 9, 64, 100, 0, 129, 333])
    starts, tokens = np.concatenate([[0], np.cumsum(lens)]), int(lens.sum()) + 70
    table = np.asarray(
        mosaic_gpu.prepare(
            jnp.asarray(starts, jnp.int32),
            jnp.asarray(contexts, jnp.int32),
            num_tokens=tokens,
            shapes=dataclasses.replace(SUPPORTED, num_heads=group, num_kv_heads=1),
            sliding_window=None,
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
        def mutant(*args: Any, options: Options) -> Any:
            named = dict(zip(names, args, strict=True))
            named |= {name: change(named[name]) for name, change in changes.items()}
            return function(*named.values(), options=options)

        return mutant

    names = ("q", "pool", "layer", "table", "contexts")
    return SimpleNamespace(
        decode=wrap(INTERPRETED.decode, *names),
        prefill=wrap(INTERPRETED.prefill, *names, "query_start_loc"),
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
        check(SimpleNamespace(decode=zeros), SMALL_DECODE)


@pytest.mark.parametrize("change", ["a tile less", "causal mask off by one"])
def test_wrong_tiles_fail(change: str) -> None:
    inputs = build(SMALL_PREFILL)
    tiles = prepared(mosaic_gpu, SMALL_PREFILL, inputs)
    wrong = tiles.at[0, 2].set(0) if change == "a tile less" else tiles.at[:, 3].add(1)
    check(INTERPRETED, SMALL_PREFILL, prepared=tiles)
    with pytest.raises(AssertionError):
        check(INTERPRETED, SMALL_PREFILL, prepared=wrong)


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Replaces a function that the kernels use; nothing compiled with or without it is used on the
    other side.
    """
    functions = (mosaic_gpu.decode, mosaic_gpu.prefill)

    def replace(name: str, value: Any) -> None:
        users = [m for m in (decode_kernel, prefill_kernel) if hasattr(m, name)]
        assert users and all(callable(getattr(m, name)) for m in users)
        for module in users:
            monkeypatch.setattr(module, name, value)
        for function in functions:
            function.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]

    yield replace
    for function in functions:
        function.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_split_ignored_fails(mutate: Callable[[str, Any], None]) -> None:
    combine = decode_kernel.combine
    mutate("combine", lambda o, lse: combine(o[:, :-1], lse[:, :-1]))
    with pytest.raises(AssertionError):
        check(INTERPRETED, SMALL_DECODE, splits=2)


@pytest.mark.parametrize("case", [SMALL_DECODE, SMALL_PREFILL], ids=str)
def test_unseen_values_let_through_fail(case: Case, mutate: Callable[[str, Any], None]) -> None:
    mutate("zero_unseen", lambda *_: None)
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

    mutate("stream_tiles", stream)
    splits = {"splits": 1} if case.queries is None else {}
    how = {"interpret": INTERPRET}
    try:  # jax 0.11 only notes a race, later versions raise
        jax.block_until_ready(call(mosaic_gpu, case, build(case), how=how, **splits))
    except jax.errors.JaxRuntimeError as error:
        assert "RACE DETECTED" in str(error)
    else:
        assert interpreter.get_races().races_found


# Without interpretation.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "float32"),
        ({"head_dim": 80}, "head_dim 80"),
        ({"block_size": 20}, "block_size 20"),
        ({"block_size": 192}, "block_size 192"),
        ({"num_heads": 12}, "12 query heads"),
        ({"num_heads": 130, "num_kv_heads": 2}, "130 query heads"),
    ],
)
def test_unsupported_says_why(change: dict[str, Any], reason: str) -> None:
    shapes = dataclasses.replace(SUPPORTED, **change)
    assert reason in str(mosaic_gpu.unsupported(shapes, None))


@pytest.mark.parametrize("capability", ["8.0", "10.0"])
def test_other_cards_are_not_supported(capability: str) -> None:
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    reason = mosaic_gpu.unsupported(SUPPORTED, device)
    assert f"compute capability {capability}" in str(reason)


def test_supported() -> None:
    hopper = SimpleNamespace(platform="gpu", compute_capability="9.0")
    assert mosaic_gpu.unsupported(SUPPORTED, hopper) is None
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"dtype": jnp.float16},
        {"block_size": 256},
        {"num_heads": 56},
    )
    for change in changes:
        assert mosaic_gpu.unsupported(dataclasses.replace(SUPPORTED, **change), None) is None


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
