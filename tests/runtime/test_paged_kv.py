"""PagedKV passes a layer's options and sinks on to the kernel without opening them."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jpaged.config import EngineConfig
from jpaged.models.kv_groups import attention_options, kv_groups
from jpaged.models.kv_view import Place
from jpaged.models.layers.heads import Heads
from jpaged.runtime import attention
from jpaged.runtime.attention import choose_kernel
from jpaged.runtime.kv_cache import PoolSpec
from jpaged.runtime.paged_kv import GroupView, PagedKV
from kernels_pallas.paged_attention.interface import AttentionOptions
from tests.hlo import filled
from tests.tiny import CONFIG, ENGINE

ROOT = Path(__file__).parents[2]
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoreOptions(AttentionOptions):
    """With an option that nobody between the layer and the kernel can know."""

    sees_images: bool = False


def view(config: EngineConfig, *, is_decode: bool) -> PagedKV:
    (group,) = kv_groups(CONFIG)
    (options,) = attention_options(CONFIG)
    kernel = choose_kernel(group, options, config, jnp.float32, CPU, 1)
    sizes = {"num_blocks": 4, "block_size": config.block_size, "dtype": jnp.dtype("float32")}
    spec = PoolSpec(group=group, kernel=kernel, **sizes)
    table, zeros = jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)
    return PagedKV(
        pools=(filled(spec, 0.0),),
        groups=(GroupView(block_table_SM=table, slot_mapping_T=zeros + 10**6, prepared="ready"),),
        context_lens_S=zeros,
        query_start_loc_S1=jnp.zeros(3, jnp.int32),
        specs=(spec,),
        is_decode=is_decode,
    )


@pytest.mark.parametrize("is_decode", [True, False])
def test_options_and_sinks_reach_the_kernel_unopened(
    is_decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def record(q: Any, pool: Any, layer: Any, *rows: Any, options: Any, sinks_H: Any) -> Any:
        given.update(rows=rows, options=options, sinks=sinks_H)
        return q

    kv = view(ENGINE.resolve(CONFIG), is_decode=is_decode)
    kernel = kv.specs[0].kernel
    assert kernel is not None
    module = SimpleNamespace(prefill=record, decode=record, pool_layout=kernel.module.pool_layout)
    implementation = SimpleNamespace(module=lambda: module)
    monkeypatch.setitem(attention.IMPLEMENTATIONS, kernel.name, implementation)
    options = MoreOptions(scale=0.5, sinks=True, sees_images=True)
    sinks = jnp.zeros(CONFIG.num_heads)
    K, G, D = CONFIG.num_kv_heads, CONFIG.group_size, CONFIG.head_dim
    heads = Heads(q_norm=None, k_norm=None, rotary=None)
    place = Place(0, 0)
    q, kv = kv.write(place, jnp.zeros((2, K, G + 2, D)), heads)
    kv.attend(place, q, options, sinks)
    assert given["options"].attention is options and given["sinks"] is sinks
    assert given["options"].num_layers == CONFIG.num_layers
    assert len(given["rows"]) == (2 if is_decode else 4)
    assert is_decode or given["rows"][-1] == "ready"


def files_that_name(word: str) -> list[str]:
    """Files of jpaged/ in which a word stands."""
    pattern = re.compile(rf"\b{word}\b")
    files = sorted((ROOT / "jpaged").rglob("*.py"))
    return [str(f.relative_to(ROOT / "jpaged")) for f in files if pattern.search(f.read_text())]


def test_an_option_is_named_by_the_config_and_the_reference_alone() -> None:
    """The layer's config makes the value, the dense attention of training computes with it."""
    assert files_that_name("soft_cap") == [
        "models/alike.py",
        "models/kv_view.py",
        "models/layers/attention.py",
    ]
