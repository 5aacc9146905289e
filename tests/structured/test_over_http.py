"""A server's answers of a given form are the library's, also in pieces; bad forms are a 400."""

from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from tests.openai.live import serving
from tests.structured.test_structured import COMPACT, SCHEMA, ask, make_llm, run

URL = "/v1/completions"
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        {"json_schema": SCHEMA},
    ),
    ({"structured_outputs": {"json": SCHEMA} | COMPACT}, {"json_schema": SCHEMA} | COMPACT),
    ({"guided_regex": "[ab]{5}"}, {"regex": "[ab]{5}"}),
]


def test_same_seeds_same_tokens() -> None:
    expected = [run(make_llm(), [ask(form, 7)], ["say: "])[0] for _, form in FORMS]
    with serving(make_llm()) as live:
        for (fields, _), done in zip(FORMS, expected, strict=True):
            body = {"model": "tiny", "prompt": "say: ", "seed": 7, "max_tokens": 60} | fields
            (choice,) = live.post(URL, body)["choices"]
            assert (choice["text"], choice["finish_reason"]) == (done.text, done.finish_reason)
            pieces = [c for event in live.events(URL, body) for c in event["choices"]]
            assert "".join(piece["text"] for piece in pieces) == done.text
        for form in ({"guided_regex": "("}, {"guided_json": {"type": "no such"}}):
            status, answer, _ = live.request(URL, {"model": "tiny", "prompt": "a"} | form)
            assert (status, answer["error"]["param"]) == (400, "structured")
        live.assert_nothing_left()
