"""Measure what a form of the weights costs in quality, on any text.

    python scripts/quality.py [CHECKPOINT] --text FILE [FILE ...] [--forms int8 fp8 int4]

It runs the model over the text in windows, with its weights as they are and in each form, and
prints the perplexity, the divergence of the form's next-token distributions from the model's own
(KL, in nats a token), and the share of tokens whose most likely one is the same: a table, then a
JSON line. Without a checkpoint it takes the embedded model; without --text, the sources of jpaged
itself. Products use the same code that serves the form on this device.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _common as common
import jax
import jax.numpy as jnp
import numpy as np

import jpaged
from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH
from jpaged.models.config import ModelConfig
from jpaged.models.forward import bind
from jpaged.models.layers.linear import StepContext
from jpaged.models.params import Params
from jpaged.models.served import quantized_tree
from jpaged.runtime.choices import choose_products, interleaves_on

FORMS = ("int8", "fp8", "int4")


def windows(ids: list[int], length: int, most: int) -> np.ndarray:
    """Return the text in rows [number, length], at most this many tokens of it."""
    rows = min(len(ids), most) // length
    return np.asarray(ids[: rows * length], np.int32).reshape(rows, length)


@functools.partial(jax.jit, static_argnums=0)
def measured(config: ModelConfig, ours: Any, other: Any, tokens_BT: jax.Array) -> jax.Array:
    """Return sums over a batch of windows: the other weights' log-probability of the text, the KL
    of their distributions from our own, and how many most likely tokens are equal.
    """
    products = choose_products(jax.devices()[0], ours["embed"]["weight"].dtype, deterministic=True)

    def log_probs(tree: Any, step: StepContext) -> jax.Array:
        model = bind(config, tree)
        hidden, _ = model(tokens_BT, step=step)
        return jax.nn.log_softmax(model.logits(hidden[:, :-1], step))

    p, q = log_probs(ours, StepContext()), log_probs(other, StepContext(products=products))
    seen = jnp.take_along_axis(q, tokens_BT[:, 1:, None], axis=-1)
    divergence = jnp.sum(jnp.exp(p) * (p - q))
    equal = jnp.sum(jnp.argmax(p, -1) == jnp.argmax(q, -1))
    return jnp.stack([jnp.sum(seen), divergence, equal.astype(jnp.float32)])


def quality(params: Params, tokens: np.ndarray, forms: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for the weights as they are, and one for each form."""
    ours, count = dict(params), tokens.shape[0] * (tokens.shape[1] - 1)
    dtype, served = params["embed"]["weight"].dtype, jpaged.EngineConfig()
    interleaved = interleaves_on(jax.devices()[0], dtype, served)
    for form in (None, *forms):
        other: Any = ours
        if form is not None:
            other = quantized_tree(params, form, interleaved=interleaved)
        sums = np.sum([measured(params.config, ours, other, row[None]) for row in tokens], 0, float)
        yield {
            "weights": form or str(params["embed"]["weight"].dtype),
            "MB": sum(leaf.nbytes for leaf in jax.tree.leaves(other)) / 1e6,
            "perplexity": float(np.exp(-sums[0] / count)),
            "kl": float(sums[1] / count),
            "greedy_kept": float(sums[2] / count),
        }


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("quality", __doc__)
    add = parser.add_argument
    add("checkpoint", nargs="?", default=MODEL_PATH, help="a checkpoint folder")
    add("--text", type=Path, nargs="+", metavar="FILE", help="what the model reads")
    add("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    add("--tokens", type=int, default=8192, help="of the text, at most (default: 8192)")
    add("--window", type=int, default=512, help="tokens that are read together (default: 512)")
    args = parser.parse_args(argv)
    common.check_positive(parser, args, "tokens", "window")
    files = args.text or sorted(Path(jpaged.__file__).parent.rglob("*.py"))
    params, tokenizer = jpaged.load_params(args.checkpoint), load_tokenizer(args.checkpoint)
    if tokenizer is None:
        parser.error(f"{args.checkpoint}: it has no tokenizer")
    ids = tokenizer.encode("\n".join(file.read_text() for file in files))
    tokens = windows(ids, args.window, args.tokens)
    if not len(tokens) or args.window < 2:
        parser.error(
            f"--window {args.window}: the text has {len(ids)} tokens, --tokens is {args.tokens}"
        )
    rows = list(quality(params, tokens, args.forms))
    cells = [[v if isinstance(v, str) else f"{v:.4g}" for v in row.values()] for row in rows]
    print("\n".join(common.aligned(list(rows[0]), cells, left=1)))
    print(common.json_line({"tokens": tokens.size, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
