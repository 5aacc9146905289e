"""A vocabulary in shares over devices: the draws, logprobs, ranks and lists of the whole one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jpaged.models.served import VOCAB_TILE
from jpaged.runtime import sampler
from jpaged.runtime.device_state import set_counts
from jpaged.runtime.logprobs import PROCESSED, RAW, TEMPERED, token_logprobs
from jpaged.runtime.sampler import FullControls, Sampled, sample
from jpaged.runtime.vocabulary import Vocabulary
from tests.runtime.test_sampler import controls, full_controls

NEG_INF = float("-inf")
ROWS, WIDTH = 24, 6
SPLIT, WHOLE = PartitionSpec(None, "tp"), PartitionSpec()
MIDDLE = pytest.mark.middle
# Tokens and devices: shares that are padding alone, tiles that divide, a short last one, a single.
CASES = [(300, 8), *(pytest.param(*size, marks=MIDDLE) for size in ((1024, 4), (1500, 4), (97, 2)))]


def padded(a_SV: np.ndarray, devices: int, fill: float) -> jax.Array:
    """As served: columns up to whole tiles on each device."""
    columns = -a_SV.shape[1] % (VOCAB_TILE * devices)
    return jnp.asarray(np.pad(a_SV, ((0, 0), (0, columns)), constant_values=fill))


def shared(function: Any, devices: int, in_specs: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=WHOLE, check_vma=False)
    )


def settings(vocab: int) -> dict[str, Any]:
    """Of each row other controls; every kind of threshold, and ones that need the search."""
    rng = np.random.default_rng(vocab)
    pick = functools.partial(rng.choice, size=ROWS)
    return {
        "temperature": pick([0.0, 0.5, 1.0, 1.7]),
        "min_p": pick([0.0, 0.02]),
        "top_k": pick([0, 3, 70, vocab]),
        "top_p": pick([1.0, 0.9, 0.97]),
        "sample_index": pick([0, 1, 2]),
        "logprobs_mode": pick([RAW, TEMPERED, PROCESSED]),
    }


def logits(vocab: int) -> np.ndarray:
    rng = np.random.default_rng([vocab, 1])
    logits_SV = rng.normal(size=(ROWS, vocab)).astype(np.float32) * 2
    logits_SV[1] = np.round(logits_SV[1])  # ties, over the ends of shares too
    logits_SV[2] = 0.0
    logits_SV[3, vocab // 2 :] = NEG_INF
    return logits_SV


def agree(found: Sampled, wanted: Sampled) -> None:
    for name, value in vars(wanted).items():
        if value is None:
            assert getattr(found, name) is None
        elif value.dtype == jnp.int32:
            np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)
        else:
            np.testing.assert_allclose(getattr(found, name), value, atol=3e-6, err_msg=name)


@pytest.mark.parametrize(("vocab", "devices"), CASES)
def test_draws_are_those_of_one_device(vocab: int, devices: int) -> None:
    z_SV, given = logits(vocab), controls(ROWS, key=3, **settings(vocab))
    wanted = jax.jit(sample)(jnp.asarray(z_SV), given)
    drawn = functools.partial(sample, vocabulary=Vocabulary(axis="tp", size=vocab))
    found = shared(drawn, devices, (SPLIT, WHOLE))(padded(z_SV, devices, NEG_INF), given)
    agree(found, wanted)
    assert len(set(np.asarray(wanted.token_S).tolist())) > ROWS // 3, "they do vary"


@pytest.mark.parametrize(("vocab", "devices"), CASES)
def test_so_with_every_control(vocab: int, devices: int) -> None:
    """Penalties by counts, biases and bans in every share, ranks and top lists."""
    z_SV, given = logits(vocab), controls(ROWS, key=4, **settings(vocab))
    rng = np.random.default_rng(0)
    ids = rng.choice(vocab, 7, replace=False).tolist()
    counts = rng.integers(0, 6, vocab)
    full = full_controls(
        ROWS,
        vocab,
        slice(0, ROWS, 2),
        presence=0.3,
        frequency=0.2,
        repetition=1.3,
        bias=dict(zip(ids[:4], (3.0, -2.0, 5.0, 1.0), strict=True)),
        ban=ids[4:],
        counts=counts,
    )
    width = min(WIDTH, vocab)
    wanted = jax.jit(sample, static_argnames="max_logprobs")(
        jnp.asarray(z_SV), given, full, max_logprobs=width
    )
    specs: Any = dict.fromkeys(vars(full), WHOLE) | {"counts_SV": SPLIT}
    drawn = functools.partial(
        sample, max_logprobs=width, vocabulary=Vocabulary(axis="tp", size=vocab)
    )
    changed = vars(full) | {"counts_SV": padded(np.asarray(full.counts_SV), devices, 0)}
    found = shared(drawn, devices, (SPLIT, WHOLE, FullControls(**specs)))(
        padded(z_SV, devices, NEG_INF), given, FullControls(**changed)
    )
    agree(found, wanted)


@pytest.mark.parametrize(("vocab", "devices"), CASES[:2])
def test_scores_are_those_of_one_device(vocab: int, devices: int) -> None:
    rng = np.random.default_rng(vocab)
    x_TE = jnp.asarray(rng.normal(size=(ROWS, 16)).astype(np.float32))
    head_VE = rng.normal(size=(vocab, 16)).astype(np.float32)
    head_VE[200:204] = head_VE[100:104]  # equal tokens on two devices
    targets = rng.integers(0, vocab, ROWS).astype(np.int32)
    targets = np.maximum(targets, 2)
    targets[:2] = 101, 201
    rest = (jnp.asarray(targets), jnp.ones(ROWS, jnp.float32), jnp.zeros(ROWS, jnp.int32))

    def score(x_TE: Any, head_VE: Any, *rest: Any, vocabulary: Vocabulary) -> Any:
        return token_logprobs(
            lambda x: vocabulary.masked(x @ head_VE.T),
            x_TE,
            *rest,
            candidates_TX=rest[0][:, None] - jnp.arange(3)[None],
            with_entropy=True,
            max_logprobs=WIDTH,
            tile=8,
            vocabulary=vocabulary,
        )

    wanted = jax.jit(functools.partial(score, vocabulary=Vocabulary()))(x_TE, head_VE, *rest)
    of_share = functools.partial(score, vocabulary=Vocabulary(axis="tp", size=vocab))
    specs = (WHOLE, PartitionSpec("tp"), WHOLE, WHOLE, WHOLE)
    head = padded(head_VE.T, devices, 1.0).T  # a padding that would win, if it were seen
    found = shared(of_share, devices, specs)(x_TE, head, *rest)
    np.testing.assert_array_equal(found.rank_T, wanted.rank_T)
    np.testing.assert_array_equal(found.top_ids_TK, wanted.top_ids_TK)
    np.testing.assert_allclose(found.logprob_T, wanted.logprob_T, atol=3e-6)
    np.testing.assert_allclose(found.top_logprobs_TK, wanted.top_logprobs_TK, atol=3e-6)
    np.testing.assert_allclose(found.entropy_T, wanted.entropy_T, atol=3e-6)
    candidates = found.candidate_logprobs_TX, wanted.candidate_logprobs_TX
    np.testing.assert_allclose(*candidates, atol=3e-6)


def test_counts_lie_in_shares() -> None:
    vocab, devices = 300, 4
    tokens = np.array([1, 1, 299, 130, 299, 2**31 - 1, 300, 2**31 - 1], np.int32)
    counts = np.full((3, vocab), 9, np.int32)
    row, num_prompt, clear = (jnp.int32(value) for value in (1, 3, 1))
    args = (row, jnp.asarray(tokens), num_prompt, clear)
    wanted = set_counts(jnp.asarray(counts), *args)

    def enter(*args: Any) -> Any:
        vocabulary = Vocabulary(axis="tp", size=vocab)
        return vocabulary.gather(set_counts(*args, vocabulary=vocabulary))

    found = shared(enter, devices, (SPLIT, WHOLE, WHOLE, WHOLE, WHOLE))(
        padded(counts, devices, 0), *args
    )
    np.testing.assert_array_equal(found[:, :vocab], wanted)


def test_a_control_tiles_cut_in_two_draw_otherwise() -> None:
    """Why shares are of whole tiles: with ends anywhere, some draws differ."""
    vocab, devices = 1600, 4  # 400 tokens a device: three tiles and an eighth
    z_SV = np.random.default_rng(0).normal(size=(ROWS, vocab)).astype(np.float32)
    given = controls(ROWS, key=3)
    wanted = np.asarray(jax.jit(sample)(jnp.asarray(z_SV), given).token_S)
    drawn = functools.partial(sample, vocabulary=Vocabulary(axis="tp", size=vocab))
    found = shared(drawn, devices, (SPLIT, WHOLE))(jnp.asarray(z_SV), given).token_S
    assert np.mean(np.asarray(found) != wanted) > 0.2


def test_noise_from_any_place() -> None:
    rows = controls(4)
    whole = np.asarray(sampler.gumbels(rows, 40))
    for first, count in ((0, 5), (3, 8), (10, 7), (7, 1)):
        some = sampler.gumbels(rows, count, jnp.int32(first))
        np.testing.assert_array_equal(some, whole[:, first : first + count])
