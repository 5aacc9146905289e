"""RolloutModel under the loop of marin's rolloutengine, written here after its contract: every next
prompt begins with the tokens that were served, and all of them have their logprobs.
"""

import asyncio
import dataclasses
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jpaged
from jpaged import ConfigError, RequestError, SamplingParams
from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH

# Reasoning of earlier turns is not written again, and tools are described first: as Qwen 3 does.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHELL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
CALL = (
    '<think>hm</think><tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
)


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    messages: tuple[dict[str, Any], ...]
    options: dict[str, Any]
    prefix_token_ids: tuple[int, ...]
    assistant_message_index: int | None


@dataclasses.dataclass(frozen=True)
class ModelTurn:
    message: dict[str, Any]
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    stop_reason: str
    text: str = ""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


class GenerationLimitReached(Exception):
    def __init__(self, prompt_token_ids: tuple[int, ...]):
        self.prompt_token_ids = prompt_token_ids
        super().__init__("The prompt reached the configured generation limit")


class RolloutContractError(ValueError):
    pass


@pytest.fixture(scope="module")
def rollout_model() -> Iterator[Any]:
    """The class, over a rolloutengine of the records above."""
    names = ("rolloutengine", "rolloutengine.contracts")
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[names[1]]).update(
        {x.__name__: x for x in (ModelTurn, GenerationLimitReached, RolloutContractError)}
    )
    from jpaged.integrations.marin import RolloutModel

    yield RolloutModel
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(scope="module")
def llm() -> Iterator[jpaged.LLM]:
    tokenizer = load_tokenizer(MODEL_PATH)
    tokenizer.chat_template = TEMPLATE
    params = jpaged.load_params(MODEL_PATH, dtype="float32")
    llm = jpaged.LLM(
        params,
        tokenizer=tokenizer,
        max_model_len=320,
        max_num_batched_tokens=64,
        token_buckets=(64,),
        seq_buckets=(4,),
        max_num_seqs=4,
        num_blocks=64,
        decode_steps=4,
    )
    yield llm
    llm.close()


def answering(*texts: str, max_tokens: int = 60) -> SamplingParams:
    """A random one of some texts."""
    return SamplingParams(
        temperature=1.0, max_tokens=max_tokens, structured={"choice": list(texts)}
    )


async def episode(model: Any, messages: list[dict[str, Any]], turns: int, options: Any) -> Any:
    """The engine's loop: tokens, which of them were drawn, their logprobs, and the turns."""
    tokens: tuple[int, ...] = ()
    mask: list[int] = []
    logprobs: list[float] = []
    done: list[ModelTurn] = []
    index = None
    for _ in range(turns):
        turn = await model(ModelRequest(tuple(messages), options, tokens, index))
        if index is None:
            tokens, mask, logprobs = turn.prompt_token_ids, [], []
        assert turn.prompt_token_ids[: len(tokens)] == tokens, "the served prefix is changed"
        assert turn.response_token_ids and len(turn.logprobs) == len(turn.response_token_ids)
        observed = len(turn.prompt_token_ids) - len(tokens)
        mask += [0] * observed + [1] * len(turn.response_token_ids)
        logprobs += [0.0] * observed + list(turn.logprobs)
        tokens = turn.prompt_token_ids + turn.response_token_ids
        index = len(messages)
        messages.append(turn.message)
        done.append(turn)
        for call in turn.message.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a.py"})
        if not turn.message.get("tool_calls"):
            messages.append({"role": "user", "content": "Go on."})
    return tokens, mask, logprobs, done


def test_turns_by_exact_tokens(rollout_model: Any, llm: jpaged.LLM) -> None:
    """Two episodes at once, with a call, a text and a text that is cut."""
    calling, saying, cut = (
        rollout_model(llm, params)
        for params in (
            answering(CALL),
            answering("<think>so</think>It is a.py.", "<think>ah</think>Nothing."),
            answering("abcdefgh" * 9, max_tokens=3),
        )
    )

    async def model(request: ModelRequest) -> ModelTurn:
        last = request.messages[-1]
        if last["role"] == "tool":
            return await saying(request)
        return await (calling if request.assistant_message_index is None else cut)(request)

    async def both() -> Any:
        start = [{"role": "user", "content": "What is here?"}]
        options = {"tools": [SHELL], "tool_choice": "auto"}
        return await asyncio.gather(*(episode(model, [*start], 4, options) for _ in range(2)))

    for tokens, mask, logprobs, (first, second, third, fourth) in asyncio.run(both()):
        function = first.message["tool_calls"][0]["function"]
        assert function["name"] == "shell" and json.loads(function["arguments"])["command"] == "ls"
        assert first.message["reasoning_content"].strip() == "hm" and first.text == CALL
        assert second.message["content"].strip() in ("It is a.py.", "Nothing.")
        assert [x.stop_reason for x in (first, second, third)] == ["stop", "stop", "length"]
        text = llm.tokenizer.decode(list(tokens))
        assert text.count("What is here?") == text.count("a.py<|im_end|>") == 1
        assert text.count("<think>") == 2, "what was served stays, though the template drops it"
        assert text.count("Go on.<|im_end|>\n<|im_start|>assistant\n") == 2
        assert text.count("<|im_end|>\n<|im_end|>") == 0
        behind = len(fourth.prompt_token_ids) - len(third.prompt_token_ids)
        added = fourth.prompt_token_ids[-behind:][len(third.response_token_ids) :]
        assert llm.tokenizer.decode(list(added)).startswith("<|im_end|>\n<|im_start|>user\nGo on.")
        # One forward pass over the whole trajectory gives the same numbers.
        scores = np.asarray(llm.score([list(tokens)])[0])
        drawn = np.array(mask, bool)
        scored = scores[len(tokens) - len(mask) - 1 :]
        np.testing.assert_allclose(np.array(logprobs)[drawn], scored[drawn], atol=1e-4)
        assert first.metadata["weight_versions"] == [(1, 0, len(first.response_token_ids))]


def test_limits_and_refusals(rollout_model: Any, llm: jpaged.LLM) -> None:
    model = rollout_model(llm, answering("yes", max_tokens=500))
    ask = ({"role": "user", "content": "x"},)
    turn = asyncio.run(model(ModelRequest(ask, {}, (), None)))  # more tokens than there is room for
    assert turn.message == {"role": "assistant", "content": "yes"}
    long = ({"role": "user", "content": "x y " * 400},)
    with pytest.raises(GenerationLimitReached) as limit:
        asyncio.run(model(ModelRequest(long, {}, (), None)))
    assert len(limit.value.prompt_token_ids) >= 320
    for name, value in (("tool_choice", "required"), ("response_format", {})):
        with pytest.raises(RequestError, match=rf"options\['{name}'\]="):
            asyncio.run(model(ModelRequest(ask, {name: value}, (), None)))
    with pytest.raises(ConfigError, match="n=2: a turn is one completion"):
        rollout_model(llm, SamplingParams(n=2))
    told = ({"role": "user", "content": "x"}, turn.message, ask[0])
    llm.tokenizer.chat_template = TEMPLATE.replace("m.content", "'.'")
    with pytest.raises(RolloutContractError, match="message 1: the chat template writes it 0"):
        asyncio.run(model(ModelRequest(told, {}, turn.prompt_token_ids, 1)))
    llm.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="whose tokenizer has a chat template"):
        rollout_model(llm, SamplingParams())
    llm.tokenizer.chat_template = TEMPLATE


def test_needs_rolloutengine(llm: jpaged.LLM) -> None:
    from jpaged.integrations.marin import RolloutModel

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rolloutengine.contracts", None)
        with pytest.raises(ImportError, match="needs marin's rolloutengine"):
            RolloutModel(llm, SamplingParams())
