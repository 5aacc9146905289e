"""Paged attention: `reference` defines the operation, IMPLEMENTATIONS lists those that serve.

Each is a module of the same functions, whose arguments `interface` describes:

    unsupported(shapes, device) -> why it cannot run there, or None. device None: the shapes alone
    pool_layout(num_kv_heads, head_dim) -> PoolLayout of one device's pool
    prepare(query_start_loc_S1, context_lens_S, *, num_tokens, shapes, sliding_window) -> what
        `prefill` needs of a step and would otherwise make anew in each layer (any pytree, or None)
    prefill(q_THD, pool, layer, block_table_SM, context_lens_S, query_start_loc_S1, prepared=None,
        *, options, sinks_H=None) -> o_THD
    decode(q_SHD, pool, layer, block_table_SM, context_lens_S, *, options, sinks_H=None) -> o_SHD

One whose results for a query depend on that query and its context alone, to the bit and in prefill
and decode alike, says so by a function `batch_invariant() -> bool`.

`kv_write` writes new keys and values for all of them; on CUDA, `head_write` does so together with
what a layer does to queries and keys before, where it can. `cases` lists the shapes that tests and
benches share.
"""

import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Where an implementation is, and the platforms of devices that it is compiled for; None is
    all.

    One that is not compiled for CPUs is a Pallas kernel, which can be interpreted there.
    """

    path: str
    platforms: tuple[str, ...] | None = None

    def is_compiled_for(self, platform: str) -> bool:
        """platform: of a jax.Device."""
        return self.platforms is None or platform in self.platforms

    def is_batch_invariant(self) -> bool:
        """Whether a query's bits depend on nothing else in its batch."""
        says = getattr(self.module(), "batch_invariant", None)
        return says is not None and says()

    def module(self) -> Any:
        """The module, imported when it is first asked for: Pallas takes its time."""
        return importlib.import_module(self.path)


CUDA = ("gpu", "cuda")

# By name; on a device where several can run, the first of them is the fastest.
IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation("kernels_pallas.paged_attention.mosaic_gpu", CUDA),
    "triton": Implementation("kernels_pallas.paged_attention.triton", CUDA),
    "tpu": Implementation("kernels_pallas.paged_attention.tpu", ("tpu",)),
    "native": Implementation("kernels_cpu.paged_attention", ("cpu",)),
    "xla": Implementation("kernels_pallas.paged_attention.xla"),
}
