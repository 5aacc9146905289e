"""Batch: a plan laid out in its bucket and taken apart again."""

import dataclasses
import math
from array import array
from collections import Counter
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.config import EngineConfig
from jpaged.engine.layout import CONTROLS, input_sections
from jpaged.engine.packing import ON_DEVICE, PAD_TOKEN, Batch, pack
from jpaged.engine.plan import Plan, PlanEntry
from jpaged.engine.sequence import Sequence
from jpaged.engine.shapes import (
    DecodeShape,
    PrefillShape,
    SampleShape,
    Shape,
    choose_shapes,
    shape_table,
)
from jpaged.sampling_params import LOGPROBS_MODES, SamplingParams
from tests.engine.mock import MODEL

CONFIG = EngineConfig(
    max_model_len=40,
    block_size=4,
    num_blocks=20,
    max_num_seqs=5,
    max_num_batched_tokens=16,
    seq_buckets=(2, 5),
    token_buckets=(4, 8, 16),
    max_logprobs=3,
    max_logit_bias=2,
    max_stop_ids=4,
).resolve(MODEL)


def entry(
    start: int = 0,
    num_tokens: int = 1,
    *,
    prompt: int = 6,
    generated: int = 0,
    device_row: int = 3,
    draws: int = 1,
    decodes: bool = False,
    is_new: bool = False,
    eos: frozenset[int] = frozenset(),
    **params: Any,
) -> PlanEntry:
    """A row whose sequence has tokens 10, 11, ... and blocks 5, 6, ..."""
    tokens = range(10, 10 + prompt)
    seq = Sequence(
        "r",
        list(tokens),
        SamplingParams(**params),
        max_model_len=40,
        key=(2**32 - 1, 7),
        eos_ids=eos,
    )
    seq.token_ids += range(60, 60 + generated)
    seq.device_row = device_row
    seq.block_tables = (array("i", range(5, 5 + -(-(start + num_tokens) // 4))),)
    seq.first_held = [0]
    return PlanEntry(
        seq=seq,
        start=start,
        num_tokens=num_tokens,
        draws=draws,
        decodes=decodes,
        is_new=is_new,
        epoch=0,
    )


def plan(*entries: PlanEntry, phase: Literal["prefill", "decode"] = "prefill") -> Plan:
    return Plan(phase=phase, entries=entries)


def views(
    packed: np.ndarray, bucket: Shape, config: EngineConfig = CONFIG
) -> dict[str, np.ndarray]:
    sections, size = input_sections(bucket, config)
    assert packed.dtype == np.int32 and packed.shape == (size,)
    return {
        k: packed[s.offset : s.offset + math.prod(s.shape)].reshape(s.shape)
        for k, s in sections.items()
    }


def fields(batch: Batch) -> dict[str, np.ndarray]:
    return views(batch.packed, batch.bucket)


def drawing(batch: Batch) -> dict[str, np.ndarray]:
    """What the draw is told: of a prefill the end of its buffer."""
    return fields(batch) if batch.sample is None else views(fields(batch)["sample"], batch.sample)


def test_prefill():
    rows = (
        entry(4, 2, prompt=8, draws=0),
        entry(0, 3, prompt=3, device_row=1),
        entry(5, 1, device_row=0),
        entry(6, 0, device_row=2),
    )
    batch = pack(plan(*rows), CONFIG)
    assert batch.bucket == PrefillShape(tokens=8, rows=5, tables=1, blocks=10)
    assert batch.sample == SampleShape(rows=5) and (
        batch.num_tokens,
        batch.num_rows,
    ) == (6, 3)
    view = fields(batch)
    assert view["tokens"].tolist() == [14, 15, 10, 11, 12, 15, 0, 0]
    assert view["query_start_loc"].tolist() == [
        0,
        2,
        5,
        6,
        6,
        6,
    ]  # rows without tokens end the list
    assert view["context_lens"].tolist() == [6, 3, 6, 0, 0]
    assert view["block_tables"][0].tolist() == [
        [5, 6] + [0] * 8,
        [5] + [0] * 9,
        [5, 6] + [0] * 8,
        [0] * 10,
        [0] * 10,
    ]
    assert view["logits_indices"].tolist() == [
        4,
        5,
        5,
        0,
        0,
    ]  # the last is a fork: it draws where the row before it does
    assert set(view) == {
        "tokens",
        "query_start_loc",
        "context_lens",
        "block_tables",
        "device_rows",
        "logits_indices",
        "sample",
    }
    rows = drawing(batch)
    assert rows["context_lens"].tolist() == [3, 6, 6, 0, 0]
    assert rows["device_rows"].tolist() == [1, 0, 2, 5, 5]  # 5 is past the last slot: dropped
    assert not rows["controls"][3:].any() and not rows["open_after"].any() and batch.counts == ()


def test_rows_that_decode_join_a_prefill():
    """One's last token is known, the other's is on the device alone: it follows what that drew."""
    config = dataclasses.replace(CONFIG, mixed=True)
    rows = (
        entry(8, generated=3, device_row=4, decodes=True),
        entry(9, generated=3, device_row=0, decodes=True),
        entry(0, 3, prompt=3, device_row=1, is_new=True),
    )
    batch = pack(plan(*rows), config)
    assert (batch.bucket.phase, batch.num_tokens, batch.num_rows) == ("prefill", 5, 3)
    view = views(batch.packed, batch.bucket, config)
    assert view["tokens"].tolist() == [62, ON_DEVICE, 10, 11, 12, 0, 0, 0]
    assert view["query_start_loc"].tolist() == [0, 1, 2, 5, 5, 5]
    assert view["context_lens"].tolist() == [9, 10, 3, 0, 0]
    assert view["logits_indices"].tolist() == [0, 1, 4, 0, 0]
    assert view["device_rows"].tolist() == [4, 0, 1, 5, 5] and batch.copies is None
    assert batch.sample is not None
    rows = views(view["sample"], batch.sample, config)
    assert rows["follows"].tolist() == [0, 1, 0, 0, 0]
    assert rows["device_rows"].tolist() == [4, 0, 1, 5, 5]


def test_a_table_and_copies_of_each_group():
    """What a window has left is block 0, which exists."""
    row = entry(13, prompt=14)
    row.seq.block_tables = (array("i", [5, 6, 7, 8]), array("i", [-1, -1, 3, 9]))
    row.seq.first_held = [0, 2]
    of = dataclasses.replace(plan(row, phase="decode"), copies=((), ((4, 9),)))
    batch = pack(of, CONFIG)
    assert batch.bucket.tables == 2
    view = fields(batch)
    assert view["block_tables"][:, 0, :5].tolist() == [[5, 6, 7, 8, 0], [0, 0, 3, 9, 0]]
    assert batch.copies is not None and CONFIG.seq_buckets is not None
    assert batch.copies.shape == (2, CONFIG.seq_buckets[-1], 2)
    assert batch.copies[:, :2].tolist() == [[[0, 0], [0, 0]], [[4, 9], [0, 0]]]
    assert not batch.copies[:, 2:].any()


def test_a_prefill_without_a_last_chunk_draws_nothing():
    batch = pack(plan(entry(0, 4, prompt=8, draws=0)), CONFIG)
    assert (
        batch.sample is None is batch.drawing
        and batch.num_rows == 0
        and not fields(batch)["sample"].any()
    )


def test_decode():
    rows = entry(6, 1, generated=1, device_row=4), entry(9, 1, generated=4, device_row=0)
    batch = pack(plan(*rows, phase="decode"), CONFIG)
    assert batch.bucket == batch.drawing == DecodeShape(rows=2, tables=1, blocks=10)
    view = fields(batch)
    assert (
        "query_start_loc" not in view
        and view["tokens"].tolist() == [60, 63]
        and batch.copies is None
    )
    assert view["context_lens"].tolist() == [7, 10] and view["device_rows"].tolist() == [4, 0]
    assert view["steps"].tolist() == [1, 1] and view["block_tables"][0][:, :4].tolist() == [
        [5, 6, 0, 0],
        [5, 6, 7, 0],
    ]


def test_several_steps():
    config = dataclasses.replace(CONFIG, decode_steps=8)
    rows = (
        entry(6, 5, draws=5, generated=1, device_row=4, min_tokens=4),
        entry(9, 2, draws=2, generated=3, device_row=0),
    )
    batch = pack(plan(*rows, phase="decode"), config)
    assert batch.bucket == DecodeShape(rows=2, tables=1, blocks=10, steps=8, sampler="full")
    assert (batch.steps, batch.num_tokens, batch.num_rows, batch.padded_tokens) == (5, 7, 2, 10)
    sections, _ = input_sections(batch.bucket, config)
    view = {
        k: batch.packed[s.offset : s.offset + math.prod(s.shape)].reshape(s.shape)
        for k, s in sections.items()
    }
    assert view["steps"].tolist() == [5, 2] and view["context_lens"].tolist() == [7, 10]
    assert view["tokens"].tolist() == [60, ON_DEVICE]  # the second row's last token is in flight
    assert view["open_after"].tolist() == [3, 0]


def test_controls_travel_as_their_bits():
    row = entry(
        0,
        6,
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        top_k=-1,
        logprobs_mode="processed",
        presence_penalty=-1.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
    )
    columns = drawing(pack(plan(row), CONFIG))["controls"][0]
    values = {c.name: columns[i : i + 1].view(c.dtype)[0] for i, c in enumerate(CONTROLS)}
    want = {
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence": -1.5,
        "frequency": 0.25,
        "repetition": 1.1,
    }
    assert {name: values[name] for name in want} == {
        name: np.float32(v) for name, v in want.items()
    }
    assert (values["key_hi"], values["key_lo"], values["top_k"]) == (2**32 - 1, 7, 0)
    assert (columns[len(CONTROLS) :] == PAD_TOKEN).all()  # no stop ids
    assert LOGPROBS_MODES[values["logprobs_mode"]] == "processed" and values["sample_index"] == 0


@pytest.mark.parametrize(
    ("temperature", "travels_as"),
    [(0, 0), (1e-300, 1e-30), (1e-45, 1e-30), (1e-38, 1e-30), (0.7, 0.7), (3e38, 1e30)],
)
def test_temperatures_travel_as_numbers_that_f32_divides_by(temperature: float, travels_as: float):
    """f32 takes most of the small ones, and the reciprocals of the largest, for 0."""
    row = entry(0, 4, prompt=4, temperature=temperature, prompt_logprobs=0)
    batch = pack(plan(row), CONFIG)
    column = [control.name for control in CONTROLS].index("temperature")
    scored = fields(batch)["scoring"].view(np.float32)[0, 0]
    drawn = drawing(batch)["controls"].view(np.float32)[0, column]
    assert scored == drawn == np.float32(travels_as)


def test_min_tokens_beyond_any_context_travel_too():
    row = entry(0, 4, prompt=4, max_tokens=None, min_tokens=2**40)
    assert drawing(pack(plan(row), CONFIG))["open_after"][0] == 2**31 - 1


def test_controls_are_packed_once_a_request():
    row = entry(0, 6, temperature=0.5)
    first = drawing(pack(plan(row), CONFIG))["controls"][0]
    kept = row.seq.controls
    assert (
        drawing(pack(plan(row), CONFIG))["controls"][0].tolist() == first.tolist()
        and row.seq.controls is kept
    )


@pytest.mark.parametrize(
    ("params", "prefill", "drawing"),
    [
        ({}, "plain", "plain"),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, "plain", "plain"),
        ({"temperature": 0.0, "min_p": 0.5}, "plain", "plain"),
        ({"temperature": 0.5, "min_p": 0.5}, "plain", "filtered"),
        ({"top_k": 5}, "plain", "filtered"),
        ({"top_p": 0.9}, "plain", "filtered"),
        ({"top_p": 0.9, "logprobs": 0}, "plain", "full"),
        ({"logprobs": 0}, "plain", "full"),
        ({"logit_bias": {1: 1.0}}, "plain", "full"),
        ({"min_tokens": 2}, "plain", "full"),
        ({"presence_penalty": 0.5}, "plain", "full"),
        ({"prompt_logprobs": 0}, "prompt", "plain"),
        ({"prompt_logprobs": 2, "logprobs": 1}, "prompt", "full"),
    ],
    ids=str,
)
def test_one_row_decides_the_shape(params: dict[str, Any], prefill: str, drawing: str):
    rows = entry(0, 3, prompt=3), entry(0, 4, prompt=4, device_row=0, **params)
    bucket, sample = choose_shapes(plan(*rows), CONFIG)
    assert sample is not None and sample.sampler == drawing
    assert isinstance(bucket, PrefillShape) and bucket.scores == (prefill == "prompt")
    assert choose_shapes(plan(*rows, phase="decode"), CONFIG)[0].sampler == drawing
    # A row that draws nothing yet asks nothing of the draw.
    _, sample = choose_shapes(
        plan(rows[0], entry(0, 2, prompt=4, device_row=0, draws=0, **params)), CONFIG
    )
    assert sample is not None and sample.sampler == "plain"


def test_full_fields():
    rows = (
        entry(0, 6, logit_bias={30: 1.5, 7: -2.0}),
        entry(
            0, 3, prompt=3, device_row=1, min_tokens=2, eos=frozenset({9, 4}), stop_token_ids=[6, 4]
        ),
        entry(0, 2, prompt=2, device_row=2, stop_token_ids=range(20, 26)),
    )
    view = drawing(pack(plan(*rows), CONFIG))
    pad = int(PAD_TOKEN)
    assert view["bias_ids"].tolist() == [[30, 7], *[[pad, pad]] * 4]
    assert view["bias"].view(np.float32).tolist() == [[1.5, -2.0], *[[0.0, 0.0]] * 4]
    # As many stop ids as there is room for; the host sees them all.
    assert view["controls"][:3, len(CONTROLS) :].tolist() == [
        [pad] * 4,
        [4, 6, 9, pad],
        [20, 21, 22, 23],
    ]
    assert view["open_after"].tolist() == [0, 2, 0, 0, 0]


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_stop_ids_count_after_min_tokens(min_tokens: int):
    """The token drawn after a context of 6 + g is number g + 1 of the output: no stop id while g <
    min_tokens.
    """
    for g in range(5):
        row = entry(5 + g, 1, generated=g, min_tokens=min_tokens, logprobs=0, eos=frozenset({9}))
        view = drawing(pack(plan(row, phase="decode"), CONFIG))
        assert view["open_after"][0] == max(min_tokens - g, 0)
    assert (
        drawing(pack(plan(entry(0, 6, min_tokens=min_tokens)), CONFIG))["open_after"][0]
        == min_tokens
    )


def test_targets_are_the_tokens_that_follow():
    scored = entry(
        2, 3, prompt=6, prompt_logprobs=1, draws=0, temperature=0.5, logprobs_mode="tempered"
    )
    rows = scored, entry(0, 4, prompt=4, device_row=0)
    view = fields(pack(plan(*rows), CONFIG))
    assert view["tokens"].tolist()[:7] == [12, 13, 14, 10, 11, 12, 13]
    assert view["num_scored"].tolist() == [3] and view["scored"].tolist()[:3] == [0, 1, 2]
    assert view["targets"].tolist() == [13, 14, 15, 0, 0, 0, 0, 0]
    assert view["scoring"][:, 0].view(np.float32).tolist()[:2] == [0.5, 0.0]
    assert view["scoring"][0, 1] == LOGPROBS_MODES.index("tempered")


def test_counts_of_rows_just_admitted():
    rows = (
        entry(0, 6, is_new=True, presence_penalty=1.0),
        entry(2, 2, prompt=6, device_row=1, is_new=False, presence_penalty=1.0),
        entry(0, 2, prompt=2, device_row=2, is_new=True),
        entry(4, 4, prompt=5, generated=3, device_row=4, is_new=True, repetition_penalty=1.5),
    )
    assert pack(plan(*rows), CONFIG).counts == (
        (3, list(range(10, 16)), 6),
        (4, [10, 11, 12, 13, 14, 60, 61, 62], 5),
    )


def test_plans_fill_their_bucket():
    rows = [entry(0, n, prompt=n, device_row=i) for i, n in enumerate((4, 4, 4, 3, 1))]
    batch = pack(plan(*rows), CONFIG)
    view = fields(batch)
    assert batch.bucket.tokens == 16 and batch.bucket.rows == 5
    assert view["query_start_loc"].tolist() == [0, 4, 8, 12, 15, 16] and (view["tokens"] > 0).all()


@pytest.mark.parametrize(
    ("tokens", "rows", "want"), [(1, 1, (4, 2)), (4, 2, (4, 2)), (5, 1, (8, 2)), (9, 3, (16, 5))]
)
def test_the_smallest_bucket_that_holds_it(tokens: int, rows: int, want: tuple[int, int]):
    lengths = [tokens - rows + 1, *[1] * (rows - 1)]
    bucket, sample = choose_shapes(
        plan(*(entry(0, n, prompt=n, device_row=i) for i, n in enumerate(lengths))), CONFIG
    )
    assert (
        (bucket.tokens, bucket.rows) == want
        and sample is not None
        and sample.rows == (2 if rows < 3 else 5)
    )


def test_forks_are_rows_of_the_draw_alone():
    rows = [entry(0, 4, prompt=4), *(entry(4, 0, prompt=4, device_row=i) for i in range(3))]
    bucket, sample = choose_shapes(plan(*rows), CONFIG)
    assert (bucket.tokens, bucket.rows) == (4, 2) and sample is not None and sample.rows == 5


def test_few_long_rows_and_many_short_ones():
    config = EngineConfig(max_model_len=4096, max_num_batched_tokens=2048).resolve(MODEL)
    plans = {n: plan(*[entry(0, 1600 // n, prompt=1600 // n)] * n) for n in (1, 32, 33)}
    rows = {n: choose_shapes(of, config) for n, of in plans.items()}
    assert {n: (bucket.tokens, bucket.rows) for n, (bucket, _) in rows.items()} == {
        1: (2048, 32),
        32: (2048, 32),
        33: (2048, 256),
    }
    assert [sample.rows for _, sample in rows.values() if sample is not None] == [8, 32, 48]


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(
    lambda x: tuple(sorted(x))
)


@given(seq_buckets=sizes, token_buckets=sizes, data=st.data())
def test_the_table_holds_every_choice(
    seq_buckets: tuple[int, ...], token_buckets: tuple[int, ...], data: st.DataObject
):
    config = EngineConfig(
        max_model_len=40,
        max_num_seqs=data.draw(st.integers(1, seq_buckets[-1])),
        max_num_batched_tokens=data.draw(st.integers(1, token_buckets[-1])),
        seq_buckets=seq_buckets,
        token_buckets=token_buckets,
    ).resolve(MODEL)
    table = list(shape_table(config))
    assert len(set(table)) == len(table)
    phase: Literal["prefill", "decode"] = data.draw(st.sampled_from(["prefill", "decode"]))
    limit = (
        config.num_rows
        if phase == "decode"
        else min(config.num_rows, config.max_num_batched_tokens)
    )
    rows = data.draw(st.integers(1, limit))
    extra = (
        0 if phase == "decode" else data.draw(st.integers(0, config.max_num_batched_tokens - rows))
    )
    params: dict[str, Any] = data.draw(
        st.sampled_from([{}, {"logprobs": 1}, {"prompt_logprobs": 0}])
    )
    entries = [entry(0, 1 + extra * (i == 0), prompt=41, **params) for i in range(rows)]
    bucket, sample = choose_shapes(plan(*entries, phase=phase), config)
    assert bucket in table and bucket.rows >= rows and bucket.tokens >= rows + extra
    assert (sample is None) == (phase == "decode") and (
        sample is None or (sample in table and sample.rows >= rows)
    )


def test_the_table_of_the_defaults_is_small():
    """Every shape of it is compiled at the start in strict mode."""
    table = list(shape_table(EngineConfig().resolve(MODEL)))
    kinds = Counter(bucket.phase for bucket in table)
    assert kinds["sample"] == kinds["decode"] == 30 and kinds["prefill"] <= 80
    # No prefill of few tokens over many rows: such a plan has a smaller bucket.
    assert all(b.rows < 2 * b.tokens for b in table)
