"""A pytest plugin under which tunix's own tests use jpaged: -p tests.clients.in_tunix.

In the place of its "vanilla" rollout engine stands JPagedRollout, in that of its sampler's adapter
JPagedSampler, and in that of its toy transformer, which has no attention and which jpaged does not
know, a Qwen3 of one layer. `calls` counts what came to jpaged, and the last line of the report says
it.
"""

import collections
import functools
import math
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# As its tests set it, before they import jax.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jpaged
from jpaged.integrations.tunix import JPagedRollout
from jpaged.integrations.tunix.models import describe

# pyright: reportMissingImports=false
# isort: split
import qwix
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl import reshard, rl_cluster
from tunix.tests import test_common

ENGINE: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "max_num_seqs": 8,
    "seq_buckets": (8,),
    "decode_steps": 4,
}
calls: collections.Counter[str] = collections.Counter()


class Toy(Qwen3):
    """What test_common.ToyTransformer is called with."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        sizes = {"embed_dim": 16, "hidden_dim": 32, "num_heads": 2, "num_kv_heads": 2}
        known = ModelConfig(
            num_layers=1,
            vocab_size=config.vocab_size,
            head_dim=8,
            rope_theta=1_000_000,
            norm_eps=1e-6,
            **sizes,
        )
        super().__init__(known, rngs=rngs)
        rng = np.random.default_rng(0)

        def draw(x: jax.Array) -> jax.Array:  # its own initial MLP is all zeros
            if x.ndim == 1:
                return x
            return jnp.asarray(rng.standard_normal(x.shape) / math.sqrt(x.shape[0]), x.dtype)

        nnx.update(self, jax.tree.map(draw, nnx.state(self, nnx.Param)))


class Counted(JPagedRollout):
    """Counts its calls."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        calls["generate"] += 1
        return super().generate(*args, **kwargs)

    def get_per_token_logps(self, *args: Any, **kwargs: Any) -> Any:
        calls["get_per_token_logps"] += 1
        return super().get_per_token_logps(*args, **kwargs)


engine = functools.partial(
    Counted, engine_config=jpaged.EngineConfig(**ENGINE), lora_scale=0.5, keep_eos=False
)
make_config = rl_cluster.ClusterConfig.__init__


def cluster_config(self: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("rollout_engine") == "vanilla":
        kwargs["rollout_engine"] = engine
    make_config(self, *args, **kwargs)


def lora_model(
    model: Any, module_path: str = "", mesh: Any = None, rank: int = 4, alpha: float = 2.0
) -> Any:
    """What test_common.get_lora_model is called with; module_path is the toy's."""
    inputs = test_common.get_dummy_inputs_for_lora_toy_transformer_tests()
    inputs["input_tokens"] = inputs.pop("x")
    names = ".*gate_proj|.*down_proj"
    provider = qwix.LoraProvider(module_path=names, rank=rank, alpha=alpha)
    made = qwix.apply_lora_to_model(model, provider, **inputs)
    return made if mesh is None else reshard.reshard_model_to_mesh(made, mesh)


test_common.ToyTransformer = Toy
test_common.get_lora_model = lora_model
rl_cluster.ClusterConfig.__init__ = cluster_config

try:
    from tunix.experimental.rollout import vanilla_sampler_adapter
except ImportError:  # before 0.1.8
    pass
else:
    from jpaged.integrations.tunix.sampler import JPagedSampler

    class Adapter(JPagedSampler):
        """What vanilla_sampler_adapter.VanillaSamplerAdapter is called with."""

        def __init__(self, server_id: str, transformer: Any, tokenizer: Any, cache_config: Any):
            is_size = isinstance(cache_config, int)
            size = cache_config if is_size else cache_config.cache_size
            family, config = describe(transformer, size)
            params = jpaged.params_from(transformer, family, config=config)
            llm = jpaged.LLM(config, params=params, max_model_len=size, num_blocks=64, **ENGINE)
            super().__init__(llm, tokenizer=tokenizer, server_id=server_id)

        async def sample(self, *args: Any, **kwargs: Any) -> Any:
            calls["sample"] += 1
            return await super().sample(*args, **kwargs)

    vanilla_sampler_adapter.VanillaSamplerAdapter = Adapter


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"calls of jpaged: {dict(calls)}")
