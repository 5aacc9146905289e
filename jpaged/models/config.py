"""ModelConfig: the architecture, read from a Hugging Face config.json; frozen and compared by
value.
"""

import copy
import dataclasses
import importlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from jpaged.checks import at_least, read_json
from jpaged.errors import ConfigError
from jpaged.models.families import FAMILIES

HF_NAMES = {  # of ModelConfig's sizes in a config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}
# what each kind reads beside its factor; anything else in the file changes no number
ROPE_OPTIONS = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings.

    Source: linear (position interpolation, arXiv:2306.15595), yarn (arXiv:2309.00071), llama3
    (Llama 3.1's config).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of one dense decoder; every size and every family is flags of this one
    definition.

    Compared by value, without `eos_token_ids`: they ride along and change no shape and no number.
    """

    family: Literal["qwen3", "qwen2", "llama", "mistral"]
    vocab_size: int  # V
    hidden_size: int  # E
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    sliding_windows: tuple[int | None, ...] = ()  # one a layer; () is full attention everywhere
    eos_token_ids: tuple[int, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        at_least(
            1,
            self,
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        )
        at_least(2, self, "head_dim")
        at_least(1, self, "max_position_embeddings")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim}: rotary embeddings need an even head_dim")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ConfigError(
                f"{len(self.sliding_windows)} sliding windows for num_layers={self.num_layers}"
            )

    @property
    def has_lm_head(self) -> bool:
        """Whether logits have a weight of their own."""
        return not self.tie_word_embeddings

    @property
    def group_size(self) -> int:
        """G: query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    def sliding_window(self, layer: int) -> int | None:
        """The window of a layer in tokens (a query sees itself and window - 1 before it); None is
        full attention.
        """
        return self.sliding_windows[layer] if self.sliding_windows else None

    @classmethod
    def coerce(cls, config: "ModelConfig | Mapping[str, Any] | str | os.PathLike[str]") -> Self:
        """From a ModelConfig (as it is), a Hugging Face config dict, or a folder that holds a
        config.json.
        """
        if isinstance(config, cls):
            return config
        if isinstance(config, Mapping):
            return cls.from_hf(config)
        if isinstance(config, str | os.PathLike):
            return cls.from_hf(read_json(Path(config) / "config.json"))
        raise ConfigError(
            f"config={config!r}: pass a ModelConfig, a Hugging Face config dict or a "
            "checkpoint folder"
        )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """From the dict of a Hugging Face config.json; transformers fills in the family's defaults.

        Raises ConfigError for any architecture or option outside the four dense families, by name.
        """
        model_type = str(raw.get("model_type"))
        family = FAMILIES.get(model_type)
        named = raw.get("architectures") or (family.architecture if family else model_type)
        architecture = named[0] if isinstance(named, list | tuple) else named
        if family is None or architecture != family.architecture:
            built = ", ".join(family.architecture for family in FAMILIES.values())
            asked = f"architecture {architecture!r} (model_type {model_type!r})"
            raise ConfigError(f"{asked} is not supported; supported are {built}")
        if quantization := raw.get("quantization_config"):
            method = (
                quantization.get("quant_method")
                if isinstance(quantization, Mapping)
                else quantization
            )
            raise ConfigError(
                f"quantization_config ({method!r}): quantized checkpoints are not supported"
            )
        try:  # of a copy: the config classes write into nested dicts
            known = copy.deepcopy({k: v for k, v in raw.items() if k != "transformers_version"})
            hf = import_transformers().CONFIG_MAPPING[model_type].from_dict(known).to_dict()
        except Exception as e:  # the config classes validate with errors of many types
            raise ConfigError(f"config.json of {architecture}: {' '.join(str(e).split())}") from e
        for knob, wanted in (
            ("hidden_act", "silu"),
            ("mlp_bias", False),
            ("partial_rotary_factor", 1.0),
        ):
            if hf.get(knob, wanted) not in (wanted, None):
                raise ConfigError(f"{knob}={hf[knob]!r} is not supported (only {wanted!r})")
        rope = hf["rope_parameters"]  # transformers moves every older name into it
        # Not hf: some families default to an id that the file never named.
        eos = raw.get("eos_token_id")
        eos = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
        if not all(isinstance(token, int) for token in eos):
            raise ConfigError(
                f"eos_token_id={raw['eos_token_id']!r}: must be an integer or a list of integers"
            )
        hf["head_dim"] = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        switches = {
            ours: bool(hf.get(key)) for key, set_by in family.keys.items() for ours in set_by
        }
        return cls(
            **{ours: hf[theirs] for ours, theirs in HF_NAMES.items()},
            **switches,
            **family.always,
            family=model_type,  # pyright: ignore[reportArgumentType]
            rope_theta=float(rope["rope_theta"] or 10000.0),
            rope_scaling=_rope_scaling(rope, hf["max_position_embeddings"]),
            tie_word_embeddings=bool(hf["tie_word_embeddings"]),
            sliding_windows=() if family.windows == "none" else _sliding_windows(hf),
            eos_token_ids=eos,
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json that `from_hf` reads back to an equal ModelConfig."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if s := self.rope_scaling:
            rope |= {"rope_type": s.kind, "factor": s.factor}
            if s.kind != "linear" or s.original_max_position != self.max_position_embeddings:
                rope |= {"original_max_position_embeddings": s.original_max_position}
            rope |= {name: getattr(s, name) for name in ROPE_OPTIONS[s.kind]}
        family = FAMILIES[self.family]
        raw: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": self.family,
            **{theirs: getattr(self, ours) for ours, theirs in HF_NAMES.items()},
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        raw |= {key: getattr(self, switches[0]) for key, switches in family.keys.items()}
        window = next((w for w in self.sliding_windows if w), None)
        if family.windows == "every layer":
            raw["sliding_window"] = window
        elif window:
            kinds = ["sliding_attention" if w else "full_attention" for w in self.sliding_windows]
            raw |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
        return raw


def import_transformers() -> Any:
    """The transformers package, imported here alone: it takes a second, and would advise to install
    PyTorch.
    """
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    is_set = quiet in os.environ
    os.environ.setdefault(quiet, "1")
    try:
        return importlib.import_module("transformers")
    finally:
        if not is_set:
            del os.environ[quiet]


def _rope_scaling(rope: dict[str, Any], max_position: int) -> RopeScaling | None:
    kind = rope["rope_type"]
    if (
        rope.get("partial_rotary_factor") not in (None, 1.0)
        or rope.get("mscale")
        or rope.get("mscale_all_dim")
    ):
        raise ConfigError(f"rope_parameters={rope}: partial rotary and mscale are not supported")
    if kind == "default":
        return None
    if kind not in ROPE_OPTIONS:
        raise ConfigError(
            f"rope_type={kind!r} is not supported (default, linear, llama3 and yarn are)"
        )
    original = rope.get("original_max_position_embeddings") or max_position
    options = {name: rope[name] for name in ROPE_OPTIONS[kind] if rope.get(name) is not None}
    options["factor"] = rope.get("factor") or max_position / original
    if bad := {
        k: v for k, v in options.items() if not isinstance(v, int | float) or not math.isfinite(v)
    }:
        raise ConfigError(f"rope_parameters={bad}: must be numbers")
    if kind == "yarn" and "attention_factor" not in options:
        options["attention_factor"] = (
            0.1 * math.log(options["factor"]) + 1.0 if options["factor"] > 1 else 1.0
        )
    return RopeScaling(kind=kind, original_max_position=original, **options)


def _sliding_windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """One window a layer; () where every layer attends to everything."""
    window, kinds = hf.get("sliding_window"), hf.get("layer_types")
    kinds = ["sliding_attention"] * hf["num_hidden_layers"] if kinds is None else kinds
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ConfigError(f"layer_types {sorted(unknown)} are not supported")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()
