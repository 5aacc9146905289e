"""What sampler.py computes, said plainly: one row in numpy and float64, for a reader and for the
tests, which hold the sampler to it.
"""

from typing import NamedTuple

import numpy as np

TILE = 128  # tokens a tile of the vocabulary


class Kept(NamedTuple):
    """What a row draws from, with probability softmax(z_V). takes_first: the lowest id of the
    largest, in place of a draw.
    """

    z_V: np.ndarray  # logits / temperature, -inf for what is not kept
    takes_first: bool


def distribution(
    logits_V: np.ndarray,
    mask_V: np.ndarray | None = None,
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Kept:
    """Apply the controls. Logits come after biases, bans and penalties; mask_V: what is allowed.

    Each threshold keeps an upper set of the logits, ties included, and the next one looks at what
    is left; top_k 1 keeps one token.
    """
    z = logits_V.astype(np.float64)
    if mask_V is not None:
        z = np.where(mask_V, z, -np.inf)
    if temperature == 0:
        return Kept(z, takes_first=True)
    z = (z - z.max()) / temperature
    if top_k == 1:
        return Kept(np.where(np.arange(len(z)) == np.argmax(z), z, -np.inf), takes_first=True)
    kept = np.exp(z) >= min_p
    if top_k > 0:
        kept &= z >= np.sort(z)[-min(top_k, len(z))]
    if top_p < 1:
        p = np.where(kept, np.exp(z), 0.0)
        falling = np.argsort(-z, kind="stable")
        reached = np.cumsum(p[falling]) >= top_p * p.sum()
        kept &= z >= z[falling[np.argmax(reached)]]
    return Kept(np.where(kept, z, -np.inf), takes_first=False)


def draw(kept: Kept, gumbel_X: np.ndarray) -> int:
    """Return the token. gumbel_X: noise of the TILE places in a tile, then of each tile."""
    if kept.takes_first:
        return int(np.argmax(kept.z_V))  # the lowest of equal ids
    # A tile is drawn by the log-sum-exp of its tokens, then a token of it, each by Gumbel-max: the
    # largest of value + noise is drawn with probability softmax(value).
    padding = np.full(-len(kept.z_V) % TILE, -np.inf)
    tiles = np.append(kept.z_V, padding).reshape(-1, TILE)
    with np.errstate(divide="ignore"):
        sums = np.log(np.exp(tiles).sum(axis=1))
    tile = int(np.argmax(sums + gumbel_X[TILE:]))
    return tile * TILE + int(np.argmax(tiles[tile] + gumbel_X[:TILE]))


def report(kept: Kept, token: int) -> float:
    """Return the token's "processed" log-probability."""
    return float(kept.z_V[token] - np.logaddexp.reduce(kept.z_V))
