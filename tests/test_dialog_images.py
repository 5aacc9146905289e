"""Dialogs with images: of the first message, of the result of a tool, of a later one; what was
served stays, earlier images are found in the prefix cache, and a loss gives the same logprobs.
"""

import asyncio
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jpaged
from jpaged import LLM, Dialog, Params, RequestError, SamplingParams
from tests.vision_folder import (
    BEGIN,
    END,
    ENGINE,
    EOS,
    IMAGE,
    ROWS,
    TEMPLATE,
    make_tokenizer,
    picture,
    write_vision_folder,
)

# Messages end in a token that ends answers.
ENDING = TEMPLATE.replace("{% endfor %};{% endfor %}", "{% endfor %}<eos>{% endfor %}")
SAMPLING = SamplingParams(
    max_tokens=5, temperature=1.0, seed=7, logprobs_mode="tempered", ignore_eos=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_folder(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def params(folder: Path) -> Params:
    return jpaged.load_params(folder, images=True)


@pytest.fixture(scope="module")
def llm(params: Params) -> Iterator[LLM]:
    assert ENDING != TEMPLATE
    llm = LLM(params, tokenizer=make_tokenizer(ENDING), **ENGINE)
    yield llm
    llm.close()


def look(text: str, *shades: int, role: str = "user") -> dict[str, Any]:
    images = [{"type": "image", "image": picture(shade)} for shade in shades]
    return {"role": role, "content": [*images, {"type": "text", "text": text}]}


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, add_special_tokens=False)


def test_turns_with_images(llm: LLM, params: Params) -> None:
    dialog = Dialog(llm, [look("what?", 1)], group=3)
    seen = [BEGIN, *[IMAGE] * ROWS, END]
    begin = [*ids_of(llm, "u:"), *seen, *ids_of(llm, "what?<eos>a:")]
    assert dialog.token_ids == begin and list(dialog.embeddings) == [3]
    first = dialog.reply(SAMPLING)
    dialog.add(look("see", 2, 1, role="tool"))
    dialog.add({"role": "user", "content": "and?"})
    behind = [EOS, *ids_of(llm, "t:"), *seen, *seen, *ids_of(llm, "see<eos>u:and?<eos>a:")]
    assert dialog.token_ids == [*begin, *first.token_ids, *behind]
    place = len(begin) + 5 + 4
    assert list(dialog.embeddings) == [3, place, place + ROWS + 2]
    digests = [span.embeddings.digest for span in dialog.embeddings.values()]
    assert digests[0] == digests[2] != digests[1]

    # Earlier turns are found, with their image; the output is the dialog's only with its images.
    (out,) = llm.generate(dialog.prompt, SAMPLING, use_tqdm=False)
    assert out.num_cached_tokens >= len(begin) // 8 * 8
    other = dict.fromkeys(dialog.embeddings, dialog.embeddings[3])
    prompt = {"prompt_token_ids": dialog.token_ids, "embeddings": other}
    (wrong,) = llm.generate(prompt, SAMPLING, use_tqdm=False)
    with pytest.raises(RequestError, match=f"the image at {place} differs"):
        dialog.take(wrong)
    second = dialog.take(out)
    dialog.add(look("last", 5))
    third = dialog.reply(SAMPLING)
    assert len(dialog.embeddings) == 4 and len(dialog.turns) == 3

    # A loss has the same logprobs, of dialogs of different lengths, one of which has no image.
    plain = Dialog(llm, [{"role": "user", "content": "hey"}])
    plain.reply(SAMPLING)
    dialogs = [plain, dialog]
    arrays = jpaged.dialog_arrays(dialogs)
    images = jpaged.image_arrays(params, dialogs)
    expected, mask = arrays["logprobs"], arrays["loss_mask"]
    loss = jax.jit(jpaged.logprobs)
    found = np.asarray(loss(params, arrays, images=images))
    np.testing.assert_allclose(found[mask], expected[mask], atol=5e-5)
    cut = jpaged.dialog_arrays(dialogs, max_len=second.start + 2, overflow="truncate")
    short = np.asarray(loss(params, cut, images=images))
    mask = cut["loss_mask"]
    assert mask[1].sum() == 7 and len(third.token_ids) == 5
    np.testing.assert_allclose(short[mask], cut["logprobs"][mask], atol=5e-5)


def test_what_a_dialog_refuses_leaves_it_as_it_was(llm: LLM) -> None:
    dialog = Dialog(llm, [{"role": "user", "content": "hey"}])
    assert isinstance(dialog.prompt, list)
    dialog.reply(SAMPLING)
    before = dialog.token_ids
    broken = {"role": "user", "content": [{"type": "image", "image": b"no image"}]}
    with pytest.raises(RequestError, match=r"images\[0\]"):
        dialog.add(broken)
    with pytest.raises(RequestError, match="placeholder"):
        dialog.add([look("<image>", 1)])
    assert dialog.token_ids == before and not dialog.embeddings and len(dialog.messages) == 2
    dialog.add(look("now", 1))
    assert len(dialog.embeddings) == 1


def test_marins_turns(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of served messages are found among the tokens of the request."""

    class Turn(types.SimpleNamespace):
        pass

    class Broken(ValueError):
        pass

    contracts: Any = types.ModuleType("rolloutengine.contracts")
    contracts.ModelTurn, contracts.RolloutContractError = Turn, Broken
    monkeypatch.setitem(sys.modules, "rolloutengine", types.ModuleType("rolloutengine"))
    monkeypatch.setitem(sys.modules, "rolloutengine.contracts", contracts)
    from jpaged.integrations.marin import RolloutModel

    model = RolloutModel(llm, SAMPLING)
    messages, tokens, index = [look("what?", 1)], (), None
    dialog = Dialog(llm, messages)
    for added in (look("see", 2, role="tool"), None):
        request: Any = types.SimpleNamespace(
            messages=tuple(messages),
            options={},
            prefix_token_ids=tokens,
            assistant_message_index=index,
        )
        turn = asyncio.run(model(request))
        assert list(turn.prompt_token_ids) == dialog.token_ids
        (output,) = llm.generate(dialog.prompt, SAMPLING, use_tqdm=False)
        np.testing.assert_allclose(turn.logprobs, output.outputs[0].token_logprobs, atol=1e-5)
        tokens, index = turn.prompt_token_ids + turn.response_token_ids, len(messages)
        messages.append(turn.message)
        if added is not None:
            dialog.take(output)
            dialog.add(added)
            messages.append(added)
    request.messages = (look("what?", 1, 2), *messages[1:], look("x"))
    request.prefix_token_ids, request.assistant_message_index = tokens, index
    with pytest.raises(Broken, match="images were passed"):
        asyncio.run(model(request))
