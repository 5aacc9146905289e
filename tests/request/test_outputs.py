"""to_arrays: every key, every way to overflow, masks from lengths."""

from typing import Any

import numpy as np
import pytest

from jpaged.errors import RequestError
from jpaged.request.arrays import to_arrays
from jpaged.request.outputs import CompletionOutput, RequestOutput


def output(
    prompt: list[int], *completions: list[int], reason: Any = "stop", error: Exception | None = None
):
    outputs = [
        CompletionOutput(
            index=i,
            text=None,
            token_ids=tokens,
            token_logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32) / 4,
            cumulative_logprob=0.0,
            finish_reason=reason,
        )
        for i, tokens in enumerate(completions)
    ]
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=prompt, outputs=outputs, error=error
    )


TWO = [output([1, 2, 3], [4, 5]), output([6], [7, 8, 9], reason="length")]
DTYPES = {
    "prompt_ids": np.int32,
    "prompt_mask": np.bool_,
    "prompt_lens": np.int32,
    "completion_ids": np.int32,
    "completion_mask": np.bool_,
    "completion_lens": np.int32,
    "logprobs": np.float32,
    "weight_versions": np.int32,
    "group_ids": np.int32,
    "sample_index": np.int32,
    "finished": np.bool_,
}


def check(arrays: dict[str, np.ndarray], **want: Any) -> None:
    assert {name: array.dtype.type for name, array in arrays.items()} == DTYPES
    for name, value in want.items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)


def test_every_key():
    check(
        to_arrays(TWO),
        prompt_ids=[[1, 2, 3], [0, 0, 6]],
        prompt_mask=[[True, True, True], [False, False, True]],
        prompt_lens=[3, 1],
        completion_ids=[[4, 5, 0], [7, 8, 9]],
        completion_mask=[[True, True, False], [True, True, True]],
        completion_lens=[2, 3],
        logprobs=[[-0.25, -0.5, 0.0], [-0.25, -0.5, -0.75]],
        group_ids=[0, 1],
        sample_index=[0, 0],
        finished=[True, False],
    )


def test_given_widths():
    check(
        to_arrays(TWO, max_prompt_len=4, max_completion_len=5, pad_id=99),
        prompt_ids=[[99, 1, 2, 3], [99, 99, 99, 6]],
        completion_ids=[[4, 5, 99, 99, 99], [7, 8, 9, 99, 99]],
        logprobs=[[-0.25, -0.5, 0, 0, 0], [-0.25, -0.5, -0.75, 0, 0]],
    )


def test_masks_come_from_lengths():
    """A pad_id among the data is data."""
    arrays = to_arrays([output([0, 0], [0, 5, 0]), output([0], [0])], pad_id=0)
    check(
        arrays,
        prompt_mask=[[True, True], [False, True]],
        completion_mask=[[True, True, True], [True, False, False]],
        completion_lens=[3, 1],
    )


def test_several_completions_a_prompt():
    arrays = to_arrays([output([1], [2], [3, 4]), output([5, 6], [7], [8])])
    check(
        arrays,
        group_ids=[0, 0, 1, 1],
        sample_index=[0, 1, 0, 1],
        prompt_ids=[[0, 1], [0, 1], [5, 6], [5, 6]],
    )


def test_a_batch_of_one():
    arrays = to_arrays([output([3], [4])])
    assert {
        name: array.shape for name, array in arrays.items() if array.ndim == 2
    } == dict.fromkeys(
        (
            *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "logprobs"),
            "weight_versions",
        ),
        (1, 1),
    )
    assert arrays["finished"].shape == arrays["group_ids"].shape == (1,)


def test_no_tokens():
    arrays = to_arrays([output([3, 4], [], reason="abort"), output([5], [6])])
    check(
        arrays, completion_ids=[[0], [6]], completion_mask=[[False], [True]], finished=[False, True]
    )
    assert to_arrays([output([3, 4], [])])["completion_ids"].shape == (1, 0)


def test_nothing_at_all():
    arrays = to_arrays([])
    assert arrays["prompt_ids"].shape == arrays["completion_ids"].shape == (0, 0)
    check(
        to_arrays([], max_prompt_len=2, max_completion_len=3),
        prompt_mask=np.zeros((0, 2)),
        logprobs=np.zeros((0, 3)),
    )


@pytest.mark.parametrize("limits", [{"max_prompt_len": 2}, {"max_completion_len": 2}], ids=str)
def test_overflow_error_names_the_request_and_the_knob(limits: dict[str, Any]):
    group = 0 if "max_prompt_len" in limits else 1
    with pytest.raises(RequestError, match=f"request {group} has .*{next(iter(limits))}=2"):
        to_arrays(TWO, **limits)


def test_overflow_truncate():
    """A prompt keeps its right end, a completion its left; what was cut has not finished."""
    check(
        to_arrays(TWO, max_prompt_len=2, max_completion_len=1, overflow="truncate"),
        prompt_ids=[[2, 3], [0, 6]],
        prompt_lens=[2, 1],
        prompt_mask=[[True, True], [False, True]],
        completion_ids=[[4], [7]],
        completion_lens=[1, 1],
        logprobs=[[-0.25], [-0.25]],
        finished=[False, False],
    )
    check(to_arrays(TWO, max_prompt_len=2, overflow="truncate"), finished=[True, False])


def test_overflow_truncate_to_nothing():
    arrays = to_arrays(TWO, max_prompt_len=0, max_completion_len=0, overflow="truncate")
    assert arrays["prompt_ids"].shape == arrays["logprobs"].shape == (2, 0)
    check(arrays, prompt_lens=[0, 0], completion_lens=[0, 0], finished=[False, False])


def test_overflow_drop():
    check(
        to_arrays(TWO, max_prompt_len=2, overflow="drop"),
        prompt_ids=[[0, 6]],
        completion_ids=[[7, 8, 9]],
        group_ids=[1],
    )
    assert to_arrays(TWO, max_prompt_len=1, max_completion_len=1, overflow="drop")[
        "prompt_ids"
    ].shape == (0, 1)
    check(to_arrays(TWO, max_prompt_len=3, max_completion_len=3, overflow="drop"), group_ids=[0, 1])


def test_overflow_drops_one_completion_of_a_group():
    arrays = to_arrays([output([1], [2, 3, 4], [5])], max_completion_len=2, overflow="drop")
    check(arrays, group_ids=[0], sample_index=[1], completion_ids=[[5, 0]])


def test_failed_requests():
    outs = [
        output([1], [2]),
        output([3, 4, 5, 6], [], reason="error", error=ValueError("too long")),
        output([7], [8]),
    ]
    with pytest.raises(RequestError, match="request 1 failed: too long"):
        to_arrays(outs)
    for overflow in ("truncate", "drop"):
        check(
            to_arrays(outs, overflow=overflow), group_ids=[0, 2], prompt_ids=[[1], [7]]
        )  # nor does its width count


@pytest.mark.parametrize("overflow", ["cut", None, ""])
def test_an_unknown_overflow(overflow: Any):
    with pytest.raises(RequestError, match="overflow="):
        to_arrays(TWO, overflow=overflow)


@pytest.mark.parametrize("name", ["max_prompt_len", "max_completion_len"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "3"], ids=repr)
def test_bad_widths(name: str, value: Any):
    for overflow in ("error", "truncate", "drop"):
        with pytest.raises(RequestError, match=name):
            to_arrays(TWO, **{name: value}, overflow=overflow)


def test_a_width_of_numpy_and_what_is_no_padding() -> None:
    assert to_arrays(TWO, max_prompt_len=np.int64(9))["prompt_ids"].shape[1] == 9  # pyright: ignore[reportArgumentType]
    for pad_id in (None, 2**31, 0.5):  # None is the id of many a tokenizer
        with pytest.raises(RequestError, match=f"pad_id={pad_id}: must be"):
            to_arrays(TWO, pad_id=pad_id)  # pyright: ignore[reportArgumentType]
