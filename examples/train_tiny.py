"""Trains the small models that ship in jpaged/demo, from nothing: `python examples/train_tiny.py
--out DIR`, and with `--hybrid` the one whose layers are mostly the gated delta rule.

The text is what every machine with Python has: the sources of its own standard library in a fixed
order, plus chats made of their docstrings and functions. A byte-level BPE tokenizer is trained
first, then jpaged's own Decoder with optax, then both are written as a Hugging Face folder.
`--check` runs the same path in miniature.
"""

import argparse
import ast
import dataclasses
import functools
import json
import random
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import safetensors.numpy
from flax import nnx
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jpaged.checkpoint.hf import stored_names
from jpaged.checkpoint.load import load_params
from jpaged.checkpoint.tensors import flat
from jpaged.checks import read_json
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.forward import bind
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.params import param_table
from jpaged.models.trees import to_tree

# Ids 0 (padding, and between documents), 1, 2 (EOS).
SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Like Qwen's, but every newline is a piece of its own, so that a prompt may end just before one or
# just after it.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]|[^\S\r\n]+(?!\S)|[^\S\r\n]+"
# The file of a folder that says how long it was trained, and to what losses in nats a token; README
# is held to it.
TRAINING = "training.json"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SKIP = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}
PROMPTS = ("def read_file(path):\n", "class Stack:\n    def __init__(self):\n", "import os\n")
QUESTIONS = (
    "Return the size of a file.",
    "Write a function `add_item` that adds an item to the list.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained and on what; the defaults make the shipped model."""

    vocab: int = 4096
    hidden: int = 192
    ffn: int = 640
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    # Of a hybrid: every `full_every`-th layer has attention, the others the gated delta rule of so
    # many heads of these widths. None: attention everywhere.
    full_every: int | None = None
    delta_heads: tuple[int, int] = (2, 4)  # of keys, of values
    delta_dims: tuple[int, int] = (32, 32)
    # tokens a row; every `long_every`-th step has rows of `long_seq`, the max_position_embeddings
    seq: int = 256
    long_seq: int = 1024
    long_every: int = 16
    batch_tokens: int = 1024
    steps: int = 3300
    peak_lr: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    chat_share: float = 0.2  # of the training tokens
    max_files: int | None = None
    seed: int = 0
    # Of the forward and backward pass; the weights that the optimizer sees are f32.
    compute: str = "bfloat16"
    # How the folder holds the weights of layers: int8 has a scale an output, as compressed-tensors
    # names it; what it leaves plain, and everything else, is bfloat16.
    stored: Literal["bfloat16", "int8"] = "bfloat16"

    def model(self) -> ModelConfig:
        """The architecture: a Qwen 3, or a Qwen 3.5 where it is a hybrid."""
        is_hybrid = self.full_every is not None
        plain = ModelConfig(
            family="qwen3_5_text" if is_hybrid else "qwen3",
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.long_seq,
            tie_word_embeddings=True,
            qk_norm=True,
            norm_offset=is_hybrid,
            norm_in_f32=is_hybrid,
            eos_token_ids=(2,),
        )
        if self.full_every is None:
            return plain
        layer = plain.layers[0]
        assert isinstance(layer.mixer, AttentionConfig)
        delta = DeltaConfig(
            num_key_heads=self.delta_heads[0],
            num_value_heads=self.delta_heads[1],
            key_dim=self.delta_dims[0],
            value_dim=self.delta_dims[1],
        )
        gated = dataclasses.replace(layer.mixer, gate=True)
        layers = tuple(
            dataclasses.replace(layer, mixer=delta if (i + 1) % self.full_every else gated)
            for i in range(self.layers)
        )
        return dataclasses.replace(plain, layers=layers)


HYBRID = Settings(
    vocab=2048,
    ffn=256,
    layers=8,
    full_every=4,
    steps=1700,
    batch_tokens=512,
    compute="float32",
    stored="int8",
)
CHECK = Settings(
    vocab=512,
    hidden=32,
    ffn=64,
    layers=2,
    heads=4,
    head_dim=16,
    seq=64,
    long_seq=128,
    batch_tokens=512,
    steps=60,
    warmup=5,
    peak_lr=1e-2,
    max_files=12,
)
CHECK_HYBRID = dataclasses.replace(
    CHECK, full_every=2, delta_dims=(8, 32), compute="float32", stored="int8"
)


def source_files() -> list[str]:
    """The text of every prose-like module of this Python's standard library, in order of path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        p.relative_to(root) for p in root.rglob("*.py") if not SKIP & set(p.relative_to(root).parts)
    ]
    paths = [
        p
        for p in paths
        if not p.name.startswith("_sysconfigdata") and p.as_posix() != "html/entities.py"
    ]
    texts = ((root / p).read_bytes().decode("utf-8", "ignore") for p in sorted(paths))
    return [text.expandtabs().strip() + "\n" for text in texts if text.strip()]


def split(files: list[str]) -> tuple[list[str], list[str]]:
    """Training and held-out files: every fortieth is held out (at least one)."""
    step = min(40, len(files))
    held = set(range(step - 1, len(files), step))
    return [f for i, f in enumerate(files) if i not in held], [files[i] for i in sorted(held)]


def chats(files: list[str], rng: random.Random) -> list[str]:
    """One exchange for every short documented function: its docstring's first line asks, its source
    answers.
    """
    found = []
    for text in files:
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            doc = (ast.get_docstring(node) or "").split("\n")[0].strip()
            source = ast.get_source_segment(text, node, padded=True)
            if not source or not 12 <= len(doc) <= 120 or len(source) > 1200:
                continue
            clause = doc[0].lower() + doc[1:] if doc[1].islower() else doc
            ask = rng.choice(
                (
                    doc,
                    doc,
                    f"Write a function `{node.name}`: {clause}",
                    f"Write `{node.name}`.\n{doc}",
                )
            )
            answer = textwrap.dedent(source).strip()
            found.append(
                f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
            )
    rng.shuffle(found)
    return found


def train_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text round-trips exactly, whatever it was trained on."""
    core = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), byte_level]
    )  # type: ignore
    core.decoder = decoders.ByteLevel()  # type: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=list(SPECIAL),
            initial_alphabet=alphabet,
            show_progress=False,
        ),  # type: ignore
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1]],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: Any, documents: list[str]) -> np.ndarray:
    """uint16 [tokens]: the documents one after another, each ended by EOS (a chat ends itself) and
    <|endoftext|>.
    """
    ids: list[int] = []
    for text, row in zip(documents, tokenizer(documents)["input_ids"], strict=True):
        ids += row + ([0] if text.startswith(SPECIAL[1]) else [2, 0])
    return np.array(ids, np.uint16)


def batches(
    tokens: np.ndarray, rows: int, seq: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """int32 [rows, seq + 1] for ever: every epoch cuts the stream at another offset and shuffles
    the pieces.
    """
    while True:
        start = int(rng.integers(seq))
        count = (len(tokens) - 1 - start) // seq
        order = rng.permutation(count)
        for i in range(0, count - rows + 1, rows):
            starts = start + order[i : i + rows, None] * seq
            yield tokens[starts + np.arange(seq + 1)].astype(np.int32)


def names_in_f32(config: ModelConfig) -> set[str]:
    """Parameters that stay in f32 whatever the dtype of the others."""
    return {spec.at(spec.name) for spec in config.params() if spec.in_f32}


def cast(tree: Any, config: ModelConfig, dtype: Any) -> Any:
    """The tree as a model of this dtype computes with it."""
    in_f32 = names_in_f32(config)

    def leaf(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return x if name in in_f32 else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def loss_fn(tree: Any, tokens: jax.Array, *, config: ModelConfig, compute: str) -> jax.Array:
    """Mean cross-entropy in nats a token of int32 [rows, seq + 1]."""
    model = bind(config, cast(tree, config, compute))
    hidden, _ = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        model.logits(hidden), tokens[:, 1:]
    ).mean()


def evaluate(tree: Any, tokens: np.ndarray, s: Settings) -> float:
    """Mean loss in nats a token over all of `tokens`, in rows of s.seq (what is left over is
    dropped).
    """
    step = jax.jit(functools.partial(loss_fn, config=s.model(), compute=s.compute))
    rows = min(16, (len(tokens) - 1) // s.seq)
    starts = np.arange((len(tokens) - 1) // s.seq // rows * rows) * s.seq
    pieces = (
        tokens[starts[:, None] + np.arange(s.seq + 1)].astype(np.int32).reshape(-1, rows, s.seq + 1)
    )
    return float(np.mean([step(tree, piece) for piece in pieces]))


def with_spread_decays(tree: Any, seed: int) -> Any:
    """The tree whose heads of the gated delta rule begin with memories of unlike lengths: rates of
    1 to 16 over steps of 0.001 to 0.1, as arXiv:2412.06464 begins them.
    """
    rng = np.random.default_rng(seed)
    for layer in tree["layers"].values():
        if (delta := layer.get("delta")) is not None:
            shape = delta["log_decay"].shape
            step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
            # softplus of dt_bias is the step
            delta["dt_bias"] = jnp.asarray(step + np.log(-np.expm1(-step)), jnp.float32)
            delta["log_decay"] = jnp.asarray(np.log(rng.uniform(1, 16, shape)), jnp.float32)
    return tree


def train(tokens: np.ndarray, s: Settings) -> tuple[Any, dict[str, Any]]:
    """The trained canonical tree, f32, and what TRAINING says of the training. AdamW, warm-up then
    cosine to a hundredth, gradients clipped at norm 1.
    """
    config = s.model()
    tree = with_spread_decays(to_tree(Decoder(config, rngs=nnx.Rngs(s.seed))), s.seed)
    in_f32 = names_in_f32(config)
    rate = optax.warmup_cosine_decay_schedule(0.0, s.peak_lr, s.warmup, s.steps, s.peak_lr / 100)
    matrices = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            x.ndim > 1 and jax.tree_util.keystr(path, simple=True, separator=".") not in in_f32
        ),
        tree,
    )
    adamw = optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=s.weight_decay, mask=matrices)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = tx.init(tree)
    loss = functools.partial(loss_fn, config=config, compute=s.compute)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(tree: Any, opt_state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(tree, batch)
        updates, opt_state = tx.update(grads, opt_state, tree)
        return optax.apply_updates(tree, updates), opt_state, value

    rng = np.random.default_rng(s.seed)
    short = batches(tokens, max(1, s.batch_tokens // s.seq), s.seq, rng)
    long = batches(tokens, max(1, s.batch_tokens // s.long_seq), s.long_seq, rng)
    seen, recent, mean, mark = 0, [], np.inf, time.perf_counter()
    every = max(1, min(100, s.steps // 6))
    for i in range(s.steps):
        batch = next(short if i % s.long_every else long)
        tree, opt_state, value = step(tree, opt_state, batch)
        recent.append(value)
        seen += batch[:, 1:].size
        if (i + 1) % every == 0 or i + 1 == s.steps:
            mean = float(np.mean([float(v) for v in recent]))
            pace, mark = (
                len(recent) * s.batch_tokens / (time.perf_counter() - mark),
                time.perf_counter(),
            )
            print(
                f"step {i + 1:5d}  train loss {mean:.4f}  {pace:7.0f} tok/s  "
                f"{seen / 1e6:.2f}M tokens",
                flush=True,
            )
            recent = []
    told = {"steps": s.steps, "planned_steps": s.steps, "batch_tokens": s.batch_tokens}
    return tree, told | {"training_loss": round(mean, 4)}


@functools.partial(jax.jit, static_argnames="config")
def next_logits(tree: Any, ids: jax.Array, last: jax.Array, *, config: ModelConfig) -> jax.Array:
    """f32 [V]: the logits after ids[last]; what lies behind it does not matter."""
    model = bind(config, tree)
    return model.logits(model(ids)[0][last])


def generate(
    tree: Any, config: ModelConfig, prompt: list[int], *, temperature: float, seed: int, count: int
) -> list[int]:
    """Up to `count` tokens by the dense forward, all of it again for every token: a check, not an
    engine.
    """
    ids, rng = np.zeros(-(-(len(prompt) + count) // 64) * 64, np.int32), np.random.default_rng(seed)
    ids[: len(prompt)] = prompt
    end = len(prompt)
    while end < len(prompt) + count and (end == len(prompt) or ids[end - 1] != 2):
        logits = np.asarray(next_logits(tree, ids, np.int32(end - 1), config=config))
        noise = rng.gumbel(size=logits.shape) if temperature else 0.0
        ids[end] = np.argmax(logits / (temperature or 1.0) + noise)
        end += 1
    return ids[len(prompt) : end].tolist()


def show(tree: Any, config: ModelConfig, tokenizer: Any, count: int = 96) -> None:
    """Prints greedy and sampled continuations of a few prompts."""
    chat = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    for prompt in (*PROMPTS, *chat):
        for temperature in (0.0, 0.6):
            ids = tokenizer(prompt)["input_ids"]
            new = generate(tree, config, ids, temperature=temperature, seed=1, count=count)
            print(f"--- temperature {temperature}\n{prompt}{tokenizer.decode(new)}", flush=True)


def to_hf_names(tree: Any, s: Settings) -> dict[str, np.ndarray]:
    """Hugging Face's tensors: the loader's own table of names, read backwards."""
    config = s.model()
    table, arrays, parts = param_table(config), flat(tree), dict[str, list[np.ndarray]]()
    in_8_bits = set[str]()
    for ours, stored in stored_names(config).items():
        spec = table[ours]
        for part in stored:  # those of one tensor follow each other
            x = np.asarray(arrays[ours], np.float32)[part.fills].reshape(part.shape)
            parts.setdefault(part.name, []).append(x)
            if s.stored == "int8" and spec.is_multiplied and spec.split not in (None, "V"):
                in_8_bits |= {part.name} if spec.is_quantized else set()
    in_f32 = {part.name for ours in names_in_f32(config) for part in stored_names(config)[ours]}
    tensors = dict[str, np.ndarray]()
    for name, pieces in parts.items():
        x = np.concatenate(pieces)
        if name in in_8_bits:
            scales = (np.abs(x).max(axis=1, keepdims=True) / 127).astype(ml_dtypes.bfloat16)
            numbers = np.round(x / scales.astype(np.float32))
            tensors[name] = np.clip(numbers, -127, 127).astype(np.int8)
            tensors[f"{name}_scale"] = scales
        else:
            tensors[name] = x if name in in_f32 else x.astype(ml_dtypes.bfloat16)
    return tensors


def quantization_config() -> dict[str, Any]:
    """What a config.json says of int8 weights with a scale an output."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*in_proj_[ab]$"],
    }


def save(folder: Path, tree: Any, s: Settings, tokenizer: Any) -> None:
    """The Hugging Face folder: config, weights, tokenizer with chat template, generation
    defaults.
    """
    config = s.model()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    ids = {"eos_token_id": 2, "pad_token_id": 0}
    described = config.to_hf() | ids | {"dtype": "bfloat16"}
    if s.stored == "int8":
        described["quantization_config"] = quantization_config()
    settings = {
        "config.json": described,
        "generation_config.json": ids
        | {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
        # transformers 5 writes a class name that 4 does not know; this one both read.
        "tokenizer_config.json": read_json(folder / "tokenizer_config.json")
        | {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, value in settings.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    weights = safetensors.numpy.save(to_hf_names(tree, s), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)


def main(argv: list[str] | None = None) -> float:
    """Returns the held-out loss in nats a token."""
    demo = Path(__file__).parent.parent / "jpaged" / "demo"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder to write (default: the shipped model's)")
    parser.add_argument(
        "--hybrid", action="store_true", help="layers of the gated delta rule, three of four"
    )
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--compute", choices=("float32", "bfloat16"), help="dtype of the forward and backward pass"
    )
    parser.add_argument(
        "--check", action="store_true", help="a miniature of the same run, well under a minute"
    )
    args = parser.parse_args(argv)
    given = {
        k: getattr(args, k) for k in ("steps", "seed", "compute") if getattr(args, k) is not None
    }
    whole, miniature = (HYBRID, CHECK_HYBRID) if args.hybrid else (Settings(), CHECK)
    s = dataclasses.replace(miniature if args.check else whole, **given)
    if args.out is None:
        args.out = demo / ("hybrid" if args.hybrid else "model")

    began = time.perf_counter()
    files = source_files()[: s.max_files]
    training, held = split(files)
    tokenizer = train_tokenizer(training, s.vocab)
    text = encode(tokenizer, training)
    talk = encode(tokenizer, chats(training, random.Random(s.seed)))
    talk = talk[: int(len(text) * s.chat_share / (1 - s.chat_share))]
    held_ids = encode(tokenizer, held)
    held_bytes = sum(len(t.encode()) for t in held)
    config = s.model()
    weights = sum(
        x.size for x in jax.tree.leaves(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    )
    print(
        f"{len(files)} files, {sum(map(len, training)) / 1e6:.1f} MB to train on, "
        f"{held_bytes / 1e6:.2f} MB held out"
    )
    print(
        f"{len(text) / 1e6:.2f}M tokens of source, {len(talk) / 1e6:.2f}M of chat; "
        f"{weights / 1e6:.2f}M parameters",
        flush=True,
    )

    tree, told = train(np.concatenate([text, talk]), s)
    save(args.out, tree, s, tokenizer)
    tree = load_params(args.out, dtype="float32", dequantize=True)  # as it ships
    held_loss = evaluate(tree, held_ids, s)
    size = sum(p.stat().st_size for p in args.out.iterdir())
    per_byte = held_loss * len(held_ids) / held_bytes
    told |= {"held_out_loss": round(held_loss, 4), "nats_a_byte": round(per_byte, 4)}
    (args.out / TRAINING).write_text(json.dumps(told, indent=2) + "\n")
    print(
        f"held-out loss {held_loss:.4f} nats a token, {per_byte:.4f} a byte "
        f"({per_byte / np.log(2):.3f} bits a byte)"
    )
    print(f"{args.out}: {size / 2**20:.2f} MiB, {time.perf_counter() - began:.0f} s in all")
    show(tree, config, tokenizer, 16 if args.check else 96)
    return held_loss


if __name__ == "__main__":
    main()
