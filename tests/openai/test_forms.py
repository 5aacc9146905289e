"""Every way in which a body asks for an answer of a given form, and what each comes to."""

from typing import Any

import pytest

from jpaged.openai.protocol import BodyError, ChatCompletionRequest, CompletionRequest

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": None}}
FORMS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": NAMED}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": "{}", "regex": None}}, {"json_schema": "{}"}),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        {"json_object": True, "disable_any_whitespace": True},
    ),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ["a"]}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"structured": {"regex": "a+"}}, {"regex": "a+"}),
]


@pytest.mark.parametrize(("fields", "form"), FORMS, ids=str)
def test_a_form(fields: dict[str, Any], form: dict[str, Any] | None) -> None:
    for kind, asked in (
        (CompletionRequest, {"prompt": "a"}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        assert kind.read(asked | fields).sampling().get("structured") == form


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json"),
        ({"response_format": NAMED, "structured": {"regex": "a"}}, "response_format"),
    ],
    ids=str,
)
def test_what_is_no_form(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        CompletionRequest.read({"prompt": "a"} | fields)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")
