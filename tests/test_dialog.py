"""Dialogs: turns by exact tokens, each scored once as a whole, and as arrays for a trainer."""

import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jpaged
from jpaged import LLM, Dialog, RequestError, SamplingParams
from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH
from jpaged.request import renderer as renderer_module

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
SHELL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
# Tools are described first; reasoning is written again, as long as it is not left out below.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = TEMPLATE.replace(
    "{% if m.reasoning_content %}", "{% if loop.last and m.role == 'assistant' %}"
)
ASK = {"role": "user", "content": "What is here?"}


class Bridge:
    """A stand-in for a renderer of the package `renderers`, which is not installed here: it writes
    as TEMPLATE does, and notes what it was asked. tests/clients/test_renderers.py has the package.
    """

    def __init__(self, tokenizer: Any, answer: Any = None):
        self.tokenizer, self.answer, self.asked = tokenizer, answer, list[Any]()

    def bridge_to_next_turn(
        self, prompt: list[int], completion: list[int], messages: list[Any], *, tools: Any = None
    ) -> Any:
        self.asked.append((prompt, completion, messages, tools))
        if self.answer is not None:
            return self.answer(prompt, completion)
        if any(message["role"] == "assistant" for message in messages):
            return None
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        close = [] if completion[-1] == end else [end]
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        text = "\n" + "".join(turns) + "<|im_start|>assistant\n"
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return types.SimpleNamespace(token_ids=[*prompt, *completion, *close, *ids])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    tokenizer = load_tokenizer(MODEL_PATH)
    tokenizer.chat_template = TEMPLATE
    llm = LLM(
        jpaged.load_params(MODEL_PATH, dtype="float32"),
        tokenizer=tokenizer,
        max_model_len=256,
        max_num_batched_tokens=64,
        token_buckets=(64,),
        seq_buckets=(4,),
        max_num_seqs=4,
        num_blocks=64,
        decode_steps=4,
    )
    yield llm
    llm.close()


def saying(*texts: str, max_tokens: int = 60) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, structured={"choice": list(texts)})


def test_turns_by_exact_tokens(llm: LLM) -> None:
    """A call, its result, a turn that is cut, and what follows it: earlier tokens stay, their keys
    and values are found again, and one score of the whole gives the logprobs of all turns.
    """
    dialog = Dialog(llm, [ASK], tools=[SHELL], group=5)
    begin = dialog.token_ids
    call = dialog.reply(saying(CALL))
    (asked,) = call.tool_calls
    assert json.loads(asked["function"]["arguments"]) == {"command": "ls"}
    assert dialog.token_ids == begin + call.token_ids and call.start == len(begin)
    with pytest.raises(RequestError, match="the last message is the model's"):
        _ = dialog.prompt
    dialog.add({"role": "tool", "tool_call_id": asked["id"], "content": "a.py"})
    assert dialog.token_ids[: call.start + len(call.token_ids)] == begin + call.token_ids
    (out,) = llm.generate(dialog.prompt, saying("It is a.py."), use_tqdm=False)
    assert out.num_cached_tokens > call.start, "drawn tokens too"
    said = dialog.take(out)
    assert said.message == {"role": "assistant", "content": "It is a.py."}
    dialog.add([{"role": "user", "content": "Go"}])
    dialog.add({"role": "user", "content": "on."})
    cut = dialog.reply(saying("abcdefgh" * 6, max_tokens=3))
    assert cut.finish_reason == "length"
    dialog.add(ASK)
    text = llm.tokenizer.decode(dialog.prompt)
    behind = f"{cut.text}<|im_end|>\n<|im_start|>user\nWhat is here?<|im_end|>\n"
    assert text.endswith(f"{behind}<|im_start|>assistant\n"), "its end comes from the template"
    assert "<|im_start|>user\nGo<|im_end|>\n<|im_start|>user\non.<|im_end|>\n" in text
    # As the template writes it, but for how the words of turns are cut into tokens.
    whole = llm.tokenizer.apply_chat_template(
        [
            message
            | {"tool_calls": [{"function": {"name": "shell", "arguments": {"command": "ls"}}}]}
            if message.get("tool_calls")
            else message
            for message in dialog.messages
        ],
        tools=[SHELL],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == whole
    arrays = jpaged.dialog_arrays([dialog], max_len=256)
    scores = np.asarray(llm.score([dialog.token_ids])[0])
    mask = arrays["loss_mask"][0]
    drawn = [*call.token_ids, *said.token_ids, *cut.token_ids]
    assert arrays["tokens"][0][mask].tolist() == drawn and arrays["group_ids"].tolist() == [5]
    np.testing.assert_allclose(
        arrays["logprobs"][0][mask], scores[np.flatnonzero(mask) - 1], atol=1e-4
    )
    assert arrays["turn_ids"][0][mask].tolist() == [0] * len(call.token_ids) + [1] * len(
        said.token_ids
    ) + [2] * len(cut.token_ids)
    assert set(arrays["weight_versions"][0][mask]) == {1} and not arrays["finished"][0]
    for name, masked in (("logprobs", 0), ("weight_versions", 0), ("turn_ids", -1)):
        assert set(arrays[name][0][~mask]) == {masked}
    assert arrays["mask"][0].sum() == arrays["lens"][0] == len(dialog.token_ids)


def test_a_template_that_writes_earlier_turns_anew(llm: LLM) -> None:
    """The error names the first token that differs, and leaves the dialog as it was; "keep" goes on
    from what was served.
    """
    llm.tokenizer.chat_template = FORGETFUL
    try:
        for rewritten in ("error", "keep"):
            dialog = Dialog(llm, [ASK], rewritten=rewritten)
            turn = dialog.reply(saying("<think>hm</think>Yes."))
            assert turn.message["reasoning_content"].strip() == "hm"
            assert turn.message["content"].strip() == "Yes."
            served = dialog.token_ids
            if rewritten == "error":
                place = len(dialog.token_ids) - len(turn.token_ids)
                said = rf"token {place} of the 2 earlier messages is '<.*' \(\d+\), and 'Y"
                with pytest.raises(RequestError, match=said):
                    dialog.add(ASK)
                assert dialog.token_ids == served and len(dialog.messages) == 2
                continue
            dialog.add(ASK)
            assert dialog.token_ids[: len(served)] == served
            assert llm.tokenizer.decode(dialog.token_ids).count("<think>hm</think>") == 1
    finally:
        llm.tokenizer.chat_template = TEMPLATE


def test_a_renderer_writes_what_comes_behind(llm: LLM) -> None:
    """It is given what was served, by exact tokens, and the new messages alone; what the template
    would write is the same here, also behind a turn that was cut.
    """
    bridge = Bridge(llm.tokenizer)
    ours = Dialog(llm, [ASK], tools=[SHELL], renderer=bridge)
    plain = Dialog(llm, [ASK], tools=[SHELL], renderer=None)
    for asked in (saying(CALL), saying("abcdefgh" * 6, max_tokens=3)):
        (out,) = llm.generate(ours.prompt, asked, use_tqdm=False)
        turns = [dialog.take(out) for dialog in (ours, plain)]
        added = {"role": "tool", "content": "a.py"}
        for dialog in (ours, plain):
            dialog.add(added)
            dialog.add([{"role": "user", "content": "Go on."}])
        assert ours.token_ids == plain.token_ids
        prompt, completion, messages, tools = bridge.asked[-1]
        assert [*prompt, *completion] == ours.token_ids[: len(prompt) + len(completion)]
        assert (len(prompt), completion) == (turns[0].start, turns[0].token_ids)
        assert messages == [added, {"role": "user", "content": "Go on."}]
        assert tools == [SHELL["function"]]


def test_what_a_renderer_leaves_open_is_the_templates(llm: LLM) -> None:
    bridge = Bridge(llm.tokenizer)
    dialog = Dialog(llm, [ASK], renderer=bridge)
    dialog.reply(saying("Yes."))
    dialog.add([{"role": "assistant", "content": "And"}, ASK])
    assert len(bridge.asked) == 1
    text = llm.tokenizer.decode(dialog.token_ids)
    assert text.endswith(
        "Yes.<|im_end|>\n<|im_start|>assistant\nAnd<|im_end|>\n<|im_start|>user\nWhat is here?"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_renderer_changes_nothing_that_was_served(llm: LLM) -> None:
    """One that would is an error, which names the first token that differs; the dialog stays."""

    def changed(prompt: list[int], completion: list[int]) -> Any:
        return types.SimpleNamespace(token_ids=[*prompt, completion[0] + 1, *completion[1:], 5])

    def short(prompt: list[int], completion: list[int]) -> Any:
        return types.SimpleNamespace(token_ids=prompt)

    def refused(prompt: list[int], completion: list[int]) -> Any:
        raise ValueError("no such role")

    for answer, said in (
        (changed, r"token {at} was served as {was}, and Bridge has \d+ there"),
        (short, r"token {at} was served as {was}, and Bridge has nothing there"),
        (refused, "messages: Bridge refuses them: no such role"),
    ):
        dialog = Dialog(llm, [ASK], renderer=Bridge(llm.tokenizer, answer))
        turn = dialog.reply(saying("Yes."))
        before = dialog.token_ids
        with pytest.raises(RequestError, match=said.format(at=turn.start, was=turn.token_ids[0])):
            dialog.add(ASK)
        assert dialog.token_ids == before and len(dialog.messages) == 2


def test_a_model_that_the_package_lists(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name; not where its renderer refuses the template's variables, nor any other model."""
    made = list[Any]()

    def create_renderer(tokenizer: Any, *, chat_template_kwargs: Any = None) -> Bridge:
        if chat_template_kwargs:
            raise ValueError("no such variable")
        made.append(Bridge(tokenizer))
        return made[-1]

    package, base = types.ModuleType("renderers"), types.ModuleType("renderers.base")
    package.create_renderer = create_renderer  # pyright: ignore[reportAttributeAccessIssue]
    base.MODEL_RENDERER_MAP = {"OWNER/known": "known"}  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "renderers", package)
    monkeypatch.setitem(sys.modules, "renderers.base", base)
    renderer_module._known.cache_clear()
    try:
        Dialog(llm, [ASK])
        assert not made
        monkeypatch.setattr(llm.tokenizer, "name_or_path", "OWNER/known")
        Dialog(llm, [ASK], renderer=None)
        Dialog(llm, [ASK], chat_template_kwargs={"tone": "dry"})
        assert not made
        dialog = Dialog(llm, [ASK])
        dialog.reply(saying("Yes."))
        dialog.add(ASK)
        assert len(made) == 1 and len(made[0].asked) == 1
    finally:
        renderer_module._known.cache_clear()
    with pytest.raises(RequestError, match="renderer='no'"):
        Dialog(llm, [ASK], renderer="no")  # pyright: ignore[reportArgumentType]


@pytest.mark.middle
def test_many_dialogs_in_one_call(llm: LLM) -> None:
    """And rows of different lengths, which are cut, or left out."""
    dialogs = [Dialog(llm, [{"role": "user", "content": "x" * n}], group=n) for n in (1, 9, 40)]
    with pytest.raises(RequestError, match=r"of another prompt: token \d+ is \d+ in the dialog"):
        dialogs[0].take(llm.generate(dialogs[1].prompt, saying("yes"), use_tqdm=False)[0])
    for _ in range(2):
        prompts = [one.prompt for one in dialogs]
        for one, out in zip(
            dialogs, llm.generate(prompts, saying("yes", "no"), use_tqdm=False), strict=True
        ):
            assert one.take(out).finish_reason == "stop"
        lengths = [len(one.token_ids) for one in dialogs]
        arrays = jpaged.dialog_arrays(dialogs, pad_id=7)
        assert arrays["tokens"].shape == (3, max(lengths)) and arrays["finished"].all()
        assert arrays["tokens"][0, lengths[0]] == 7 and arrays["lens"].tolist() == lengths
        for one in dialogs:
            one.add(ASK)
    width = len(dialogs[0].token_ids)
    with pytest.raises(RequestError, match=f"dialog 1 has .* tokens, over max_len={width}"):
        jpaged.dialog_arrays(dialogs, max_len=width)
    left = jpaged.dialog_arrays(dialogs, max_len=width, overflow="drop")
    assert left["index"].tolist() == [0] and left["group_ids"].tolist() == [1]
    cut = jpaged.dialog_arrays(dialogs, max_len=dialogs[2].turns[1].start + 1, overflow="truncate")
    assert cut["loss_mask"][2, -1] and cut["turn_ids"][2, -1] == 1
    assert cut["finished"].tolist() == [True, True, False]


def test_what_is_no_turn(llm: LLM) -> None:
    dialog: Any = Dialog(llm, [ASK])
    dialog.add({"role": "user", "content": "Or there?"})
    assert dialog.prompt == llm.render_chat([ASK, {"role": "user", "content": "Or there?"}])
    name = llm.add_request(dialog.prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    llm.step()
    with pytest.raises(RequestError, match="no whole turn: it was cut"):
        dialog.take(llm.abort(name))
    (pair,) = llm.generate(dialog.prompt, SamplingParams(n=2, max_tokens=2), use_tqdm=False)
    with pytest.raises(RequestError, match="index=2: must be at least 0 and at most 1"):
        dialog.take(pair, 2)
    assert dialog.take(pair, 1).token_ids == pair.outputs[1].token_ids
    with pytest.raises(RequestError, match="rewritten='no'"):
        Dialog(llm, [ASK], rewritten="no")  # pyright: ignore[reportArgumentType]
