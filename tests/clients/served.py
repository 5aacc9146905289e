"""What the clients of a server ask here: the embedded model, with a template that has tools."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pydantic

from jpaged import LLM
from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH
from tests.openai.live import SIZES, TOOL_TEMPLATE, Live, serving

KEY = "secret"
LONGER: dict[str, Any] = {"max_model_len": 1024}
TALK: Any = [{"role": "user", "content": "Write a class."}]


class Trip(pydantic.BaseModel):
    """What is asked of the model, by a schema."""

    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


@contextlib.contextmanager
def demo() -> Iterator[Live]:
    """Serve the embedded model under the name "demo". At the end nothing of a request is left."""
    tokenizer = load_tokenizer(MODEL_PATH)
    tokenizer.chat_template = TOOL_TEMPLATE
    llm = LLM(str(MODEL_PATH), tokenizer=tokenizer, **(SIZES | LONGER))
    with serving(llm, models=("demo",), api_keys=(KEY,)) as live:
        yield live
        live.assert_nothing_left()


def url(live: Live) -> str:
    """Return what a client calls its base URL."""
    return f"http://127.0.0.1:{live.port}/v1"


def whole(ask: Callable[[int], Any], *, seeds: int = 8) -> Any:
    """Return the first answer of ask(seed) that is whole: so small a model may write white space,
    or call after call, up to max_tokens, which the client reports in its own way.
    """
    errors: list[Exception] = []
    for seed in range(seeds):
        try:
            return ask(seed)
        except Exception as e:
            errors.append(e)
    raise AssertionError(f"no answer was whole: {errors}")
