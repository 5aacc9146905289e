"""Bodies in which much is wrong: refusing one costs little, and says little."""

import time
from typing import Any

import pytest

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.protocol import BodyError
from jpaged.openai.server.bodies import ServedChat, ServedCompletion
from jpaged.openai.server.response_bodies import ServedResponse

MANY = 60_000
SAID: dict[str, Any] = {"role": "user", "content": "hi"}
WRONG: dict[str, Any] = {f"x{i}": "a" for i in range(MANY)}
TOOL = {"type": "function", "function": {"name": "a"}}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ServedChat, {"messages": [SAID], "tools": [1] * MANY}, "tools"),
        (ServedChat, {"messages": [SAID], "tools": [TOOL] * MANY}, "tools"),
        (ServedChat, {"messages": [SAID | {"tool_calls": [1] * MANY}]}, "messages"),
        (ServedChat, {"messages": [SAID | WRONG]}, "messages"),
        (ServedChat, {"messages": [1] * MANY}, "messages"),
        (ServedCompletion, {"prompt": "a", "stop": [1] * MANY}, "stop"),
        (ServedCompletion, {"prompt": "a", "logit_bias": WRONG}, "logit_bias"),
        (ServedCompletion, {"prompt": "a"} | WRONG, None),
        (ServedCompletion, {"prompt": [1.5] * MANY}, "prompt"),
        (ServedResponse, {"input": [1] * MANY}, "input"),
        (ServedResponse, {"input": "a", "tools": [1] * MANY}, "tools"),
        (ServedResponse, {"input": "a", "metadata": WRONG}, "metadata"),
    ],
)
def test_many_things_wrong(kind: Any, body: dict[str, Any], param: str | None) -> None:
    """One of them is told, without looking at the others."""
    began = time.process_time()
    with pytest.raises(BodyError) as caught:
        kind.read(body)
    assert time.process_time() - began < 0.3
    assert caught.value.param == param and len(str(caught.value)) < 300
