"""Simon Willison's `llm` against a server: a prompt, a conversation, a schema, a tool."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.served import KEY, Trip, demo, url

pytestmark = pytest.mark.clients
pytest.importorskip("llm", reason="the extra 'clients' is not installed")
MODEL = """
- model_id: demo
  model_name: demo
  api_base: {url}
  api_key_name: demo
  supports_schema: true
  supports_tools: true
"""
SHORT = ("-o", "max_tokens", "12", "-o", "seed", "4")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    folder: Path = tmp_path_factory.mktemp("llm")
    (folder / "keys.json").write_text(json.dumps({"demo": KEY}))
    with demo() as live:
        (folder / "extra-openai-models.yaml").write_text(MODEL.format(url=url(live)))

        def run(*args: str) -> str:
            command = [sys.executable, "-m", "llm", *args]
            env = os.environ | {"LLM_USER_PATH": str(folder)}
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
            assert done.returncode == 0, done.stderr
            return done.stdout

        yield run


def test_a_prompt_and_a_conversation(run: Callable[..., str]) -> None:
    streamed = run("-m", "demo", *SHORT, "Write a class.")
    assert streamed.strip() and streamed == run(
        "-m", "demo", "--no-stream", *SHORT, "Write a class."
    )
    assert run("-c", *SHORT, "And then?").strip()
    [log] = json.loads(run("logs", "-n", "1", "--json"))
    assert log["prompt"] == "And then?" and log["output_tokens"] == 12


def test_a_schema(run: Callable[..., str]) -> None:
    pytest.importorskip("llguidance")
    schema = json.dumps(Trip.model_json_schema() | {"additionalProperties": False})
    for seed in range(8):  # so small a model may write white space up to the limit
        limits = (
            "-o",
            "max_tokens",
            "300",
            "-o",
            "frequency_penalty",
            "1",
            "-o",
            "seed",
            str(seed),
        )
        text = run("-m", "demo", *limits, "--schema", schema, "Write a class.")
        if text.rstrip().endswith("}"):
            assert Trip.model_validate_json(text)
            return
    raise AssertionError("no answer was whole")


def test_a_tool(run: Callable[..., str]) -> None:
    """It is offered; a model of this size calls it by chance."""
    assert run("-m", "demo", *SHORT, "-T", "llm_version", "Which version?") is not None
