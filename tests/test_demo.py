"""The embedded models: their folders are whole, and what they write looks like Python."""

import ast
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.checkpoint.load import load_params
from jpaged.checkpoint.tokenizer import load_generation_config, load_tokenizer
from jpaged.demo import MODEL_PATH, MODELS
from jpaged.models.config import ModelConfig
from jpaged.models.forward import bind
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.params import Params
from kernels_pallas.gated_delta import IMPLEMENTATIONS

PYTHON = "def first_line(path):\n    with open(path) as f:\n        return f.readline()\n"
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


def test_folders_are_small_and_in_hugging_faces_layout() -> None:
    size = 0
    for folder in MODELS.values():
        files = {p.name: p.stat().st_size for p in folder.iterdir()}
        assert set(files) == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "training.json",
        }
        size += sum(files.values())
    assert size <= 8 * 2**20, "of all embedded models"


@pytest.mark.parametrize("name", MODELS)
def test_the_readme_says_how_long_it_was_trained(name: str) -> None:
    """And to what losses: training.json, which examples/train_tiny.py writes, has the numbers."""
    told = json.loads((MODELS[name] / "training.json").read_text())
    readme = " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    steps, planned = (f"{told[key]:,}" for key in ("steps", "planned_steps"))
    of = "" if steps == planned else f" of {planned}"
    assert f"{steps}{of} steps of {told['batch_tokens']:,} tokens" in readme
    assert f"loss of {told['training_loss']:.2f} nats a token in training" in readme
    assert f"{told['nats_a_byte']:.2f} nats a byte" in readme


def test_the_hybrid_by_its_name() -> None:
    """Three of four layers have the gated delta rule, in int8; it writes Python that it was not
    trained on, and finds a prompt again.
    """
    llm = LLM("jpaged-demo-hybrid", max_model_len=256, max_num_seqs=1, block_size=16)
    config = llm.session.served.model_config
    assert config.family == "qwen3_5_text" and config.has_state and llm.tokenizer is not None
    assert [isinstance(layer.mixer, DeltaConfig) for layer in config.layers] == [
        *([True] * 3 + [False])
    ] * 2
    ids = llm.tokenizer.encode(PYTHON)
    shuffled = np.random.default_rng(0).permutation(ids).tolist()
    right, wrong = (-float(np.mean(scores)) for scores in llm.score([ids, shuffled]))
    assert right < 4.5 and wrong > right + 1.5
    start = "class Stack:\n    def __init__(self):\n"
    greedy = SamplingParams(temperature=0, max_tokens=48)
    texts = [llm.generate([start], greedy, use_tqdm=False)[0] for _ in range(2)]
    assert texts[0].outputs[0].token_ids == texts[1].outputs[0].token_ids
    lines = (start + (texts[0].outputs[0].text or "")).splitlines()
    assert any(line.startswith("        ") and line.strip() for line in lines[2:]), lines
    stats = llm.stats()
    assert stats["gated_delta"] in IMPLEMENTATIONS and stats["short_conv"] == "xla"
    llm.close()


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
    ids = np.array(tokenizer(PYTHON)["input_ids"], np.int32)
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
