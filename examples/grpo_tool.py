"""GRPO of a model that uses a tool over several turns: `python examples/grpo_tool.py`.

A task names a box. The model opens one with its tool, sees what is in it, and says that: two turns
which it draws, and one message of the environment between them. `jpaged.Dialog` keeps all tokens as
they were drawn and served; `jpaged.dialog_arrays` says which of them are the model's, so that the
loss is of these alone (docs/rollouts.md). The model begins from random numbers, with one token a
word, and learns to open the box that it was asked for and to report what it saw. Each line has the
share of right openings and of right reports before the update.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import jpaged
from jpaged.models.params import random_params

BOXES, THINGS = ["left", "right"], ["key", "coin"]
WORDS = ["<end>", "<user>", "<tool>", "<model>", "nothing", *BOXES, *THINGS]
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 0,
    "max_position_embeddings": 32,
}
TEMPLATE = (
    "{% for m in messages %}{{ '<model>' if m.role == 'assistant' else '<' + m.role + '>' }} "
    "{{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<model> {% endif %}"
)
SAMPLES, WIDTH = 16, 16  # dialogs a task; tokens of one at most


def make_llm(seed: int) -> jpaged.LLM:
    """A model of random numbers, and a tokenizer with one token a word. One size of each kind of
    step, so that two are compiled.
    """
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    params = random_params(jpaged.ModelConfig.from_hf(MODEL), dtype="float32", seed=seed)
    return jpaged.LLM(
        params,
        tokenizer=tokenizer,
        seed=seed,
        max_num_seqs=64,
        seq_buckets=(64,),
        max_num_batched_tokens=512,
        token_buckets=(512,),
        num_blocks=512,
        block_size=16,
    )


def make_update(optimizer: optax.GradientTransformation) -> Any:
    """update(params, state, arrays, advantages [B, turns]) -> params, state."""

    def loss_of(params: Any, arrays: Any, advantages: jax.Array) -> jax.Array:
        ratio = jnp.exp(jpaged.logprobs(params, arrays) - arrays["logprobs"])
        # Each token has the advantage of its own turn.
        weights = jnp.take_along_axis(advantages, jnp.maximum(arrays["turn_ids"], 0), axis=1)
        gain = jnp.minimum(ratio * weights, jnp.clip(ratio, 0.8, 1.2) * weights)
        return -jnp.sum(gain * arrays["loss_mask"]) / jnp.sum(arrays["loss_mask"])

    @jax.jit
    def update(params: Any, state: Any, arrays: Any, advantages: jax.Array) -> tuple[Any, Any]:
        changes, state = optimizer.update(jax.grad(loss_of)(params, arrays, advantages), state)
        return optax.apply_updates(params, changes), state

    return update


def play(llm: jpaged.LLM, boxes: list[dict[str, str]], step: int) -> tuple[Any, Any, Any]:
    """Dialogs of SAMPLES a task, each with its two turns; which opened the right box, and which
    then reported what they saw. boxes: what is in each box, of every task; a task asks for one.
    """
    asked = [BOXES[i % len(BOXES)] for i in range(len(boxes))]
    sampling = jpaged.SamplingParams(max_tokens=2)
    dialogs = [
        jpaged.Dialog(llm, [{"role": "user", "content": name}], group=group)
        for group, name in enumerate(asked)
        for _ in range(SAMPLES)
    ]
    for turn in (0, 1):
        prompts = [dialog.prompt for dialog in dialogs]
        outs = llm.generate(prompts, sampling, seed=2 * step + turn, use_tqdm=False)
        for dialog, out in zip(dialogs, outs, strict=True):
            said = dialog.take(out).text.strip()
            if turn == 0:
                seen = boxes[dialog.group].get(said, "nothing")
                dialog.add({"role": "tool", "content": seen})
    right = [dialog.turns[0].text.strip() == asked[dialog.group] for dialog in dialogs]
    seen = [dialog.messages[2]["content"] for dialog in dialogs]
    said = [dialog.turns[1].text.strip() for dialog in dialogs]
    told = [a == b != "nothing" for a, b in zip(said, seen, strict=True)]
    return dialogs, np.array(right, np.float32), np.array(told, np.float32)


def train(updates: int, *, tasks: int = 4, seed: int = 0) -> list[dict[str, float]]:
    """The loop; one record an update."""
    llm, rng = make_llm(seed), np.random.default_rng(seed)
    params: Any = llm.session.served.params
    optimizer = optax.adam(1.5e-3)
    state, update = optimizer.init(params), make_update(optimizer)
    history = []
    for step in range(updates):
        boxes = [dict(zip(BOXES, rng.permutation(THINGS), strict=True)) for _ in range(tasks)]
        dialogs, right, told = play(llm, boxes, step)
        rewards = np.stack([right, told], -1).reshape(tasks, SAMPLES, 2)  # of each turn its own
        away = rewards - rewards.mean(axis=1, keepdims=True)
        advantages = (away / (rewards.std(axis=1, keepdims=True) + 1e-4)).astype(np.float32)
        arrays = jpaged.dialog_arrays(dialogs, max_len=WIDTH)
        params, state = update(params, state, arrays, advantages.reshape(-1, 2))
        llm.update_params(params)
        record = {"update": step, "opened": float(right.mean()), "told": float(told.mean())}
        history.append(record)
    llm.close()
    return history


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=100)
    history = train(parser.parse_args(argv).updates)
    for record in history[:: max(len(history) // 10, 1)]:
        print(
            "update {update:3d}  opened the right box {opened:.2f}  said what was in it "
            "{told:.2f}".format(**record)
        )
    return history


if __name__ == "__main__":
    main()
