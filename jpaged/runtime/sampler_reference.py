"""What `sampler.sample` draws, said plainly: one row in numpy and float64, for a reader and for the
tests, which hold the sampler to it.
"""

import numpy as np

TILE = 128  # tokens a tile of the vocabulary


def draw(
    logits_V: np.ndarray,
    gumbel_X: np.ndarray,
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> int:
    """The token of one row. gumbel_X: noise of the TILE places in a tile, then of each tile.

    Logits come after biases, bans and penalties. Each threshold keeps an upper set of them, ties
    included, and the next one looks at what is left.
    """
    z = logits_V.astype(np.float64)
    if temperature == 0 or top_k == 1:
        return int(np.argmax(z))  # the lowest of equal ids
    z = (z - z.max()) / temperature
    kept = np.exp(z) >= min_p
    if top_k > 0:
        kept &= z >= np.sort(z)[-min(top_k, len(z))]
    if top_p < 1:
        p = np.where(kept, np.exp(z), 0.0)
        falling = np.argsort(-z, kind="stable")
        reached = np.cumsum(p[falling]) >= top_p * p.sum()
        kept &= z >= z[falling[np.argmax(reached)]]
    z = np.where(kept, z, -np.inf)
    # A tile is drawn by the log-sum-exp of its tokens, then a token of it, each by Gumbel-max: the
    # largest of value + noise is drawn with probability softmax(value).
    tiles = np.append(z, np.full(-len(z) % TILE, -np.inf)).reshape(-1, TILE)
    with np.errstate(divide="ignore"):
        sums = np.log(np.exp(tiles).sum(axis=1))
    tile = int(np.argmax(sums + gumbel_X[TILE:]))
    return tile * TILE + int(np.argmax(tiles[tile] + gumbel_X[:TILE]))
