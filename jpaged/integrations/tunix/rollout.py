"""JPagedRollout lets google-tunix's RLCluster sample with jpaged in place of its own sampler.

    ClusterConfig(rollout_engine=JPagedRollout, rollout_config=RolloutConfig(...), ...)

or functools.partial(JPagedRollout, lora_scale=..., engine_config=...) for settings that
RolloutConfig does not have.
"""

import dataclasses
import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.api import generate, score
from jpaged.checkpoint.name_maps import NameMap
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError, RequestError
from jpaged.integrations.tunix.drawing import Drawing
from jpaged.integrations.tunix.models import describe
from jpaged.integrations.tunix.weights import LiveWeights
from jpaged.models.config import ModelConfig
from jpaged.models.params import TENSOR_AXES

# isort: split
from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
    BaseRollout,
    RolloutConfig,
    RolloutOutput,
)

# RolloutConfig's fields that are used here; all others must have their defaults.
HONOURED = {
    "max_tokens_to_generate",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_prompt_length",
    "kv_cache_size",
    "data_type",
    "eos_tokens",
    "tensor_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
    "return_logprobs",
}
# Nobody reads a rollout as a stream, and with one token a dispatch the host limits small models.
DECODE_STEPS = 8


class JPagedRollout(BaseRollout):
    """tunix's rollout engine over jpaged.generate and jpaged.score.

    rollout_actor: a Qwen 2 or 3, Llama 3 or Gemma 3 or 4 of tunix, or any nnx module with `family`
    (a name map, see params_from) and `config`. tokenizer: Hugging Face, sentencepiece or tunix's
    adapter; its pad and EOS ids must differ. mesh: where to serve; on the actor's own mesh its
    weights are read as they are at each call, on another they are those of the last update_params.
    rollout_config: bounds the context (kv_cache_size, or prompt and completion if these are more).
    family, config: None takes those of the actor's class. lora_scale: alpha / rank of the actor's
    LoRA parts; needed if it has any. They are served as an adapter: new ones go into its slot at
    the next call, and the base weights stay as they are. merge_lora: merge them once a version
    instead, for rollouts so long that it pays. keep_eos: leave the EOS token in the tokens (never
    in the text), as tunix's vLLM engine does: a trajectory of several turns has the end of each
    turn then, and the trainer learns to end one. False leaves it out, as tunix's own sampler does.
    seed: of calls whose config has none; they differ from call to call. engine_config: jpaged's
    settings; max_model_len and dtype are set here. A pad token that the model draws ends a
    completion, since tunix's trainer would take it for padding. Any thread may call. Raises
    ConfigError for all that cannot be honoured.
    """

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Mesh | None,
        rollout_config: RolloutConfig,
        family: str | NameMap | None = None,
        config: ModelConfig | None = None,
        lora_scale: float | None = None,
        merge_lora: bool = False,
        keep_eos: bool = True,
        seed: int = 0,
        engine_config: EngineConfig | None = None,
    ):
        self._drawing = Drawing.of(tokenizer, keep_eos=keep_eos)
        base = EngineConfig(decode_steps=DECODE_STEPS) if engine_config is None else engine_config
        longest = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        self._max_len = base.max_model_len or max(longest, rollout_config.kv_cache_size)
        self._engine_config = dataclasses.replace(base, max_model_len=self._max_len)
        self._seed = seed
        self._compute_dtype = getattr(getattr(rollout_actor, "config", None), "dtype", None)
        self._rollout_config = rollout_config
        self.mesh = None if mesh is None or mesh.empty else mesh
        _check(rollout_config, self.mesh)
        if family is None or config is None:
            known = describe(rollout_actor, self._max_len)
            family, config = family or known[0], config or known[1]
        settings = (family, config, lora_scale, merge_lora)
        self._weights = LiveWeights(rollout_actor, self.mesh, *settings)
        self._calls = 0
        self._lock = threading.Lock()  # of _weights and _calls
        self._weights.current()

    def generate(
        self, prompts: str | list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Return one completion of each prompt, or of a single one. Equal prompts get different
        samples, and the same seed gives the same samples again.

        left_padded_prompt_tokens is max_prompt_length wide, or a power of two if a prompt is
        longer. Raises ConfigError if a prompt and max_tokens_to_generate exceed the context.
        """
        if kwargs:
            raise TypeError(f"generate has no argument {next(iter(kwargs))!r}")
        _check(rollout_config, self.mesh)
        c = rollout_config
        prompts = [prompts] if isinstance(prompts, str) else prompts
        tokens = [self._drawing.token_ids(str(prompt)) for prompt in prompts]
        longest = max(len(ids) for ids in tokens)
        width = (
            c.max_prompt_length
            if longest <= c.max_prompt_length
            else 1 << (longest - 1).bit_length()
        )
        if longest + c.max_tokens_to_generate > self._max_len:
            asked = f"a prompt of {longest} and a completion of {c.max_tokens_to_generate} tokens"
            raise ConfigError(
                f"{asked} are longer than {self._max_len}: raise kv_cache_size of the train config"
            )
        sampling = self._drawing.sampling_params(
            max_tokens=c.max_tokens_to_generate,
            temperature=c.temperature,
            top_p=c.top_p,
            top_k=c.top_k,
            eos_tokens=c.eos_tokens,
        )
        with self._lock:
            self._calls += 1
            calls = self._calls
            params, lora = self._weights.current()
        seed = jax.random.fold_in(jax.random.key(self._seed), calls) if c.seed is None else c.seed
        outs = generate(
            params,
            tokens,
            sampling,
            lora=lora,
            mesh=self.mesh,
            seed=seed,
            engine_config=self._settings(c),
        )
        drawn = [self._drawing.drawn(out.outputs[0]) for out in outs]
        padded = np.full((len(tokens), width), self.pad_id(), np.int32)
        for row, ids in zip(padded, tokens, strict=True):
            row[width - len(ids) :] = ids
        return RolloutOutput(
            text=[one.text for one in drawn],
            logits=None,
            tokens=[one.tokens for one in drawn],
            left_padded_prompt_tokens=padded,
            logprobs=[one.logprobs for one in drawn] if c.return_logprobs else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Return the model's log-probabilities of completions, float32 [B, C], with 0 for padding.

        prompt_tokens [B, P], completion_tokens [B, C]; pad ids in either are left out. The
        temperature is 1, as in tunix's own sampler.
        """
        prompts, completions = (
            np.asarray(jax.device_get(prompt_tokens)),
            np.asarray(jax.device_get(completion_tokens)),
        )
        pad = self.pad_id()
        rows = [
            (p[p != pad].tolist(), c != pad, c) for p, c in zip(prompts, completions, strict=True)
        ]
        if empty := [i for i, (prompt, *_) in enumerate(rows) if not prompt]:
            raise RequestError(
                f"prompt {empty[0]} is nothing but padding: the token after it has no probability"
            )
        sequences = [prompt + c[real].tolist() for prompt, real, c in rows]
        settings = self._settings(self._rollout_config)
        with self._lock:
            params, lora = self._weights.current()
        scores = score(params, sequences, lora=lora, mesh=self.mesh, engine_config=settings)
        out = np.zeros(completions.shape, np.float32)
        for i, (prompt, real, _) in enumerate(rows):
            out[i, real] = scores[i][len(prompt) - 1 :]
        return jnp.asarray(out)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Take new weights, or new LoRA parts alone, which leave the other weights as they are. The
        next call converts the new ones; nothing is copied or moved here.
        """
        del filter_types  # not needed: `params` has what passed the filter
        with self._lock:
            self._weights.update(params if isinstance(params, nnx.State) else nnx.State(params))

    def pad_id(self) -> int:
        """Return the tokenizer's pad id."""
        return self._drawing.tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the tokenizer's EOS id."""
        return self._drawing.tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """Return the module whose weights are served."""
        return self._weights.module

    def _settings(self, c: RolloutConfig) -> EngineConfig:
        """Return the engine's settings for a rollout config. The dtype is data_type, or the one
        that the actor computes in.
        """
        if self._engine_config.dtype is not None:
            return self._engine_config
        dtype = c.data_type if c.data_type is not None else self._compute_dtype
        return dataclasses.replace(
            self._engine_config, dtype=None if dtype is None else jnp.dtype(dtype).name
        )


def _check(c: RolloutConfig, mesh: Mesh | None) -> None:
    """Raise ConfigError for the first field that is not supported."""
    default = RolloutConfig()
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        if field.name not in HONOURED and value != getattr(default, field.name):
            raise ConfigError(
                f"rollout_config.{field.name}={value!r}: JPagedRollout does not support it"
            )
    axes = {} if mesh is None else dict(mesh.shape)
    tensor = next((axes[name] for name in TENSOR_AXES if name in axes), 1)
    replicas = math.prod(axes.values()) // tensor
    for name, served in (("tensor", tensor), ("data", replicas), ("expert", 1)):
        if (size := getattr(c, f"{name}_parallel_size")) not in (-1, served):
            said = f"rollout_config.{name}_parallel_size={size}"
            raise ConfigError(f"{said}: the mesh {axes} serves with {served} (-1 takes it)")
