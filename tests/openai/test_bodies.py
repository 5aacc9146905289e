"""Bodies in which much is wrong: refusing one costs little, and says little."""

import sys
import time
from typing import Any

import pytest

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.fields import MOST_IDS
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


class Watched(dict[str, Any]):
    """A dict that counts the items that were looked at."""

    looked_at = 0

    def items(self) -> Any:
        for item in super().items():
            self.looked_at += 1
            yield item


def test_biases_of_one_hash():
    """Ints that are equal modulo 2**61 - 1 have one hash: a dict of n such keys takes n * n steps.
    None is ever a key of one.
    """
    keys = [k * sys.hash_info.modulus for k in range(1, 30_000)]
    assert len({hash(key) for key in keys}) == 1
    biases = Watched({str(key): 1.0 for key in keys})
    with pytest.raises(BodyError, match=r"2305843009213693951.* is not a token id"):
        ServedCompletion.read({"prompt": "a", "logit_bias": biases})
    assert biases.looked_at == 1
    # And ids that are taken are their own hashes, which differ.
    assert sys.hash_info.modulus > MOST_IDS
