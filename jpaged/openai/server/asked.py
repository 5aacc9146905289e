"""Asked: a request whose body has been read and checked."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jpaged.openai.parts import Reader
from jpaged.openai.responses import AnswerForm
from jpaged.openai.server.bodies import Served
from jpaged.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A request whose body has been read and checked.

    echo: the texts of the prompts, if they are to be repeated. reader: makes the reader of a chat's
    answer. prompt_sizes: tokens of the prompts, if every event of a stream reports the usage so
    far. begun: tokens that the request gave for the answer to begin
    with. keep: gets the answer of /v1/responses once it has ended, if it is to be kept.
    """

    body: Served
    params: SamplingParams
    prompts: list[Any]
    form: AnswerForm
    model: str
    name: str
    echo: list[str] | None
    reader: Callable[[], Reader]
    prompt_sizes: list[int] | None = None
    begun: int = 0
    keep: Callable[[dict[str, Any]], None] | None = None

    @property
    def how(self) -> dict[str, Any]:
        return {"name": self.name, "model": self.model}
