"""Attention over chosen tokens of a paged context, in plain XLA for every device: `choose` says
which ones by their index keys, `attend` attends to their latents (DeepSeek Sparse Attention,
arXiv:2512.02556).

Every packed token is computed by itself, a few at a time, whatever row it belongs to: its index
keys, and then the latents that it chose, are gathered from the pools. So a token's choice is the
same in a decode and in a prefill. The loops end with the last token that is real and with the last
key that one of them sees.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, D width of a query, V of a latent, I index heads, J width of an index key, C chosen tokens; B
tokens of a tile.
"""

from kernels_pallas.sparse_attention.attend import attend
from kernels_pallas.sparse_attention.choose import choose, index_scores

__all__ = ["attend", "choose", "index_scores"]
