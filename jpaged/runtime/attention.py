"""Kernel: the implementation of paged attention that serves a group of layers, chosen when an
engine starts.
"""

import dataclasses
import logging
import warnings
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.errors import UnsupportedError
from jpaged.models.kv_groups import KVGroup
from jpaged.models.layers.heads import Heads, LatentHeads
from kernels_pallas.implementation import CUDA, Implementation, capability_of
from kernels_pallas.paged_attention import IMPLEMENTATIONS, head_write
from kernels_pallas.paged_attention.head_write import HeadNorm
from kernels_pallas.paged_attention.interface import AttentionOptions, Options, Shapes
from kernels_pallas.paged_attention.kv_write import write_kv
from kernels_pallas.paged_attention.pool_layout import PoolLayout

KV_DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}  # by kv_cache_dtype
BLACKWELL = 10.0  # the least compute capability of its cards
log = logging.getLogger("jpaged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """An implementation of paged attention for one device's shapes; see `choose_kernel`.

    name: key of IMPLEMENTATIONS. vectors: the widths of the two vectors that the pool holds of a KV
    head: of a key and a value (None: as wide as the key), or of a latent and a rotated key.
    interpret: it is a Pallas kernel that runs on a CPU. head_writer: of the kernel that norms and
    rotates queries and keys and writes keys and values to the pool; None: XLA does. sees_images:
    queries of some layer see up to the end of their image.
    """

    name: str
    shapes: Shapes
    vectors: tuple[int, int | None]
    interpret: bool = False
    head_writer: Implementation | None = None
    sees_images: bool = False

    @property
    def writes_heads(self) -> bool:
        """Whether a kernel prepares attention too."""
        return self.head_writer is not None

    @property
    def module(self) -> Any:
        """The module of `prepare`, `prefill` and `decode`: see kernels_pallas.paged_attention."""
        return IMPLEMENTATIONS[self.name].module()

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a query's bits are the same in any batch, in prefill and in decode."""
        return IMPLEMENTATIONS[self.name].is_batch_invariant()

    @property
    def pool_layout(self) -> PoolLayout:
        """The layout of a token's keys and values in the pool of one device."""
        return self.module.pool_layout(self.shapes.num_kv_heads, *self.vectors)

    def write(
        self,
        qkv_TKXD: Any,
        heads: Heads | LatentHeads,
        pool: Any,
        layer: Array | int,
        slot_mapping_T: Array,
        *,
        num_layers: int,
    ) -> tuple[Array, Any]:
        """Return the queries [T, H, D], and the pool with keys and values in their slots.

        q, k, v = heads(qkv). slot_mapping_T: see `kernels_pallas.paged_attention.kv_write`.
        """
        if self.head_writer is not None:
            assert isinstance(heads, Heads), "latents are prepared by XLA"
            return self._write_heads(qkv_TKXD, heads, pool, layer, slot_mapping_T, num_layers)
        q_THD, k_TKD, v_TKV = heads(qkv_TKXD)
        with jax.named_scope("write_kv"):
            kv = self.pool_layout.token(k_TKD, v_TKV)
            return q_THD, write_kv(pool, layer, kv, slot_mapping_T, num_layers=num_layers)

    def _write_heads(
        self,
        qkv_TKXD: Array,
        heads: Heads,
        pool: Any,
        layer: Array | int,
        slot_mapping_T: Array,
        num_layers: int,
    ) -> tuple[Array, Any]:
        assert self.head_writer is not None
        norm, scales, rotation = None, None, None
        if heads.q_norm is not None and heads.k_norm is not None:
            config = heads.q_norm.config
            norm = HeadNorm(config.eps, config.has_offset, config.in_f32)
            scales = heads.q_norm.scale, heads.k_norm.scale
        if heads.rotary is not None:
            rotation = heads.rotary.cos, heads.rotary.sin
        with jax.named_scope("write_heads"):
            q_THD, written = self.head_writer.module().write_heads(
                qkv_TKXD,
                pool,
                layer,
                slot_mapping_T,
                norm=norm,
                scales=scales,
                rotation=rotation,
                num_layers=num_layers,
                interpret=self.interpret,
            )
        return q_THD if heads.rotary is None else heads.rotary.scaled(q_THD), written

    def options(self, attention: AttentionOptions, num_layers: int) -> Options:
        """Return what a call of `module` is compiled for, over a pool of so many layers."""
        return Options(
            attention=attention,
            num_layers=num_layers,
            num_kv_heads=self.shapes.num_kv_heads,
            interpret=self.interpret,
        )


def choose_kernel(
    group: KVGroup,
    options: Collection[AttentionOptions],
    config: EngineConfig,
    dtype: Any,
    device: Any,
    shards: int,
    *,
    unfused: str | None = None,
) -> Kernel:
    """Return the kernel that config.attention names, or the fastest one that can run.

    group: the layers that it serves. options: of attention in all layers that read this group.
    config: resolved. dtype: of the model. shards: devices that the heads are split over. unfused:
    why no kernel can prepare attention in these layers. Raises UnsupportedError if the named kernel
    cannot run, or if none can. It may compile C++, so it is called when an engine starts (see
    choices.py).
    """
    assert group.num_heads is not None, "what these layers keep is no kernel's"
    kv = config.kv_cache_dtype
    shapes = Shapes(
        dtype=jnp.dtype(dtype),
        kv_dtype=None if kv is None else jnp.dtype(KV_DTYPES[kv]),
        head_dim=group.head_dim,
        block_size=config.block_size,
        num_heads=group.num_heads // shards,
        num_kv_heads=group.num_kv_heads // (1 if group.record.is_latent else shards),
        num_rows=config.num_rows,
        blocks_per_row=config.max_blocks_per_seq,
    )
    first, second = group.vectors
    # Latents and rotated keys lie in one row also where they are equally wide.
    is_plain = first == second and not group.record.is_latent
    vectors = (first, None if is_plain else second)
    sees_images = any(x.ends for x in options)
    if config.attention != "auto":
        reason = _unsupported(config.attention, shapes, options, device)
        check_combination(Facts(config=config, no_kernel=reason or ""))
        kernel = Kernel(
            name=config.attention,
            shapes=shapes,
            vectors=vectors,
            interpret=not IMPLEMENTATIONS[config.attention].is_compiled_for(device.platform),
            sees_images=sees_images,
        )
        return _fused(kernel, unfused, device)
    refused: list[str] = []
    for name, implementation in IMPLEMENTATIONS.items():
        if implementation.is_compiled_for(device.platform):
            reason = _unsupported(name, shapes, options, device)
            if reason is None:
                if refused and implementation.platforms is None and device.platform != "cpu":
                    _warn_of_xla(refused, device)
                elif (capability_of(device) or 0) >= BLACKWELL:
                    _warn_of_blackwell(name, device)
                kernel = Kernel(name=name, shapes=shapes, vectors=vectors, sees_images=sees_images)
                return _fused(kernel, unfused, device)
            log.info("attention='auto': not %s (%s)", name, reason)
            refused.append(f"{name}: {reason}")
    raise UnsupportedError(f"no kernel of attention can run here: {'; '.join(refused)}")


def _fused(kernel: Kernel, unfused: str | None, device: Any) -> Kernel:
    """Return a kernel that prepares attention too: on CUDA, and on a CPU if it is C++ or its
    kernels are interpreted.

    Elsewhere there are no launches to save, and the bits of XLA's kernels are kept. unfused: as in
    choose_kernel.
    """
    writers = head_write.IMPLEMENTATIONS
    names = [name for name, writer in writers.items() if writer.is_compiled_for(device.platform)]
    if device.platform not in CUDA:
        if kernel.name not in writers:
            return kernel
        platforms = writers[kernel.name].platforms  # that of the kernel, before others like it
        alike = [name for name, writer in writers.items() if writer.platforms == platforms]
        names = alike[alike.index(kernel.name) :]
    for name in names:
        writer = writers[name]
        reason = unfused or writer.module().unsupported(kernel.shapes, kernel.pool_layout, device)
        if reason is None:
            return dataclasses.replace(kernel, head_writer=writer)
        log.info("attention is not prepared by %s (%s)", name, reason)
    return kernel


def _warn_of_xla(refused: list[str], device: Any) -> None:
    """Warn that a device which has kernels is served without one."""
    warnings.warn(
        f"attention='auto' takes 'xla' on {device.device_kind}, much slower than a kernel "
        f"({'; '.join(refused)}). What can change that: dtype, block_size, max_num_seqs, "
        "max_model_len, kv_cache_dtype; attention='xla' takes it without this warning",
        stacklevel=2,
    )


def _warn_of_blackwell(name: str, device: Any) -> None:
    """Warn that a card is newer than the kernels that are made for one kind of card."""
    warnings.warn(
        f"attention='auto' takes {name!r} on {device.device_kind}, of compute capability "
        f"{device.compute_capability}: the faster kernel, 'mosaic_gpu', is Hopper's alone; "
        f"attention={name!r} takes it without this warning",
        stacklevel=2,
    )


def _unsupported(
    name: str, shapes: Shapes, options: Collection[AttentionOptions], device: Any
) -> str | None:
    """Return why an implementation cannot run on a device, compiled or interpreted, or None."""
    implementation = IMPLEMENTATIONS[name]
    is_compiled = implementation.is_compiled_for(device.platform)
    if not is_compiled and device.platform != "cpu":
        return f"not on {device.platform}"
    unsupported = implementation.module().unsupported
    reasons = (unsupported(shapes, x, device if is_compiled else None) for x in options)
    return next((reason for reason in reasons if reason is not None), None)
