"""The `instructor` package against a server: all its modes for OpenAI's API."""

from collections.abc import Iterable, Iterator
from typing import Any

import pydantic
import pytest

from tests.clients.served import KEY, TALK, Trip, demo, url, whole

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # they are its own
instructor: Any = pytest.importorskip("instructor", reason="'clients-apart' is not installed")
openai: Any = pytest.importorskip("openai")
pytest.importorskip("llguidance")

# Modes whose answers a schema holds. Its other modes are for the APIs of other companies.
HELD = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON_O1", "FUNCTIONS", "RESPONSES_TOOLS")
FREE = ("JSON", "MD_JSON")  # they put the schema into the prompt alone

ONE: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}


class Note(pydantic.BaseModel):
    """An object of which nothing is needed."""

    text: object = None


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with demo() as live, openai.OpenAI(base_url=url(live), api_key=KEY, max_retries=0) as client:
        yield client


def ask(client: Any, mode: str, kind: Any, **more: Any) -> Any:
    made = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    asked = {"model": "demo", "messages": TALK, "max_tokens": 300, "max_retries": 0}
    create = made.chat.completions.create
    return whole(
        lambda seed: create(
            response_model=kind,
            extra_body={"seed": seed, "repetition_penalty": 1.3, **more},
            **asked,
        )
    )


@pytest.mark.parametrize("mode", HELD)
def test_modes_with_a_schema(client: Any, mode: str) -> None:
    """RESPONSES_TOOLS sends the schema twice: as the form of a text beside a call demanded."""
    assert isinstance(ask(client, mode, Trip), Trip)


@pytest.mark.parametrize("mode", FREE)
def test_modes_without_one(client: Any, mode: str) -> None:
    """JSON asks for any object; the form of MD_JSON is the request's own here, since the model is
    too small to follow a prompt.
    """
    if mode == "JSON":
        assert isinstance(ask(client, mode, Note), Note)
    else:
        form = {"json": Trip.model_json_schema(), "disable_any_whitespace": True}
        assert isinstance(ask(client, mode, Trip, structured_outputs=form), Trip)


def test_several_calls_and_pieces(client: Any) -> None:
    found = ask(client, "PARALLEL_TOOLS", Iterable[Trip], **ONE)
    assert all(isinstance(trip, Trip) for trip in found)
    made = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    asked = {"model": "demo", "messages": TALK, "max_tokens": 300, "response_model": Trip}
    *_, last = made.chat.completions.create_partial(seed=1, **asked)
    assert last.city in ("Rome", "Oslo")
