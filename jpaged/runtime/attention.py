"""Kernel: the implementation of paged attention that serves a group of layers, chosen when an
engine starts.
"""

import dataclasses
import logging
import warnings
from typing import Any

import jax.numpy as jnp
from jax import Array

from jpaged.config import EngineConfig
from jpaged.errors import UnsupportedError
from jpaged.models.config import ModelConfig
from jpaged.models.kv_view import KVGroup
from kernels_pallas.paged_attention import IMPLEMENTATIONS
from kernels_pallas.paged_attention.interface import Options, Shapes
from kernels_pallas.paged_attention.pool_layout import PoolLayout

KV_DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}  # by kv_cache_dtype
log = logging.getLogger("jpaged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """An implementation of paged attention for one device's shapes; `choose_kernel` finds it.

    name: in IMPLEMENTATIONS. interpret: it is a Pallas kernel, on a CPU.
    """

    name: str
    shapes: Shapes
    interpret: bool = False

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a query's bits depend on nothing else in its batch, prefill and decode alike."""
        return IMPLEMENTATIONS[self.name].is_batch_invariant()

    @property
    def pool_layout(self) -> PoolLayout:
        """How a token's keys and values lie in the pool of one device."""
        return self._module.pool_layout(self.shapes.num_kv_heads, self.shapes.head_dim)

    def pack_kv(self, k_TKD: Array, v_TKD: Array) -> Array:
        """New keys and values as the pool holds them, [T, rows, width]."""
        kv_TK2D = jnp.stack([k_TKD, v_TKD], axis=2)
        return self.pool_layout.pack(kv_TK2D.reshape(k_TKD.shape[0], -1, k_TKD.shape[-1]))

    def prepare(
        self,
        query_start_loc_S1: Array,
        context_lens_S: Array,
        *,
        num_tokens: int,
        sliding_window: int | None,
    ) -> Any:
        """What `prefill` takes as `prepared` in every layer of this window. num_tokens: T."""
        return self._module.prepare(
            query_start_loc_S1,
            context_lens_S,
            num_tokens=num_tokens,
            shapes=self.shapes,
            sliding_window=sliding_window,
        )

    def prefill(
        self,
        q_THD: Array,
        pool: Any,
        layer: Array | int,
        block_table_SM: Array,
        context_lens_S: Array,
        query_start_loc_S1: Array,
        prepared: Any = None,
        *,
        num_layers: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks_H: Array | None = None,
    ) -> Array:
        """Causal attention of packed queries, [T, H, D] in q's dtype; see
        `kernels_pallas.paged_attention.reference.prefill`.
        """
        options = self._options(num_layers, scale, sliding_window, soft_cap)
        rows = (block_table_SM, context_lens_S, query_start_loc_S1, prepared)
        return self._module.prefill(q_THD, pool, layer, *rows, options=options, sinks_H=sinks_H)

    def decode(
        self,
        q_SHD: Array,
        pool: Any,
        layer: Array | int,
        block_table_SM: Array,
        context_lens_S: Array,
        *,
        num_layers: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks_H: Array | None = None,
    ) -> Array:
        """Attention of one query a row, [S, H, D] in q's dtype; see
        `kernels_pallas.paged_attention.reference.decode`.
        """
        options = self._options(num_layers, scale, sliding_window, soft_cap)
        rows = (block_table_SM, context_lens_S)
        return self._module.decode(q_SHD, pool, layer, *rows, options=options, sinks_H=sinks_H)

    @property
    def _module(self) -> Any:
        return IMPLEMENTATIONS[self.name].module()

    def _options(
        self, num_layers: int, scale: float, sliding_window: int | None, soft_cap: float | None
    ) -> Options:
        return Options(
            scale=scale,
            num_layers=num_layers,
            num_kv_heads=self.shapes.num_kv_heads,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            interpret=self.interpret,
        )


def choose_kernel(
    model: ModelConfig, group: KVGroup, config: EngineConfig, dtype: Any, device: Any, shards: int
) -> Kernel:
    """The kernel that `attention` of a resolved config names, or the best that runs a group of
    layers on a device.

    dtype: the model's. shards: devices that the heads are split over. UnsupportedError where the
    one that is named cannot run. Asking may compile C++: it happens when an engine starts.
    """
    kv = config.kv_cache_dtype
    shapes = Shapes(
        dtype=jnp.dtype(dtype),
        kv_dtype=None if kv is None else jnp.dtype(KV_DTYPES[kv]),
        head_dim=group.head_dim,
        block_size=config.block_size,
        num_heads=model.num_heads // shards,
        num_kv_heads=group.num_kv_heads // shards,
        num_rows=config.max_num_seqs,
        blocks_per_row=config.max_blocks_per_seq,
    )
    if config.attention != "auto":
        if reason := _unsupported(config.attention, shapes, device):
            raise UnsupportedError(
                f"attention={config.attention!r} cannot run: {reason}; 'auto' takes what can"
            )
        is_compiled = IMPLEMENTATIONS[config.attention].is_compiled_for(device.platform)
        return Kernel(name=config.attention, shapes=shapes, interpret=not is_compiled)
    refused: list[str] = []
    for name, implementation in IMPLEMENTATIONS.items():
        if implementation.is_compiled_for(device.platform):
            reason = _unsupported(name, shapes, device)
            if reason is None:
                if refused and implementation.platforms is None and device.platform != "cpu":
                    _warn_of_xla(refused, device)
                return Kernel(name=name, shapes=shapes)
            log.info("attention='auto': not %s (%s)", name, reason)
            refused.append(f"{name}: {reason}")
    raise AssertionError("one of them runs everywhere")


def _warn_of_xla(refused: list[str], device: Any) -> None:
    """That a device which there are kernels for is served without: shown once, as warnings are."""
    warnings.warn(
        f"attention='auto' takes 'xla' on {device.device_kind}, much slower than a kernel "
        f"({'; '.join(refused)}). What can change that: dtype, block_size, max_num_seqs, "
        "max_model_len, kv_cache_dtype; attention='xla' takes it without this warning",
        stacklevel=2,
    )


def _unsupported(name: str, shapes: Shapes, device: Any) -> str | None:
    """Why an implementation cannot run on a device, compiled or, on a CPU, interpreted."""
    implementation = IMPLEMENTATIONS[name]
    is_compiled = implementation.is_compiled_for(device.platform)
    if not is_compiled and device.platform != "cpu":
        return f"not on {device.platform}"
    return implementation.module().unsupported(shapes, device if is_compiled else None)
