"""PromptReader: what of an LLM is needed where prompts are read, and no weights or engine are."""

from collections.abc import Mapping
from typing import Self

from jpaged.config import EngineConfig
from jpaged.models.config import ModelConfig
from jpaged.request.build import Builder
from jpaged.request.inputs import Chat, Inputs
from jpaged.sampling_params import SamplingParams
from jpaged.types import Messages, Tokenizer


class PromptReader:
    """Stands in an LLM's place for what reads prompts and writes answers. config: resolved."""

    def __init__(self, model: ModelConfig, config: EngineConfig, inputs: Inputs):
        self.model_config, self.engine_config = model, config
        self.inputs = inputs
        self.builder = Builder(inputs, config)

    @property
    def session(self) -> Self:
        """This object, which has `inputs` and `builder` as an LLM's session does."""
        return self

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.inputs.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        return self.inputs.default_sampling_params()

    def render_chat(
        self,
        messages: Messages,
        *,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Return the token ids of one conversation: see LLM.render_chat."""
        chat = Chat(
            messages=messages,
            template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.inputs.conversation(chat, needs_sources=False)[0]
