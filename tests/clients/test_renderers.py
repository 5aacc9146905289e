"""Dialog with the package `renderers`: its Qwen3 writes what comes behind turns, and nothing that
was served changes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import jpaged
from jpaged import LLM, Dialog, RequestError, SamplingParams
from jpaged.models.hf_defaults import import_transformers
from tests.tiny import ENGINE, config, make_params

renderers: Any = pytest.importorskip("renderers", reason="the extra 'renderers' is not installed")

MARKS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
# Qwen3's, as far as these conversations go.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK = {"role": "user", "content": "What is 2+2?"}


def make_tokenizer(name: str) -> Any:
    """One token a printable character and a line's end, then Qwen3's marks."""
    characters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {text: i for i, text in enumerate([*characters, *MARKS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        unk_token="?",
        additional_special_tokens=list(MARKS),
    )
    fast.chat_template = TEMPLATE
    fast.name_or_path = name
    return fast


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings: dict[str, Any] = {**vars(ENGINE), "max_model_len": 256}
    model = config(vocab_size=105, max_position_embeddings=256)
    llm = LLM(make_params(0, model), tokenizer=make_tokenizer("Qwen/Qwen3-0.6B"), **settings)
    yield llm
    llm.close()


@pytest.mark.parametrize("is_cut", [False, True])
def test_its_qwen3(llm: LLM, is_cut: bool) -> None:
    """Found by the tokenizer's name; a turn that was cut gets its end; one score of the whole has
    the logprobs of all turns.
    """
    dialog = Dialog(llm, [ASK])
    assert type(dialog._renderer).__name__ == "Qwen3Renderer"
    end = llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    asked = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    if not is_cut:
        asked = SamplingParams(max_tokens=60, seed=3, logit_bias={end: 3.5})
    drawn = []
    for _ in range(2):
        turn = dialog.reply(asked)
        served = dialog.token_ids
        dialog.add({"role": "tool", "content": "4"})
        assert dialog.token_ids[: len(served)] == served
        behind = llm.tokenizer.decode(dialog.token_ids[len(served) :])
        written = (
            "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        ended = turn.token_ids[-1] == end
        assert behind == (written if ended else "<|im_end|>" + written)
        drawn.append(turn)
    assert any(turn.finish_reason == "stop" for turn in drawn) != is_cut
    scores = np.asarray(llm.score([dialog.token_ids])[0])
    for turn in drawn:
        places = slice(turn.start - 1, turn.start - 1 + len(turn.token_ids))
        np.testing.assert_allclose(turn.token_logprobs, scores[places], atol=1e-4)


def test_a_folder_whose_model_it_cannot_know(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template is used, unless the caller says which renderer is meant."""
    monkeypatch.setattr(llm.tokenizer, "name_or_path", "/models/mine")
    assert Dialog(llm, [ASK])._renderer is None
    chosen = renderers.create_renderer(llm.tokenizer, renderers.Qwen3RendererConfig())
    dialog = Dialog(llm, [ASK], renderer=chosen)
    dialog.reply(SamplingParams(max_tokens=4, ignore_eos=True, seed=1))
    served = dialog.token_ids
    dialog.add({"role": "tool", "content": "4"})
    assert dialog.token_ids[: len(served)] == served and len(dialog.token_ids) > len(served)


def test_variables_that_it_does_not_take(llm: LLM) -> None:
    """Are the template's, and so is the turn."""
    assert Dialog(llm, [ASK], chat_template_kwargs={"tone": "dry"})._renderer is None
    taken = Dialog(llm, [ASK], chat_template_kwargs={"enable_thinking": False})
    assert taken._renderer is not None
    assert jpaged.dialog_arrays([taken])["turn_ids"].max() == -1
    with pytest.raises(RequestError, match="renderer='no'"):
        Dialog(llm, [ASK], renderer="no")  # pyright: ignore[reportArgumentType]
