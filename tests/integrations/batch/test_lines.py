"""Lines to requests and back: every form, every check, and the shapes of OpenAI's output."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.adapter_flag import folders
from jpaged.errors import CapacityError, ConfigError, GenerationError, RequestError
from jpaged.integrations.batch import (
    BatchRequest,
    LineError,
    Settings,
    answer_line,
    encode_line,
    error_line,
)
from jpaged.integrations.batch.answers import row_failed, row_id, row_number
from jpaged.integrations.batch.lines import identify
from jpaged.openai.protocol import BodyError, Conversation
from jpaged.request.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.sampling_params import SamplingParams

SETTINGS = Settings(defaults=SamplingParams(temperature=0.6, top_p=0.95), model="m")


def parse(line, number=3, settings=SETTINGS) -> BatchRequest:
    request = BatchRequest(number=number)
    request.parse(line if isinstance(line, bytes) else json.dumps(line).encode(), settings)
    return request


def conversation(request: BatchRequest) -> Conversation:
    assert isinstance(request.body, Conversation)
    return request.body


def prompt(request: BatchRequest) -> str | list[int]:
    assert request.body is not None
    return request.body.given_prompt(None)


def openai(url="/v1/chat/completions", **body) -> dict:
    prompt = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in url else {"prompt": "hi"}
    )
    return {"custom_id": "a", "method": "POST", "url": url, "body": prompt | body}


def completion(**body) -> dict:
    return openai("/v1/completions", **body)


def refused(line, settings=SETTINGS) -> tuple[BatchRequest, BodyError]:
    request = BatchRequest(number=3)
    with pytest.raises(BodyError) as caught:
        request.parse(line if isinstance(line, bytes) else json.dumps(line).encode(), settings)
    return request, caught.value


def output(text: str | None = "ab", *, logprobs=None, prompt_logprobs=None) -> RequestOutput:
    done = CompletionOutput(
        index=0,
        text=text,
        token_ids=[65, 66],
        token_logprobs=np.array([-0.5, -math.inf], np.float32),
        cumulative_logprob=-math.inf,
        logprobs=logprobs,
        finish_reason="stop",
    )
    ids = [1] * 7
    return RequestOutput(
        request_id="line-3",
        prompt="hi",
        prompt_token_ids=ids,
        prompt_logprobs=prompt_logprobs,
        outputs=[done],
        num_cached_tokens=4,
    )


ENTRIES = [
    {65: Logprob(-0.5, 1, "A"), 66: Logprob(-1.5, 2, "B")},
    {66: Logprob(-math.inf, 9, "\ufffd"), 67: Logprob(-0.1, 1, "é"), 68: Logprob(-2.0, 2, None)},
]


class TestForms:
    def test_chat(self):
        r = parse(
            openai(
                model="gpt",
                temperature=0,
                max_completion_tokens=9,
                max_tokens=5,
                user="u",
                tools=None,
            )
        )
        assert (r.form, r.id, r.model, r.number) == ("chat", "a", "gpt", 3)
        assert conversation(r).conversation == [{"role": "user", "content": "hi"}]
        expected = {
            "chat_template_kwargs": None,
            "add_generation_prompt": True,
            "continue_final_message": False,
        }
        assert conversation(r).template == expected
        assert (r.params.temperature, r.params.top_p, r.params.max_tokens) == (0.0, 0.95, 9)
        assert parse(openai()).params.max_tokens is None

    def test_completion(self):
        r = parse(completion(stop="x", logprobs=2))
        assert (r.form, prompt(r), r.model, r.params.max_tokens, r.params.logprobs) == (
            "completion",
            "hi",
            "m",
            16,
            2,
        )
        assert prompt(parse(completion(prompt=[1, 2]))) == [1, 2]
        assert prompt(parse(completion(prompt=["hi"]))) == "hi"
        assert prompt(parse(completion(prompt=[[1, 2]]))) == [1, 2]

    def test_bare(self):
        r = parse(
            {"prompt": "hi", "top_k": 5, "logit_bias": {"7": -3, "8": 0.5}, "stop": ["a", "b"]}
        )
        assert (r.form, r.id, r.params.top_k, r.params.max_tokens) == ("bare", None, 5, 256)
        assert r.params.logit_bias == {7: -3.0, 8: 0.5} and r.params.stop == ["a", "b"]
        ids = parse({"id": 12, "prompt_token_ids": [1, 2], "max_tokens": 4})
        assert (ids.id, prompt(ids), ids.params.max_tokens, ids.answer_form.token_ids) == (
            12,
            [1, 2],
            4,
            True,
        )
        chat = parse(
            {
                "custom_id": "z",
                "messages": [{"role": "user", "content": "a"}],
                "logprobs": True,
                "top_logprobs": 3,
            }
        )
        assert (chat.id, chat.form, chat.params.max_tokens, chat.params.logprobs) == (
            "z",
            "bare",
            None,
            3,
        )

    def test_text(self):
        text = dataclasses.replace(SETTINGS, text=True)
        assert prompt(parse(b' {"prompt": 1}\r\n', settings=text)) == ' {"prompt": 1}'
        assert prompt(parse(b"\xef\xbb\xbfhi\n", number=1, settings=text)) == "hi"

    def test_every_sampling_field_has_a_check(self):
        values = {
            "temperature": 1,
            "top_p": 0.5,
            "top_k": -1,
            "min_p": 0.1,
            "seed": 5,
            "max_tokens": 3,
            "min_tokens": 1,
            "stop": "s",
            "stop_token_ids": [4],
            "ignore_eos": True,
            "logprobs": 1,
            "prompt_logprobs": 2,
            "logprobs_mode": "tempered",
            "presence_penalty": 0.1,
            "frequency_penalty": -0.1,
            "repetition_penalty": 1.1,
            "logit_bias": {"3": 1},
            "bad_words": ["b"],
            "allowed_token_ids": [1, 2],
            "sampling_mask": True,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "structured": {"regex": "a"},
            "priority": 2,
        }
        fields = {f.name for f in dataclasses.fields(SamplingParams)} - {"n"}
        assert set(values) == fields
        params = parse({"prompt": "a"} | values).params
        wanted = values | {"logit_bias": {3: 1.0}}
        assert {name: getattr(params, name) for name in fields} == wanted

    def test_text_parts_are_joined(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        request = parse(openai(messages=[{"role": "user", "content": parts}]))
        assert conversation(request).conversation == [{"role": "user", "content": "a\nb"}]

    def test_template_arguments(self):
        r = parse(
            openai(chat_template_kwargs={"enable_thinking": False}, continue_final_message=True)
        )
        assert conversation(r).template["chat_template_kwargs"] == {"enable_thinking": False}
        assert conversation(r).template["add_generation_prompt"] is False
        assert conversation(r).template["continue_final_message"] is True


class TestDefaults:
    def test_line_over_command_over_model(self):
        settings = dataclasses.replace(SETTINGS, overrides={"max_tokens": 5, "temperature": 0.1})
        assert parse(completion(), settings=settings).params.max_tokens == 5
        assert parse(openai(max_tokens=None), settings=settings).params.max_tokens == 5
        params = parse({"prompt": "a", "temperature": 0.9}, settings=settings).params
        assert (params.temperature, params.max_tokens, params.top_p) == (0.9, 5, 0.95)

    def test_seeds_depend_on_run_seed_and_id_or_number_only(self):
        def seed(line, number=3, run=0):
            return parse(line, number, dataclasses.replace(SETTINGS, seed=run)).params.seed

        a, b = {"prompt": "a"}, {"prompt": "a", "id": "x"}
        assert seed(a) == seed({"prompt": "b", "top_k": 3}) != seed(a, 4)
        assert seed(b) == seed(b, 4) == seed({"prompt": "c", "custom_id": "x"}) != seed(a)
        assert seed(a) != seed(a, run=1)
        assert seed({"prompt": "a", "seed": 7}) == 7
        assert all(0 <= (seed(a, n) or -1) < 2**63 for n in range(1, 200))
        assert seed(a) == 6462505592221941283  # pinned: a change would break runs that are resumed


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param", "code"),
        [
            (
                {"tools": [{"type": "function", "function": {"name": "f"}}]},
                "tools",
                "unsupported_field",
            ),
            ({"tools": [{"type": "function"}]}, "tools", "invalid_value"),
            ({"tool_choice": "required"}, "tool_choice", "unsupported_field"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
            ({"cache_salt": 3}, "cache_salt", "invalid_value"),
            ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
            ({"stream": True}, "stream", "unsupported_field"),
            ({"echo": True}, "echo", "unsupported_field"),
            ({"best_of": 3}, "best_of", "unsupported_field"),
            ({"suffix": "x"}, "suffix", "unsupported_field"),
            ({"n": True}, "n", "invalid_value"),
            ({"functions": [{}]}, "functions", "unsupported_field"),
            ({"guided_json": 3}, "guided_json", "invalid_value"),
            ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "unsupported_field"),
            ({"chat_template": "{{x}}"}, "chat_template", "unsupported_field"),
            ({"temprature": 1}, "temprature", "unknown_field"),
            ({"temperature": True}, "temperature", "invalid_value"),
            ({"temperature": "1"}, "temperature", "invalid_value"),
            ({"temperature": 10**400}, "temperature", "invalid_value"),
            ({"max_tokens": 4.0}, "max_tokens", "invalid_value"),
            ({"max_tokens": True}, "max_tokens", "invalid_value"),
            ({"seed": 2**64}, "seed", "invalid_value"),
            ({"top_k": "3"}, "top_k", "invalid_value"),
            ({"ignore_eos": 1}, "ignore_eos", "invalid_value"),
            ({"stop": [1]}, "stop", "invalid_value"),
            ({"stop": {}}, "stop", "invalid_value"),
            ({"stop_token_ids": [True]}, "stop_token_ids", "invalid_value"),
            ({"stop_token_ids": 3}, "stop_token_ids", "invalid_value"),
            ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
            ({"logit_bias": {"1": "x"}}, "logit_bias", "invalid_value"),
            ({"logit_bias": [1]}, "logit_bias", "invalid_value"),
            ({"model": 3}, "model", "invalid_value"),
        ],
    )
    def test_field(self, fields, param, code):
        lines = {
            "chat": openai(**fields),
            "completion": completion(**fields),
            "bare": {"prompt": "hi"} | fields,
        }
        for form, line in lines.items():
            request, error = refused(line)
            assert (request.form, error.param, error.code) == (form, param, code)
            assert next(iter(fields)) in str(error)

    @pytest.mark.parametrize(
        "fields",
        [
            {"n": 1},
            {"best_of": 1},
            {"stream": False},
            {"echo": False},
            {"tools": []},
            {"tool_choice": "none"},
            {"response_format": {"type": "text"}},
            {"stream_options": None},
            {"response_format": None},
            {"suffix": ""},
            {"user": "u"},
            {"metadata": {"a": 1}},
            {"store": True},
            {"service_tier": "auto"},
            {"seed": None},
            {"stop": None},
        ],
    )
    def test_values_that_ask_for_nothing_pass(self, fields):
        for line in (openai(**fields), completion(**fields), {"prompt": "hi"} | fields):
            assert (
                parse(line).params
                == parse({k: v for k, v in line.items() if k not in fields}).params
            )

    @pytest.mark.parametrize(
        ("raw", "code"),
        [
            (b"{", "invalid_json"),
            (b"[1]", "invalid_json"),
            (b'"text"', "invalid_json"),
            (b"null", "invalid_json"),
            (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
            (b'{"prompt": "a", "n": Infinity}', "invalid_json"),
            (b"[" * 100_000, "invalid_json"),
            (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
            (b'{"prompt": "\xff"}', "invalid_encoding"),
            (b'{"prompt": "\\ud800"}', "invalid_encoding"),
        ],
    )
    def test_not_a_json_object(self, raw, code):
        request, error = refused(raw)
        assert (request.form, error.code) == ("unknown", code)
        line = error_line(request, error)
        assert line == {
            "id": "batch_req_3",
            "custom_id": None,
            "response": None,
            "error": {"code": code, "message": f"line 3: {error}", "line": 3},
        }

    @pytest.mark.parametrize(
        ("line", "param"),
        [
            ({}, "prompt"),
            ({"prompt": None}, "prompt"),
            ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
            ({"prompt": ["a", "b"]}, "prompt"),
            ({"prompt": [1, "a"]}, "prompt"),
            ({"prompt": [1.0]}, "prompt"),
            ({"prompt": 5}, "prompt"),
            ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
            ({"prompt_token_ids": [[1]]}, "prompt_token_ids"),
            ({"prompt_token_ids": [True]}, "prompt_token_ids"),
            ({"prompt": "a", "id": [1]}, "id"),
            ({"prompt": "a", "top_logprobs": 2}, "top_logprobs"),
            ({"messages": []}, "messages"),
            ({"messages": "hi"}, "messages"),
            ({"messages": ["hi"]}, "messages"),
            ({"messages": [{"content": "hi"}]}, "messages"),
            ({"messages": [{"role": "user"}]}, "messages"),
            (
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
                    ]
                },
                "messages",
            ),
            ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages"),
            (
                {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 3},
                "chat_template_kwargs",
            ),
            (openai(chat_template_kwargs={"chat_template": "{{ 1 }}"}), "chat_template_kwargs"),
            (openai(prompt="hi"), "prompt"),
            (openai(logprobs=2), "logprobs"),
            (openai(top_logprobs=2), "top_logprobs"),
            (openai(add_generation_prompt=True, continue_final_message=True), None),
            (completion(logprobs=True), "logprobs"),
            (completion(messages=[]), "messages"),
            (openai("/v1/moderations"), "url"),
            (openai() | {"url": 3}, "url"),
            (openai() | {"method": "GET"}, "method"),
            (openai() | {"body": [1]}, "body"),
            (openai() | {"custom_id": None}, "custom_id"),
            (openai() | {"custom_id": 3}, "custom_id"),
            (openai() | {"extra": 3}, "extra"),
        ],
    )
    def test_request(self, line, param):
        assert refused(line)[1].param == param

    def test_messages_are_short(self):
        assert len(str(refused({"prompt": [["a" * 10_000], ["b"]]})[1])) < 200


class TestAnswers:
    def test_chat(self):
        request = parse(openai(model="gpt"))
        line = answer_line(request, output())
        body = line["response"].pop("body")
        response = {"status_code": 200, "request_id": "req_3"}
        assert line == {"id": "batch_req_3", "custom_id": "a", "response": response, "error": None}
        assert (body["id"], body["object"], body["model"]) == (
            "chatcmpl-3",
            "chat.completion",
            "gpt",
        )
        assert type(body["created"]) is int
        message = {"role": "assistant", "content": "ab", "refusal": None}
        expected = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
        assert body["choices"] == [expected]
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        assert body["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 4}}

    def test_chat_logprobs(self):
        line = answer_line(parse(openai(logprobs=True, top_logprobs=1)), output(logprobs=ENTRIES))
        a = {"token": "A", "logprob": -0.5, "bytes": [65]}
        rest = {"token": "\ufffd", "logprob": -9999.0, "bytes": None}
        best = {"token": "é", "logprob": pytest.approx(-0.1), "bytes": [195, 169]}
        content = line["response"]["body"]["choices"][0]["logprobs"]["content"]
        assert content == [a | {"top_logprobs": [a]}, rest | {"top_logprobs": [best]}]
        none = answer_line(parse(openai(logprobs=True)), output(logprobs=ENTRIES))
        assert [
            c["top_logprobs"] for c in none["response"]["body"]["choices"][0]["logprobs"]["content"]
        ] == [[], []]

    def test_completion_logprobs(self):
        line = answer_line(parse(completion(logprobs=2)), output(logprobs=ENTRIES))
        body = line["response"]["body"]
        assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "ab")
        assert body["choices"][0]["logprobs"] == {
            "tokens": ["A", "\ufffd"],
            "token_logprobs": [-0.5, -9999.0],
            "top_logprobs": [
                {"A": -0.5, "B": -1.5},
                {"\ufffd": -9999.0, "é": -0.1, "token_id:68": -2.0},
            ],
            "text_offset": [0, 1],
        }

    def test_bare(self):
        line = answer_line(
            parse({"id": "q", "prompt": "hi", "logprobs": 1, "return_token_ids": True}),
            output(logprobs=ENTRIES),
        )
        assert [line[k] for k in ("line", "id", "text", "finish_reason", "token_ids")] == [
            3,
            "q",
            "ab",
            "stop",
            [65, 66],
        ]
        assert len(line["logprobs"]) == 2 and line["usage"]["total_tokens"] == 9
        plain = answer_line(parse({"prompt": "hi"}), output())
        assert set(plain) == {"line", "text", "finish_reason", "stop_reason", "usage"}

    def test_without_a_tokenizer_the_ids_are_the_answer(self):
        line = answer_line(parse({"prompt": [1]}), output(text=None))
        assert (line["text"], line["token_ids"]) == (None, [65, 66])

    def test_prompt_logprobs(self):
        found = output(prompt_logprobs=[None, {65: Logprob(-0.5, 1, "A")}])
        wanted = [None, {"65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"}}]
        assert (
            answer_line(parse({"prompt": "hi", "prompt_logprobs": 0}), found)["prompt_logprobs"]
            == wanted
        )
        body = answer_line(parse(completion(prompt_logprobs=0)), found)["response"]["body"]
        assert body["prompt_logprobs"] == wanted

    @pytest.mark.parametrize(
        ("error", "status", "code", "param"),
        [
            (LineError("bad", param="x", code="c"), 400, "c", "x"),
            (CapacityError("too long"), 400, "context_length_exceeded", None),
            (RequestError("top_p=3: must be"), 400, "invalid_value", "top_p"),
            (GenerationError("lost", []), 500, "generation_failed", None),
            ("it failed", 500, "generation_failed", None),
        ],
    )
    def test_errors(self, error, status, code, param):
        line = error_line(parse(openai()), error)
        assert (line["custom_id"], line["error"], line["response"]["status_code"]) == (
            "a",
            None,
            status,
        )
        found = line["response"]["body"]["error"]
        assert (found["code"], found["param"]) == (code, param)
        assert found["message"].startswith("line 3: ") and str(error) in found["message"]
        bare = error_line(parse({"prompt": "a", "id": 5}), error)
        assert bare == {"line": 3, "id": 5, "error": {**found, "line": 3}}

    def test_encoding(self):
        assert encode_line({"a": "é\n"}) == '{"a": "é\\n"}\n'.encode()
        assert json.loads(encode_line({"a": "\ud800"})) == {"a": "\ud800"}

    def test_errors_in_the_form_of_vllm(self):
        line = error_line(parse(openai()), LineError("bad", param="x", code="c"), "vllm")
        assert line["response"] == {"status_code": 400, "request_id": "req_3", "body": None}
        details = {"message": "line 3: bad", "type": "BadRequestError", "param": "x", "code": 400}
        assert line["error"] == {"error": details} and line["custom_id"] == "a"
        lost = error_line(parse(openai()), RuntimeError("gone"), "vllm")["error"]["error"]
        assert (lost["type"], lost["code"]) == ("InternalServerError", 500)
        for request in (parse({"prompt": "a"}), BatchRequest(number=3)):  # vLLM has no such lines
            assert error_line(request, "x", "vllm") == error_line(request, "x")

    def test_samples(self):
        done = output()
        done.outputs.append(
            dataclasses.replace(done.outputs[0], index=1, text="cd", token_ids=[67, 68, 69])
        )
        body = answer_line(parse(openai(n=2)), done)["response"]["body"]
        assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [
            (0, "ab"),
            (1, "cd"),
        ]
        assert body["usage"]["completion_tokens"] == 5 and body["usage"]["total_tokens"] == 12
        bare = answer_line(parse({"prompt": "a", "n": 2}), done)
        assert [c["text"] for c in bare["choices"]] == ["ab", "cd"] and "text" not in bare

    def test_a_row_tells_its_line(self):
        good = [parse(openai()), parse(completion()), parse({"prompt": "a"})]
        good.append(parse({"prompt": "a", "id": "batch_req_9"}))
        for request in (*good, BatchRequest(number=3)):
            styles = [error_line(request, "x", style) for style in ("openai", "vllm")]
            rows = [(row, True) for row in styles]
            rows += [(answer_line(request, output()), False)] if request in good else []
            for row, failed in rows:
                row = json.loads(encode_line(row))
                assert (row_number(row), row_id(row), row_failed(row)) == (3, request.id, failed)
        for foreign in (
            [],
            3,
            {},
            {"id": "batch_req_3"},
            {"line": "3"},
            {"line": True},
            {"id": "x", "response": {}},
        ):
            assert row_number(foreign) is None


class TestVllmFields:
    def test_conversations_with_tools(self):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "1", "content": "2"}
        made = conversation(parse(openai(messages=[said, result]))).conversation
        called = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
        assert made[0] == {"role": "assistant", "content": "", "tool_calls": [called]}
        assert made[1]["tool_call_id"] == "1"
        for arguments in ("{", "[1]", '{"a": "\\ud800"}'):  # of an answer that was cut off, say
            cut = {**said, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
            [made] = conversation(parse(openai(messages=[cut]))).conversation
            assert made["tool_calls"][0]["function"]["arguments"] == arguments
        bad = {**said, "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}
        assert refused(openai(messages=[bad]))[1].param == "messages"
        for calls in ([{}], "f", [{"function": {}}]):
            assert refused(openai(messages=[{**said, "tool_calls": calls}]))[1].param == "messages"

    def test_what_the_template_is_told(self):
        tools = [{"type": "function", "function": {"name": "f"}}]
        request = parse(openai(tools=tools, tool_choice="none", reasoning_effort="low"))
        assert conversation(request).template["chat_template_kwargs"] == {
            "tools": tools,
            "reasoning_effort": "low",
        }
        for fields in ({"tools": tools, "tool_choice": "none"}, {"reasoning_effort": "low"}):
            assert refused(completion(**fields))[1].code == "unsupported_field"

    def test_unknown_fields_are_left_out_if_asked(self):
        settings = dataclasses.replace(SETTINGS, ignore_unknown=True)
        request = parse(openai(lable=1) | {"note": 2}, settings=settings)
        assert sorted(request.ignored) == ["lable", "note"]
        with pytest.raises(BodyError):  # known, and would change the answer
            parse(openai(documents=[{}]), settings=settings)


@given(
    st.dictionaries(
        st.sampled_from(["id", "custom_id", "body", "url", "x"]),
        st.none() | st.integers() | st.text() | st.booleans(),
    ),
    st.booleans(),
)
def test_an_id_is_the_same_however_it_is_read(line, escaped):
    text = json.dumps(line, ensure_ascii=escaped)
    raw = text.replace('"id"', '"\\u0069d"').encode() if escaped else text.encode(errors="replace")
    request = BatchRequest(number=2)
    with contextlib.suppress(RequestError):
        request.parse(raw, SETTINGS)
    assert identify(raw, 2) == request.id


def test_a_model_that_is_an_adapter() -> None:
    """Of the names of the run alone; others are labels of answers, as ever."""
    settings = dataclasses.replace(SETTINGS, adapters=frozenset({"sql"}))
    for body, wanted in (
        ({"prompt": "a"}, {"prompt": "a", "adapter": "sql"}),
        ({"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 2], "adapter": "sql"}),
        ({"prompt": "a", "cache_salt": "s"}, {"prompt": "a", "cache_salt": "s", "adapter": "sql"}),
    ):
        assert parse({**body, "model": "sql"}, settings=settings).prompt_for(None) == wanted
    assert parse({"prompt": "a", "model": "other"}, settings=settings).prompt_for(None) == "a"
    assert parse({"prompt": "a", "model": "sql"}).prompt_for(None) == "a"


def test_the_flag_of_adapters(tmp_path: Path) -> None:
    assert folders([f"a={tmp_path}"]) == {"a": str(tmp_path)} and folders(None) == {}
    for flag in (["a"], [f"={tmp_path}"], ["a=none"], [f"a={tmp_path}"] * 2):
        with pytest.raises(ConfigError, match="--adapter"):
            folders(flag)
