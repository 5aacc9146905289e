"""/openapi.json: the routes are described, answers are as described, and schemathesis finds nothing
(pip install 'jpaged[fuzz]').
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM
from tests.text_model import make_tokenizer, write_folder

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")
pytest.importorskip("jsonschema", reason="pip install 'jpaged[test]'")

import jsonschema

from jpaged.openai.server.bodies import ServedChat
from tests.openai.live import Live, serving
from tests.openai.test_tools import SETTINGS, TEMPLATE

# Answers 400 to what a schema cannot say: that tokens are of the vocabulary, that a prompt fits.
LEFT_OUT = "positive_data_acceptance"
TALK = [{"role": "user", "content": "hey"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 4, "logprobs": True},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 4, "logprobs": 2},
    "/v1/responses": {"input": "hey", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "hey"},
    "/v1/messages": {"messages": TALK, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": TALK},
    "/tokenize": {"prompt": "hey"},
    "/detokenize": {"tokens": [40, 41], "return_token_strs": True},
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_folder(tmp_path_factory.mktemp("openapi") / "tiny")
    llm = LLM(folder, tokenizer=make_tokenizer(TEMPLATE), **SETTINGS)
    with serving(llm, keep_responses_s=60.0, max_choices=4) as live:
        yield live
        live.assert_nothing_left()


@pytest.fixture(scope="module")
def document(live: Live) -> dict[str, Any]:
    status, document, _ = live.request("/openapi.json")
    assert status == 200
    return document


def valid(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    jsonschema.validate(value, {**schema, "components": document["components"]})


def test_all_routes_are_described(live: Live, document: dict[str, Any]) -> None:
    hidden = {"/", "/page/{name}", "/openapi.json"}
    routes: Any = live.server.app.routes
    served = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in routes
        for method in route.methods - {"HEAD"}
        if route.path not in hidden
    }
    described = {(path, verb) for path, item in document["paths"].items() for verb in item}
    assert described == served


@pytest.mark.parametrize("path", ASKED)
def test_bodies_and_answers_are_as_described(
    live: Live, document: dict[str, Any], path: str
) -> None:
    operation = document["paths"][path]["post"]
    body_schema = operation["requestBody"]["content"]["application/json"]["schema"]
    valid(document, body_schema, ASKED[path])
    answer = live.post(path, ASKED[path])
    valid(document, operation["responses"]["200"]["content"]["application/json"]["schema"], answer)
    wrong = ASKED[path] | dict.fromkeys(("messages", "prompt", "input", "tokens"), 5)
    with pytest.raises(jsonschema.ValidationError):
        valid(document, body_schema, wrong)
    status, error, _ = live.request(path, wrong)
    assert status == 400
    valid(document, operation["responses"]["4XX"]["content"]["application/json"]["schema"], error)


def test_it_is_made_from_the_models(live: Live, document: dict[str, Any]) -> None:
    """Every field of a body is there, null is a value of what may be left out, and the names that
    are served are those of `model`.
    """
    schema = document["components"]["schemas"]["ServedChat"]
    assert set(schema["properties"]) == set(ServedChat.model_fields)
    assert schema["properties"]["model"] == {"enum": ["tiny", None]}
    reference = {"$ref": "#/components/schemas/ServedChat"}
    valid(document, reference, {"messages": TALK} | dict.fromkeys(("seed", "n", "tools")))
    part = [{"type": "text", "text": "a"}]
    valid(document, reference, {"messages": [{"role": "user", "content": part}]})
    assert document["info"]["version"] == live.request("/version")[1]["version"]
    assert "securitySchemes" not in document["components"]


def test_a_wrong_method_is_told_the_right_one(live: Live) -> None:
    status, _, headers = live.request("/v1/completions")
    assert status == 405 and headers["allow"] == "POST"


def fuzz(live: Live, folder: Path, *options: str) -> int:
    """Ask everything that the document allows, and much that it does not; return how many
    operations were asked.
    """
    url = f"http://127.0.0.1:{live.port}/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", url, "--no-color"]
    command += ["--exclude-checks", LEFT_OUT, "--continue-on-failure"]
    command += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "60"]
    command += ["--seed", "7", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    tested = re.search(r"Tested: (\d+)", ran.stdout)
    assert tested is not None
    return int(tested[1])


needs_schemathesis = pytest.mark.skipif(
    find_spec("schemathesis") is None, reason="the extra 'fuzz' is not installed"
)


@needs_schemathesis
def test_schemathesis_finds_nothing(live: Live, tmp_path: Path) -> None:
    assert fuzz(live, tmp_path, "--max-examples", "4") >= 17


@needs_schemathesis
def test_schemathesis_finds_nothing_of_images(tmp_path: Path) -> None:
    """Bodies with images in all forms, at a model that sees."""
    vision = pytest.importorskip("tests.vision_folder", reason="pip install 'jpaged[images]'")
    llm = LLM(vision.write_vision_folder(tmp_path / "seeing"), **vision.ENGINE)
    paths = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
    chosen = [option for path in paths for option in ("--include-path", path)]
    with serving(llm, max_output_tokens=4, max_choices=2) as live:
        assert fuzz(live, tmp_path, "--max-examples", "6", *chosen) == 3
        live.assert_nothing_left()
