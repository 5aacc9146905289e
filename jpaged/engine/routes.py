"""Routes: which experts of a mixture each token took, as blocks of the cache say it."""

from collections.abc import Sequence

import numpy as np

from jpaged.engine.types import BlockData


def chosen_experts(blocks: Sequence[BlockData]) -> np.ndarray:
    """Return the experts of the tokens of blocks that were read, [tokens, layers, experts]: see
    Device.fetch_blocks.
    """
    fields = [field for block in blocks for field in block.values()]  # one each
    # Each device that shares the model has them all.
    of_blocks = np.stack([field[0] if isinstance(field, list) else field for field in fields])
    by_token = of_blocks.transpose(0, 2, 1, 3)  # from [blocks, layers, tokens, experts]
    return by_token.reshape(-1, *by_token.shape[2:])
