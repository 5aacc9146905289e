"""What a layer does with the pool: write its keys and values, then attend through the block
table.
"""

import dataclasses
import importlib
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.config import EngineConfig
from jpaged.errors import UnsupportedError
from jpaged.models.config import ModelConfig
from jpaged.models.kv_view import KVGroup
from kernels_pallas.paged_attention.kv_write import write_kv

log = logging.getLogger("jpaged")

# What attention="auto" tries before "xla", by platform. Those of Pallas run on CPU too when named,
# interpreted.
PREFERRED = {
    "cpu": ("native",),
    "gpu": ("mosaic_gpu", "triton"),
    "cuda": ("mosaic_gpu", "triton"),
    "tpu": ("tpu",),
}
COMPILED = ("xla", "native")  # never interpreted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of paged attention: a module of kernels_pallas.paged_attention.
    num_kv_heads: a device's.
    """

    name: str = "xla"
    interpret: bool = False
    num_kv_heads: int | None = None

    @property
    def module(self) -> Any:
        if self.name == "native":
            return importlib.import_module("kernels_cpu.paged_attention")
        return importlib.import_module(f"kernels_pallas.paged_attention.{self.name}")

    def prefill_tiles(
        self, query_starts_S1: Array, context_lens_S: Array, num_tokens: int, G: int
    ) -> Array | None:
        """Mosaic's table of query tiles, made once a step for all layers; the others make their
        own.
        """
        if self.name != "mosaic_gpu" or self.num_kv_heads is None:
            return None
        heads = {"num_heads": G * self.num_kv_heads, "num_kv_heads": self.num_kv_heads}
        return self.module.prefill_tiles(
            query_starts_S1, context_lens_S, num_tokens=num_tokens, **heads
        )


def choose_kernel(
    model: ModelConfig, config: EngineConfig, dtype: Any, device: Any, shards: int
) -> Kernel:
    """The kernel that `attention` of a resolved config names, or the best that runs on a device
    with these shapes.

    shards: devices that the heads are split over. UnsupportedError where the one that is named
    cannot run.
    """
    heads, kv_heads = model.num_heads // shards, model.num_kv_heads // shards
    shapes = {"dtype": dtype, "head_dim": model.head_dim, "block_size": config.block_size}
    shapes |= {"num_heads": heads, "num_kv_heads": kv_heads}
    preferred = PREFERRED.get(device.platform, ())
    for name in (*preferred, "xla") if config.attention == "auto" else (config.attention,):
        kernel = Kernel(
            name=name,
            interpret=device.platform == "cpu" and name not in COMPILED,
            num_kv_heads=kv_heads,
        )
        reason = None if name == "xla" else _unsupported(kernel, shapes, config, device)
        if reason is None:
            return kernel
        if config.attention == name:
            raise UnsupportedError(
                f"attention={name!r} cannot run: {reason}; 'auto' takes what can"
            )
        log.info("attention='auto': not %s (%s)", name, reason)
    raise AssertionError("xla runs everywhere")


def _unsupported(
    kernel: Kernel, shapes: dict[str, Any], config: EngineConfig, device: Any
) -> str | None:
    if not kernel.interpret and kernel.name not in PREFERRED.get(device.platform, ()):
        return f"not on {device.platform}"
    shapes = dict(shapes)
    if kernel.name == "mosaic_gpu" and not kernel.interpret:
        shapes["compute_capability"] = str(getattr(device, "compute_capability", "unknown"))
    if kernel.name == "tpu":
        shapes |= {"num_rows": config.max_num_seqs, "blocks_per_row": config.max_blocks_per_seq}
        shapes |= {} if kernel.interpret else {"device_kind": device.device_kind}
    return kernel.module.unsupported(**shapes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCache:
    """The pool and one step's view of it; threaded through the layers and returned with the pool
    updated in place.

    pool: [L*N, P, 2*K, D] (as kv_cache.layout pads it for TPUs). block_table_SM: int32, padded with
    0. context_lens_S: tokens of each row once this step is written. query_starts_S1: int32 [S+1],
    where each row's tokens begin in the packed T. slot_mapping_T: block * P + slot of each token,
    past the pool's end for padding. groups: of the model (kv_groups). decode: one token a row.
    tiles: of Kernel.prefill_tiles.
    """

    pool: Array
    block_table_SM: Array
    context_lens_S: Array
    query_starts_S1: Array
    slot_mapping_T: Array
    groups: tuple[KVGroup, ...] = dataclasses.field(metadata={"static": True})
    num_layers: int = dataclasses.field(metadata={"static": True})
    decode: bool = dataclasses.field(metadata={"static": True})
    kernel: Kernel = dataclasses.field(default=Kernel(), metadata={"static": True})
    tiles: Array | None = None

    def attend(
        self, group: int, index: Any, q: Array, k: Array, v: Array, *, scale: float
    ) -> tuple[Array, "PagedCache"]:
        """See models.kv_view.KVView."""
        layers = self.groups[group].layers
        layer = index if len(layers) == self.num_layers else jnp.asarray(layers, jnp.int32)[index]
        cache = self._write(layer, k, v)
        window = self.groups[group].window
        return cache._attend(layer, q, scale=scale, sliding_window=window), cache

    def _write(self, layer: Array | int, k_TKD: Array, v_TKD: Array) -> "PagedCache":
        """Put this step's keys and values into their slots of one layer."""
        kv = (
            jnp.stack([k_TKD, v_TKD], axis=2)
            .reshape(k_TKD.shape[0], -1, k_TKD.shape[-1])
            .astype(self.pool.dtype)
        )
        kv = self.kernel.module.to_pool(kv) if self.kernel.name == "tpu" else kv
        with jax.named_scope("write_kv"):
            pool = write_kv(self.pool, layer, kv, self.slot_mapping_T, num_layers=self.num_layers)
        return dataclasses.replace(self, pool=pool)

    def _attend(
        self, layer: Array | int, q_THD: Array, *, scale: float, sliding_window: int | None
    ) -> Array:
        """Attention of this step's queries over each row's whole context, in q's dtype."""
        args = (q_THD, self.pool, layer, self.block_table_SM, self.context_lens_S)
        options: dict[str, Any] = {
            "num_layers": self.num_layers,
            "scale": scale,
            "sliding_window": sliding_window,
        }
        options |= {} if self.kernel.name in COMPILED else {"interpret": self.kernel.interpret}
        options |= {"num_kv_heads": self.kernel.num_kv_heads} if self.kernel.name == "tpu" else {}
        with jax.named_scope("paged_attention"):
            if self.decode:
                return self.kernel.module.paged_attention_decode(*args, **options)
            options |= {} if self.tiles is None else {"tiles": self.tiles}
            return self.kernel.module.paged_attention(*args, self.query_starts_S1, **options)
