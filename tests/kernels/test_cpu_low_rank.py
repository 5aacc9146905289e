"""What adapters add, by the C++ kernel of the CPU, against float64."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_cpu import library, low_rank

pytestmark = pytest.mark.skipif(
    library.unavailable() is not None, reason=f"the CPU kernels: {library.unavailable()}"
)

run = jax.jit(low_rank.add, static_argnames="leads")


class Case(NamedTuple):
    """Arguments of low_rank.add, before `count`."""

    y: Any
    x: Any
    a: Any
    b: Any
    slot: Any


def make(T: int, E: int, widths: tuple[int, ...], slots: int, rank: int) -> Case:
    """Slots drawn of all and of none."""
    rng = np.random.default_rng(T + E + rank)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    return Case(
        y=normal(T, sum(widths), dtype=jnp.float32),
        x=normal(T, E),
        a=normal(len(widths), slots, rank, E),
        b=tuple(normal(slots, rank, width) for width in widths),
        slot=jnp.asarray(rng.integers(0, slots + 1, T), jnp.int32),
    )


def exact(case: Case, leads: int = 1) -> np.ndarray:
    y, x, a = (np.asarray(each, np.float64) for each in case[:3])
    y = y.copy()
    for t, slot in enumerate(np.asarray(case.slot)):
        if slot < a.shape[1]:
            each = [x[t] @ a[i, slot].T @ np.asarray(b[slot], float) for i, b in enumerate(case.b)]
            y[t] += np.concatenate([z.reshape(leads, -1) for z in each], axis=1).reshape(-1)
    return y


# Tokens, features, outputs of the parts, slots, rank: one of everything; tails of a tile in
# tokens and outputs; three parts; more outputs than an item has, and more tokens.
CASES = [
    (1, 32, (16,), 1, 8),
    (7, 96, (33,), 2, 16),
    (65, 64, (64, 32, 32), 5, 8),
    (18, 64, (2100, 40), 3, 24),
    (600, 32, (48,), 2, 64),
]


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_it_is_the_sum_of_each_tokens_own(sizes: Any) -> None:
    case = make(*sizes)
    wanted = exact(case)
    found = run(*case, sizes[0])
    assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("leads", [2, 8])
def test_pieces_of_parts_lie_between_each_other(leads: int) -> None:
    """As those of q, k and v do, a key head after another; and more of them than an item has."""
    case = make(21, 64, (2400, 8 * 17, 16), 3, 8)
    wanted = exact(case, leads)
    found = run(*case, 21, leads=leads)
    assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max()


def test_x_may_be_between_the_two() -> None:
    """For the embedding, whose first product is a gather."""
    case = make(40, 64, (50, 34), 3, 8)
    own = np.minimum(np.asarray(case.slot), 2)
    between = jnp.einsum("te,tpre->tpr", case.x, jnp.moveaxis(case.a[:, own], 0, 1))
    none = case.a[..., :0]
    rounded = between.astype(jnp.bfloat16)
    found = run(case.y, rounded.reshape(40, -1), none, case.b, case.slot, 40)
    parts = [jnp.einsum("tr,trn->tn", rounded[:, i], b[own]) for i, b in enumerate(case.b)]
    added = jnp.concatenate(parts, axis=1).astype(jnp.float32)
    wanted = case.y + jnp.where(case.slot[:, None] < 3, added, 0)
    assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()


def test_what_no_token_has_is_not_read_nor_written() -> None:
    """Slots of others hold NaN; rows without an adapter and padding keep their bits."""
    case = make(30, 64, (40, 24), 6, 8)
    slot = np.asarray(case.slot)
    slot = np.where(np.isin(slot, (1, 4)), slot, 6).astype(np.int32)
    assert set(slot) == {1, 4, 6}
    is_read = jnp.isin(jnp.arange(6), jnp.asarray([1, 4]))
    a = jnp.where(is_read[None, :, None, None], case.a, jnp.nan)
    b = tuple(jnp.where(is_read[:, None, None], each, jnp.nan) for each in case.b)
    found = np.asarray(run(case.y, case.x, a, b, slot, 25))
    whole = np.asarray(run(case.y, case.x, case.a, case.b, slot, 30))
    np.testing.assert_array_equal(found[:25], whole[:25])
    kept = (slot == 6) | (np.arange(30) >= 25)
    np.testing.assert_array_equal(found[kept], np.asarray(case.y)[kept])
    assert (found[~kept] != np.asarray(case.y)[~kept]).any(axis=1).all()


@pytest.mark.parametrize("rank", [8, 40])
def test_a_rows_bits_do_not_depend_on_the_others(rank: int) -> None:
    """In a batch of one, of some and of all, with other rows in its slot and without."""
    case = make(560, 64, (72, 19), 2, rank)
    whole = np.asarray(run(*case, 560))
    for rows in (slice(0, 1), slice(5, 8), slice(300, 387)):
        part = run(case.y[rows], case.x[rows], case.a, case.b, case.slot[rows], 560)
        np.testing.assert_array_equal(part, whole[rows])
    alone = jnp.where(jnp.arange(560) == 77, case.slot, 2)
    np.testing.assert_array_equal(run(*case._replace(slot=alone), 560)[77], whole[77])


@pytest.mark.parametrize(
    ("width", "dtype", "can"), [(64, "bfloat16", 1), (48, "bfloat16", 0), (64, "float32", 0)]
)
def test_what_is_supported(width: int, dtype: str, can: bool) -> None:
    x, a = jnp.zeros((3, width), dtype), jnp.zeros((1, 2, 8, width), dtype)
    assert low_rank.supported(x, a) == can
    assert low_rank.supported(x, a[..., :0]) == (dtype == "bfloat16")
