"""Bodies by themselves, as a server meets them: what is refused and how, and that answers are of
their declared types.
"""

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from jpaged.errors import CapacityError, RequestError
from jpaged.openai.protocol import BodyError, ChatCompletionRequest, CompletionRequest
from jpaged.openai.responses import (
    AnswerForm,
    ChatCompletion,
    Completion,
    Failure,
    chat_completion,
    completion,
    finite,
)
from jpaged.request.outputs import CompletionOutput, Logprob, RequestOutput

SAID = [{"role": "user", "content": "hi"}]


def refused(kind: Any, **body: Any) -> tuple[str | None, str, str]:
    with pytest.raises(BodyError) as caught:
        kind.read(body)
    return caught.value.param, caught.value.code, str(caught.value)


def test_a_refusal_names_the_field_and_its_value() -> None:
    found = refused(CompletionRequest, prompt="a", temperature=True)
    assert found == (
        "temperature",
        "invalid_value",
        "temperature=True: Input should be a valid number",
    )
    assert refused(CompletionRequest, prompt="a", stop=[1])[2].startswith("stop=[1]: ")
    param, code, said = refused(CompletionRequest, prompt="a", seed=2**63)
    assert (param, code) == ("seed", "invalid_value") and str(2**63) in said
    param, _, said = refused(ChatCompletionRequest, messages=[*SAID, {"role": "user"}])
    assert param == "messages" and said.endswith("1: has no content")
    assert refused(ChatCompletionRequest)[2] == "a request needs messages; this one has none"
    assert refused(CompletionRequest, prompt="a", lable=1) == (
        "lable",
        "unknown_field",
        "unknown field 'lable'",
    )
    assert refused(CompletionRequest, prompt="a", documents=[{}])[:2] == (
        "documents",
        "unsupported_field",
    )


def test_what_is_wrong_is_told_before_what_is_unknown() -> None:
    assert refused(CompletionRequest, prompt="a", lable=1, n="x")[0] == "n"


def test_what_an_assistant_said() -> None:
    """A refusal and parts of one are text; null is no content; reasoning has two names."""

    def taken(**message: Any) -> dict[str, Any]:
        messages = [*SAID, {"role": "assistant"} | message]
        return ChatCompletionRequest.read({"messages": messages}).conversation[1]

    part = {"type": "refusal", "refusal": "No."}
    for message in ({"refusal": "No."}, {"content": [part]}, {"content": "", "refusal": "No."}):
        assert taken(**message) == {"role": "assistant", "content": "No."}
    for message in ({}, {"content": None}, {"content": []}, {"tool_calls": []}):
        assert taken(**message) == {"role": "assistant", "content": ""}
    for message in ({"reasoning": "r"}, {"reasoning": "r", "reasoning_content": "r"}):
        assert taken(**message)["reasoning_content"] == "r"
    for message, said in (
        ({"reasoning": "r", "reasoning_content": "s"}, "reasoning and reasoning_content differ"),
        ({"audio": {"id": "a"}}, "audio={'id': 'a'} is not supported (only null)"),
        ({"function_call": {"name": "f", "arguments": "{}"}}, "is not supported (only null)"),
    ):
        messages = [*SAID, {"role": "assistant"} | message]
        param, _, told = refused(ChatCompletionRequest, messages=messages)
        assert param == "messages" and said in told


def test_unknown_fields_are_named_as_far_as_that_helps() -> None:
    message = SAID[0] | {"nome": "x"}
    found = refused(ChatCompletionRequest, messages=[message])
    assert found[:2] == ("messages", "unknown_field") and "0.nome: " in found[2]
    _, _, said = refused(CompletionRequest, prompt="a", **{f"x{i}": 1 for i in range(20)})
    assert said == "unknown field 'x0', 'x1', 'x10', 'x11', 'x12', 'x13', 'x14', 'x15' and 12 more"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"5": True}, "5: True cannot be added"),
        ({"5": 10**400}, "cannot be added to a logit"),
        ({"5": float("nan")}, "cannot be added to a logit"),
        ({"-5": 1}, "'-5' is not a token id"),
        ({"9" * 5000: 1}, "is not a token id"),
        ({str(2**31): 1}, "2147483648 is not a token id"),
        ([1], "logit_bias=[1]: Input should be a valid dictionary"),
    ],
)
def test_biases(given: Any, said: str) -> None:
    assert said in refused(CompletionRequest, prompt="a", logit_bias=given)[2]


def test_a_logprob_that_is_no_number() -> None:
    assert [*map(finite, (-0.5, float("-inf"), float("nan")))] == [-0.5, -9999.0, -9999.0]


def test_sampling_has_what_was_given_and_nothing_else() -> None:
    body = CompletionRequest.read({"prompt": "a", "top_k": 5, "n": None, "logprobs": 0, "user": 3})
    assert body.sampling() == {"top_k": 5, "logprobs": 0}
    chat = {"messages": SAID, "max_tokens": 3, "max_completion_tokens": 4, "logprobs": True}
    assert ChatCompletionRequest.read(chat).sampling() == {"max_tokens": 4, "logprobs": 0}
    assert ChatCompletionRequest.read({"messages": SAID, "logprobs": False}).sampling() == {}


@pytest.mark.parametrize("form", [AnswerForm(), AnswerForm(top=1, token_ids=True)])
def test_answers_are_of_their_types(form: AnswerForm) -> None:
    entries = {65: Logprob(-0.5, 1, "A"), 66: Logprob(-1.5, 2, None)}
    done = CompletionOutput(
        index=0,
        text="A",
        token_ids=[65],
        token_logprobs=np.array([-0.5], np.float32),
        cumulative_logprob=-0.5,
        logprobs=[entries],
        finish_reason="stop",
    )
    output = RequestOutput(
        request_id="0",
        prompt="p",
        prompt_token_ids=[1],
        prompt_logprobs=[None, entries],
        outputs=[done],
    )
    for kind, make in ((ChatCompletion, chat_completion), (Completion, completion)):
        body = make(output, form, name="0", model="m")
        assert TypeAdapter(kind).validate_python(body, strict=True, extra="forbid") == body


def test_failures() -> None:
    assert Failure.of(CapacityError("long")).code == "context_length_exceeded"
    failure = Failure.of(RequestError("top_p=3: must be in (0, 1]"))
    assert (failure.status, failure.param, failure.code) == (400, "top_p", "invalid_value")
    assert Failure.of(RequestError("other=3: no")).param is None
    lost = Failure.of(ValueError("gone"))
    assert (lost.status, lost.message) == (500, "ValueError: gone")
