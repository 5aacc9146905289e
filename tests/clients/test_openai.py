"""The `openai` package against a server: both of its clients, streams, tools, errors."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic
import pytest

from jpaged import LLM, SamplingParams
from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH
from tests.openai.live import SIZES, TOOL_TEMPLATE, Live, serving

pytestmark = pytest.mark.clients
openai: Any = pytest.importorskip("openai", reason="the extra 'clients' is not installed")
ASK: dict[str, Any] = {"model": "demo", "max_tokens": 12, "seed": 4}
TALK: Any = [{"role": "user", "content": "Write a class."}]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = LLM(str(MODEL_PATH), **SIZES)
    with serving(llm, models=("demo",), api_keys=("secret",), max_waiting=24) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=url(live), api_key="secret", max_retries=0) as client:
        yield client
    live.assert_nothing_left()


def url(live: Live) -> str:
    return f"http://127.0.0.1:{live.port}/v1"


def test_completions_and_their_streams(client: Any):
    whole = client.completions.create(prompt="import os\n", logprobs=2, n=2, **ASK)
    assert whole.usage.completion_tokens == 24 and len(whole.choices) == 2
    events = client.completions.create(prompt="import os\n", n=2, stream=True, **ASK)
    texts = ["", ""]
    for event in events:
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    logprobs = whole.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 12
    ids = client.completions.create(prompt=[[5, 6, 7], [8, 9]], **ASK)
    assert [choice.index for choice in ids.choices] == [0, 1]


def test_the_librarys_tokens(live: Live, client: Any):
    llm = LLM(str(MODEL_PATH), **SIZES)
    asked = SamplingParams(max_tokens=12, seed=4, temperature=0.9, n=2)
    [output] = llm.generate(["class A:"], asked, use_tqdm=False)
    llm.close()
    more: Any = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    found = client.completions.create(
        prompt="class A:", n=2, temperature=0.9, extra_body=more, **ASK
    )
    assert [c.text for c in found.choices] == [done.text for done in output.outputs]


def test_chat(client: Any):
    whole = client.chat.completions.create(messages=TALK, logprobs=True, top_logprobs=2, **ASK)
    [choice] = whole.choices
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    events = list(
        client.chat.completions.create(
            messages=TALK, stream=True, stream_options={"include_usage": True}, **ASK
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": events[-1].usage.prompt_tokens_details}
    )
    pieces = [c.delta.content or "" for event in events for c in event.choices]
    assert "".join(pieces) == choice.message.content
    # The package's own way to take a stream to its end.
    whole_ask = ASK | {"max_tokens": 400, "stop": ["\n"]}
    with client.chat.completions.stream(messages=TALK, **whole_ask) as stream:
        final = stream.get_final_completion()
    again = client.chat.completions.create(messages=TALK, **whole_ask)
    assert final.choices[0].message.content == again.choices[0].message.content


def test_async_clients_at_once_and_one_that_leaves(live: Live, client: Any):
    expected = client.completions.create(prompt="def f", **ASK).choices[0].text

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url(live), api_key="secret") as many:

            async def one(i: int) -> str:
                if i % 2:
                    found = await many.completions.create(prompt="def f", **ASK)
                    return found.choices[0].text
                events = await many.completions.create(prompt="def f", stream=True, **ASK)
                return "".join([c.text async for event in events for c in event.choices])

            left = await many.completions.create(
                prompt="leave", model="demo", max_tokens=400, stream=True
            )
            await anext(left)
            await left.close()
            return await asyncio.gather(*map(one, range(16)))

    assert set(asyncio.run(main())) == {expected}


class Trip(pydantic.BaseModel):
    """What is asked of the model, by a schema."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: Annotated[int, pydantic.Field(ge=1, le=9)]


def test_tools_and_schemas():
    """The package's own schemas of pydantic models, and what it parses of the answers."""
    pytest.importorskip("llguidance", reason="pip install 'jpaged[structured]'")
    tokenizer = load_tokenizer(MODEL_PATH)
    tokenizer.chat_template = TOOL_TEMPLATE
    llm = LLM(str(MODEL_PATH), tokenizer=tokenizer, **SIZES)
    with (
        serving(llm, models=("demo",)) as live,
        openai.OpenAI(base_url=url(live), api_key="none") as client,
    ):
        ask: Any = ASK | {"max_tokens": 200, "messages": TALK}
        how: Any = {"tool_choice": "required", "parallel_tool_calls": False}
        how["tools"] = [openai.pydantic_function_tool(Trip, name="travel")]
        found = client.chat.completions.parse(**how, **ask)
        [choice] = found.choices
        calls = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and calls
        assert all(isinstance(call.function.parsed_arguments, Trip) for call in calls)
        with client.chat.completions.stream(**how, **ask) as stream:
            streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
        assert [call.function.arguments for call in streamed] == [
            call.function.arguments for call in calls
        ]
        form = {"json": Trip.model_json_schema(), "disable_any_whitespace": True}
        more: Any = {"structured_outputs": form}
        said = client.chat.completions.create(extra_body=more, **ask).choices[0].message
        assert Trip.model_validate_json(said.content)
        live.assert_nothing_left()


def as_it_is(message: Any) -> Any:
    return message


def dumped(message: Any) -> Any:
    return message.model_dump()


def dumped_without_nulls(message: Any) -> Any:
    return message.model_dump(exclude_none=True)


@pytest.mark.parametrize("send", [as_it_is, dumped, dumped_without_nulls])
def test_the_loop_of_every_tutorial(send: Any):
    """messages.append(response.choices[0].message), and what parse() and stream() return; the same
    with the items of responses. A function that is named is called once.
    """
    pytest.importorskip("llguidance", reason="pip install 'jpaged[structured]'")
    tokenizer = load_tokenizer(MODEL_PATH)
    tokenizer.chat_template = TOOL_TEMPLATE
    with (
        serving(LLM(str(MODEL_PATH), tokenizer=tokenizer, **SIZES), models=("demo",)) as live,
        openai.OpenAI(base_url=url(live), api_key="none", max_retries=0) as client,
    ):
        tool = openai.pydantic_function_tool(Trip, name="travel")
        named = {"type": "function", "function": {"name": "travel"}}
        talk: list[Any] = list(TALK)
        ask: Any = ASK | {"max_tokens": 60, "messages": talk, "tools": [tool]}
        chat = client.chat.completions
        how: Any = {"tool_choice": named, "verbosity": "medium"}
        for turn in range(4):
            if turn == 0:
                message = chat.create(**ask, **how).choices[0].message
            elif turn == 1:  # which may be cut off
                message = chat.create(**ask).choices[0].message
            elif turn == 2:
                with chat.stream(**ask, **how) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                message = chat.parse(**ask, **how).choices[0].message
            assert turn == 1 or len(message.tool_calls) == 1
            talk.append(send(message))
            for call in message.tool_calls or []:
                talk.append({"role": "tool", "tool_call_id": call.id, "content": "booked"})
            talk.append({"role": "user", "content": "And then?"})
        flat = {"type": "function", **tool["function"]}
        items: list[Any] = list(TALK)
        for turn in range(3):
            choice: Any = {"type": "function", "name": "travel"} if turn % 2 == 0 else "auto"
            output = client.responses.create(
                model="demo", input=items, max_output_tokens=60, tools=[flat], tool_choice=choice
            ).output
            assert turn % 2 or [item.type for item in output] == ["function_call"]
            for item in output:
                items.append(send(item))
                if item.type == "function_call":
                    result = {"type": "function_call_output", "call_id": item.call_id}
                    items.append(result | {"output": "booked"})
        live.assert_nothing_left()


def test_usage_of_every_piece_and_fields_that_nobody_knows(client: Any):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = client.completions.create(prompt="a", stream=True, stream_options=options, **ASK)
    used = [event.usage.completion_tokens for event in events]
    assert used == sorted(used) and used[-1] == 12 and used[0] >= 1
    raw = client.completions.with_raw_response.create(prompt="a", extra_body={"lable": 1}, **ASK)
    assert raw.headers["x-jpaged-ignored-fields"] == "lable"


def test_responses(client: Any):
    """Whole and as a stream, which the package checks and adds up itself."""
    ask: dict[str, Any] = {"model": "demo", "max_output_tokens": 12, "extra_body": {"seed": 4}}
    whole = client.responses.create(input="Write a class.", instructions="Be short.", **ask)
    assert whole.status == "incomplete" and whole.usage.output_tokens == 12
    events = list(client.responses.create(input=TALK, instructions="Be short.", stream=True, **ask))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    more = [{"role": "user", "content": "a"}, *whole.output, {"role": "user", "content": "b"}]
    again = client.responses.create(input=[dict(x) for x in more], **ask)
    assert again.usage.input_tokens > whole.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="keeps no responses") as refused:
        client.responses.create(input="a", previous_response_id=whole.id, **ask)
    assert refused.value.param == "previous_response_id"


def test_tools_and_schemas_of_responses():
    pytest.importorskip("llguidance", reason="pip install 'jpaged[structured]'")
    tokenizer = load_tokenizer(MODEL_PATH)
    tokenizer.chat_template = TOOL_TEMPLATE
    llm = LLM(str(MODEL_PATH), tokenizer=tokenizer, **SIZES)
    with (
        serving(llm, models=("demo",)) as live,
        openai.OpenAI(base_url=url(live), api_key="none") as client,
    ):
        ask: Any = {"model": "demo", "max_output_tokens": 200, "input": TALK}
        ask |= {"extra_body": {"seed": 4}}
        schema = Trip.model_json_schema()
        tool = {"type": "function", "name": "travel", "parameters": schema, "strict": True}
        how: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        found = client.responses.create(**how, **ask)
        [call] = found.output
        assert (call.type, call.name, found.status) == ("function_call", "travel", "completed")
        with client.responses.stream(**how, **ask) as stream:
            kinds = {event.type for event in stream}
            [streamed] = stream.get_final_response().output
        assert streamed.arguments == call.arguments
        assert "response.function_call_arguments.done" in kinds
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "booked"}
        talk = [*TALK, call.model_dump(exclude_none=True), result]
        assert client.responses.create(**(ask | {"input": talk})).output_text
        assert Trip.model_validate_json(call.arguments)
        ask["max_output_tokens"] = 60
        for seed in range(20):  # a small model may write white space up to the limit
            ask["extra_body"] = {"seed": seed}
            with contextlib.suppress(pydantic.ValidationError):
                parsed = client.responses.parse(text_format=Trip, **ask)
                assert parsed.status == "completed" and isinstance(parsed.output_parsed, Trip)
                break
        else:
            raise AssertionError("no answer was whole")
        live.assert_nothing_left()


def test_errors_are_the_packages_own(live: Live, client: Any):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(prompt="a", temperature=-1, **ASK)
    assert bad.value.param == "temperature" and bad.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt="a", model="other")
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(prompt="a " * 600, **ASK)
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=url(live), api_key="wrong") as wrong,
    ):
        wrong.models.list()
    with pytest.raises(openai.RateLimitError):
        client.completions.create(prompt=["a"] * 33, **ASK)
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
