"""The embedded default model: its folder is whole, and what it writes looks like Python."""

import ast
import json
from typing import Any

import jax
import numpy as np
import pytest

from jpaged.checkpoint.load import load_params
from jpaged.checkpoint.tokenizer import load_generation_config, load_tokenizer
from jpaged.demo import MODEL_PATH
from jpaged.models.config import ModelConfig
from jpaged.models.forward import bind
from jpaged.models.params import Params

TEXTS = (
    "def f(x):\n    return x + 1\n",
    "naïve — 日本語 🙂\t\r\n  \x00end",
    "",
    " leading",
    "a\n\n\n    b  ",
    "x = 1234567890",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL_PATH)


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(MODEL_PATH, dtype="float32")


@jax.jit
def forward(params: Params, ids: jax.Array) -> jax.Array:
    """f32 logits [T, V] of int32 [T], dense."""
    model = bind(params.config, params)
    return model.logits(model(ids)[0])


def greedy(params: Params, prompt: list[int], count: int) -> list[int]:
    """The likeliest continuation, up to EOS (left out) or `count` tokens; all of it again for every
    token.
    """
    ids = np.zeros(len(prompt) + count, np.int32)
    ids[: len(prompt)] = prompt
    for end in range(len(prompt), len(ids)):
        ids[end] = np.asarray(forward(params, ids))[end - 1].argmax()
        if ids[end] in params.config.eos_token_ids:
            return ids[len(prompt) : end].tolist()
    return ids[len(prompt) :].tolist()


def loss(params: Params, ids: np.ndarray) -> float:
    """Mean cross-entropy in nats a token."""
    logprobs = np.asarray(jax.nn.log_softmax(forward(params, ids)))
    return float(-logprobs[np.arange(len(ids) - 1), ids[1:]].mean())


def test_folder_is_small_and_in_hugging_faces_layout() -> None:
    files = {p.name: p.stat().st_size for p in MODEL_PATH.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(files.values()) <= 8 * 2**20


def test_config_is_qwen3_and_agrees_with_the_tokenizer(tokenizer: Any) -> None:
    config = ModelConfig.coerce(MODEL_PATH)
    assert config.family == "qwen3" and config.switches.qk_norm and config.tie_word_embeddings
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_ids == (tokenizer.eos_token_id,)
    written = json.loads((MODEL_PATH / "tokenizer_config.json").read_text())
    assert written["model_max_length"] == config.max_position_embeddings


def test_pad_and_eos_are_distinct_and_named_everywhere(tokenizer: Any) -> None:
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    generation = load_generation_config(MODEL_PATH)
    raw = json.loads((MODEL_PATH / "config.json").read_text())
    for named in (generation, raw):
        assert (named["pad_token_id"], named["eos_token_id"]) == (
            tokenizer.pad_token_id,
            tokenizer.eos_token_id,
        )


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_are_one_token_each(tokenizer: Any) -> None:
    ids = [tokenizer(text)["input_ids"] for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    assert ids == [[0], [1], [2]]
    assert (
        tokenizer.decode([1, *tokenizer("x = 1")["input_ids"], 2], skip_special_tokens=True)
        == "x = 1"
    )


def test_chat_template_renders(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "def add():"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\ndef add():<|im_end|>\n"
    ask = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert ask == "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n"


def test_python_is_likelier_than_its_tokens_in_any_order(params: Params, tokenizer: Any) -> None:
    text = "def first_line(path):\n    with open(path) as f:\n        return f.readline()\n"
    ids = np.array(tokenizer(text)["input_ids"], np.int32)
    shuffled = np.random.default_rng(0).permutation(ids)
    assert loss(params, ids) < 3.5
    assert loss(params, shuffled) > loss(params, ids) + 3.0


@pytest.mark.parametrize(
    "start", ["def read_file(path):\n", "class Stack:\n    def __init__(self):\n"]
)
def test_greedy_continuation_looks_like_python(params: Params, tokenizer: Any, start: str) -> None:
    text = start + tokenizer.decode(greedy(params, tokenizer(start)["input_ids"], 96))
    lines, given = text.splitlines(), start.count("\n")
    assert any(line.startswith("    ") and line.strip() for line in lines[given:]), text
    assert any(parses(lines[:n]) for n in range(given + 3, len(lines) + 1)), text


def test_chat_answer_is_a_function_and_ends(params: Params, tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "Write a function `add_item` that adds an item to the list."}
    ]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    answer = greedy(params, tokenizer(prompt)["input_ids"], 160)
    text = tokenizer.decode(answer)
    assert len(answer) < 160 and text.startswith("def ") and parses(text.splitlines()), text


def parses(lines: list[str]) -> bool:
    """Whether some lines are a Python module."""
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True
