"""GRPO of a model that looks at pictures, tower and all: `python examples/grpo_image.py`.

A picture has one to four squares of a colour, and the model says how many and which colour: two
words, each worth a half. It begins from random numbers, a vision tower of two layers before a
decoder of two. Rollouts take the pictures in their prompts (`images=True`); `jpaged.image_arrays`
has the same pictures as patches, and `jpaged.logprobs(images=)` makes their embeddings by the tower
of the weights that it differentiates, so that the tower learns with the decoder (docs/images.md).
Each line has the mean reward before the update, the largest difference of a token's logprob between
rollout and trainer, and how many functions were compiled.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpaged
from jpaged.models.params import random_params

COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230)}
NAMES = [*COLOURS, "yellow"]
COLOURS["yellow"] = (230, 210, 40)
COUNTS = ["one", "two", "three", "four"]
WORDS = ["<end>", "<image>", "<begin>", "<stop>", "<ask>", *COUNTS, *NAMES]
IMAGE, BEGIN, STOP, ASK = (WORDS.index(x) for x in ("<image>", "<begin>", "<stop>", "<ask>"))
CELL, PATCH = 16, 8  # pixels: a picture is 2 x 2 cells, a row of embeddings 2 x 2 patches
ROWS, SAMPLES, PICTURES = 4, 8, 16  # rows of a picture, answers to it, pictures an update
MODEL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": IMAGE,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": STOP,
    "video_token_id": 0,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 32,
        "eos_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "patch_size": PATCH,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}
PREPARED = {  # its preprocessor_config.json
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * CELL**2, "longest_edge": 4 * CELL**2},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
COMPILED = "/jax/core/compile/backend_compile_duration"


def make_params(folder: Path, seed: int) -> Any:
    """A model of random numbers, and the folder that says how its images are prepared."""
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARED))
    config = jpaged.ModelConfig.from_hf(MODEL, images=True)
    params = random_params(config, dtype="float32", seed=seed)
    # Larger than a trained model's, so that what a picture shows makes a difference at once.
    tree = jax.tree.map(lambda x: x * jnp.float32(4) if x.ndim > 1 else x, dict(params))
    return jpaged.Params(tree, config, folder)


def draw(rng: np.random.Generator) -> tuple[np.ndarray, tuple[int, int]]:
    """A picture, uint8 [32, 32, 3], and the two words that it asks for."""
    count, colour = int(rng.integers(1, 5)), int(rng.integers(len(NAMES)))
    picture = rng.integers(0, 40, (2 * CELL, 2 * CELL, 3)).astype(np.uint8)
    for cell in rng.permutation(4)[:count]:
        row, column = (int(x) * CELL + int(rng.integers(2, 6)) for x in divmod(int(cell), 2))
        side = int(rng.integers(8, 11))
        picture[row : row + side, column : column + side] = COLOURS[NAMES[colour]]
    return picture, (WORDS.index(COUNTS[count - 1]), WORDS.index(NAMES[colour]))


def make_update(optimizer: optax.GradientTransformation) -> Any:
    """update(params, state, arrays, images, advantages [B, 2]) -> params, state, largest difference
    of logprobs, norm of the tower's gradient.
    """

    def loss_of(params: Any, arrays: Any, images: Any, advantages: jax.Array) -> Any:
        new = jpaged.logprobs(params, arrays, images=images)
        apart = jnp.abs(new - arrays["logprobs"]) * arrays["completion_mask"]
        ratio = jnp.exp(new - arrays["logprobs"])
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return -jnp.mean(gain * arrays["completion_mask"]), jnp.max(apart)

    @jax.jit
    def update(params: Any, state: Any, arrays: Any, images: Any, advantages: jax.Array) -> Any:
        of_loss = jax.grad(loss_of, has_aux=True)
        gradient, apart = of_loss(params, arrays, images, advantages)
        changes, state = optimizer.update(gradient, state)
        seen = optax.tree.norm(gradient["vision"])
        return optax.apply_updates(params, changes), state, apart, seen

    return update


def train(updates: int, *, seed: int = 0) -> list[dict[str, float]]:
    """The loop; one record an update."""
    with tempfile.TemporaryDirectory() as folder:
        return _train(make_params(Path(folder), seed), updates, seed)


def _train(params: Any, updates: int, seed: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(seed)
    llm = jpaged.LLM(
        params,
        images=True,
        max_num_seqs=PICTURES * SAMPLES,
        seq_buckets=(PICTURES * SAMPLES,),
        max_num_batched_tokens=512,
        token_buckets=(512,),
        block_size=16,
        num_blocks=512,
    )
    sampling = jpaged.SamplingParams(n=SAMPLES, max_tokens=2, ignore_eos=True)
    optimizer = optax.adam(2e-3)
    state, update = optimizer.init(params), make_update(optimizer)
    compiles: list[str] = []

    def count(event: str, duration_secs: float, **about: Any) -> None:
        compiles.extend([str(about.get("fun_name"))] if event == COMPILED else [])

    jax.monitoring.register_event_duration_secs_listener(count)
    history = []
    for step in range(updates):
        compiles.clear()
        drawn = [draw(rng) for _ in range(PICTURES)]
        ids = [BEGIN, IMAGE, STOP, ASK]
        prompts = [{"prompt_token_ids": ids, "images": [picture]} for picture, _ in drawn]
        outs = llm.generate(prompts, sampling, seed=step, use_tqdm=False)
        arrays = jpaged.to_arrays(outs, max_completion_len=2)
        images = jpaged.image_arrays(params, outs, max_rows=ROWS * PICTURES)
        wanted = np.repeat([words for _, words in drawn], SAMPLES, axis=0)
        rewards = (arrays["completion_ids"] == wanted).astype(np.float32)  # of each word its own
        by_group = rewards.reshape(PICTURES, SAMPLES, 2)
        away = by_group - by_group.mean(axis=1, keepdims=True)
        advantages = (away / (by_group.std(axis=1, keepdims=True) + 1e-2)).reshape(-1, 2)
        params, state, apart, seen = update(params, state, arrays, images, advantages)
        llm.update_params(params)
        counts, colours = rewards.mean(axis=0)
        record = {"update": step, "reward": float(rewards.mean()), "counts": float(counts)}
        record |= {"colours": float(colours), "apart": float(apart), "tower": float(seen)}
        history.append(record | {"compiles": len(compiles)})
    jax.monitoring.unregister_event_duration_listener(count)
    llm.close()
    return history


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=120)
    history = train(parser.parse_args(argv).updates)
    edge = max(len(history) // 10, 1)
    for record in [*history[::edge], history[-1]]:
        print(
            "update {update:3d}  reward {reward:.3f} (counts {counts:.2f}, colours {colours:.2f})  "
            "|rollout - trainer| {apart:.1e}  gradient of the tower {tower:.1e}  "
            "compiles {compiles}".format(**record)
        )
    first, last = (
        float(np.mean([record["reward"] for record in part]))
        for part in (history[:edge], history[-edge:])
    )
    print(f"mean reward of the first {edge} updates {first:.3f}, of the last {last:.3f}")
    return history


if __name__ == "__main__":
    main()
