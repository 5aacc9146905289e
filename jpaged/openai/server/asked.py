"""Asked: a request that was understood."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jpaged.openai.parts import Reader
from jpaged.openai.responses import AnswerForm
from jpaged.openai.server.bodies import Served
from jpaged.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was understood. echo: the texts of the prompts, where they are repeated.
    reader: makes what reads a chat's answer. prompt_sizes: tokens of the prompts, where a stream
    reports them as it goes on.
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

    @property
    def how(self) -> dict[str, Any]:
        return {"name": self.name, "model": self.model}
