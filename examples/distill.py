"""On-policy distillation on the embedded model: `python examples/distill.py`.

A student of half the teacher's layers completes prompts; the teacher scores what the student wrote
and returns its likeliest tokens with their logprobs; the student learns from them. What falls is
the divergence of the two on the student's own text, so it is not only the teacher's texts that the
student gets right. Everything that jax compiles is compiled in the first update: the steps of both
models have one shape, and the arrays of all updates too.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grpo import PROMPTS

import jpaged
from jpaged.demo import MODEL_PATH
from jpaged.models.forward import bind

SAMPLES, NEW_TOKENS, LENGTH, TOP_K = 4, 16, 64, 64
ROWS = SAMPLES * len(PROMPTS)
ENGINE = jpaged.EngineConfig(
    max_model_len=LENGTH,
    max_num_seqs=ROWS,
    seq_buckets=(ROWS,),
    max_num_batched_tokens=512,
    token_buckets=(512,),
)
SAMPLING = jpaged.SamplingParams(n=SAMPLES, max_tokens=NEW_TOKENS, ignore_eos=True)


def student_of(teacher: jpaged.Params) -> jpaged.Params:
    """Return Params of the teacher's first layers, its embedding and its head."""
    config = dataclasses.replace(teacher.config, layers=teacher.config.layers[:2])
    layers = {name: teacher["layers"][name] for name in ("0", "1")}
    return jpaged.Params({**teacher, "layers": layers}, config)


def divergence(student: Any, tokens: jax.Array, said: dict[str, jax.Array]) -> jax.Array:
    """Return the mean of KL(teacher | student) over the teacher's likeliest tokens."""
    hidden, _ = bind(student.config, dict(student))(tokens)
    logprobs = jax.nn.log_softmax(jpaged.logits(student, hidden))
    logprobs = jnp.take_along_axis(logprobs, said["top_ids"], axis=2)
    kl = jnp.sum(jnp.exp(said["top_logprobs"]) * (said["top_logprobs"] - logprobs), axis=2)
    return jnp.sum(kl * said["mask"]) / jnp.sum(said["mask"])


def distill(updates: int, learning_rate: float = 3e-4) -> list[float]:
    """Return the divergence before each update."""
    teacher = jpaged.load_params(MODEL_PATH, dtype="float32")
    student, tokenizer = student_of(teacher), jpaged.LLM(MODEL_PATH).tokenizer
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    optimizer = optax.adam(learning_rate)

    @jax.jit
    def update(student: Any, state: Any, tokens: jax.Array, said: dict[str, jax.Array]) -> Any:
        loss, grads = jax.value_and_grad(divergence)(student, tokens, said)
        changes, state = optimizer.update(grads, state)
        return optax.apply_updates(student, changes), state, loss

    state, history = optimizer.init(student), list[float]()  # pyright: ignore[reportArgumentType]
    for step in range(updates):
        outs = jpaged.generate(student, prompts, SAMPLING, engine_config=ENGINE, seed=step)
        pairs = [(out.prompt_token_ids, c.token_ids) for out in outs for c in out.outputs]
        texts, starts = [p + c for p, c in pairs], [len(p) for p, _ in pairs]
        scores = jpaged.score(teacher, texts, start=starts, top_k=TOP_K, engine_config=ENGINE)
        tokens = np.array([text + [0] * (LENGTH - len(text)) for text in texts], np.int32)
        said = jpaged.score_arrays(scores, LENGTH)
        student, state, loss = update(student, state, tokens, said)
        history.append(float(loss))
    jpaged.release(compiled=True)
    return history


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=40)
    history = distill(parser.parse_args(argv).updates)
    for step in range(0, len(history), 5):
        print(f"update {step:3d}  KL(teacher | student) {history[step]:.3f}")
    print(f"after {len(history)} updates {history[-1]:.3f}")
    return history


if __name__ == "__main__":
    main()
