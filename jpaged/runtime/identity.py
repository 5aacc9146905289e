"""What KV depends on beside its tokens, as 32 bytes that mean the same in every process: files of
blocks are found under it.
"""

import hashlib
import platform
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib.version
import numpy as np
import xxhash

from jpaged.config import EngineConfig
from jpaged.engine.cache.block_files import LAYOUT
from jpaged.models.config import ModelConfig
from jpaged.runtime.choices import Choices, layer_kernels
from jpaged.runtime.kv_cache import PoolSpec
from jpaged.runtime.mesh import Placement

# Settings that change the bits of keys and values, beside what the pools and the kernels say.
NUMBERS = ("dtype", "quantization", "quantized_activations", "deterministic")


def leaves_digest(tree: Any) -> bytes:
    """Return 32 bytes that stand for the values, dtypes, shapes and places of a tree's arrays. All
    of them are read, one after another, on the host.
    """
    whole = hashlib.blake2b(digest_size=32)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array):
            with jax.transfer_guard_device_to_host("allow"):
                array = np.asarray(leaf)
        else:
            array = np.asarray(leaf)
        whole.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        flat = np.ascontiguousarray(array).reshape(-1)
        whole.update(xxhash.xxh3_128_digest(flat.view(np.uint8)))
    return whole.digest()


def weights_digest(model: ModelConfig, *trees: Any) -> bytes:
    """Return 32 bytes that stand for a model's architecture and the values of its weights. trees:
    its params, and those of what guesses for it.
    """
    whole = hashlib.blake2b(repr(model).encode(), digest_size=32)
    for tree in trees:
        whole.update(leaves_digest(tree))
    return whole.digest()


def stored_identity(
    weights: bytes,
    model: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    choices: Choices,
    pools: Sequence[PoolSpec],
) -> bytes:
    """Return what blocks of these weights are written and found under. Bits of KV depend on more
    than the weights: on what computes them and on how many devices add up their parts, so a fetched
    prefix has the bits of a computed one.
    """
    device = placement.device
    facts = [
        ("layout", LAYOUT),
        ("jax", jax.__version__, jaxlib.version.__version__),
        ("device", device.platform, device.device_kind, platform.machine(), _cpu_features(device)),
        ("devices", placement.axis_size),
        ("block_size", config.block_size),
        *((name, repr(getattr(config, name))) for name in NUMBERS),
        ("speculative", None if config.speculative is None else config.speculative.method),
        ("layers", sorted(layer_kernels(model, choices).items(), key=str)),
        ("products", type(choices.products).__name__, repr(choices.in_fp8)),
    ]
    for pool in pools:
        kernel = None if pool.kernel is None else pool.kernel.name
        fields = [(x.name, x.shape, x.split, str(np.dtype(x.dtype))) for x in pool.record.fields]
        facts.append(("pool", kernel, pool.group.layers, pool.group.window, fields))
    return hashlib.blake2b(weights + repr(facts).encode(), digest_size=32).digest()


def _cpu_features(device: Any) -> str:
    """Return what a CPU can do, which decides what kernels and XLA make of a step; "" of others."""
    if device.platform != "cpu":
        return ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()
    return " ".join(sorted(flags.split()))
