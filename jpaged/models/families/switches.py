"""Switches: a table by which most families are read from a config.json and written back."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from jpaged.errors import ConfigError
from jpaged.models.alike import Alike
from jpaged.models.rope_scaling import ROPE_OPTIONS, RopeScaling

SIZES = {  # of models.alike.Alike, in a config.json
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # a config.json's, and ours
CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # of the activation of that name
BIASES = {"attention_bias": ("qkv_bias", "out_bias")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertKeys:
    """What a config.json calls the sizes of a mixture of experts, by our names.

    has_dense_layers: some layers may have an MLP instead (`mlp_only_layers`,
    `decoder_sparse_step`).
    """

    sizes: Mapping[str, str]
    has_dense_layers: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switches:
    """A family whose layers are alike (models/alike.py): its `Family.description`.

    always: arguments of ModelConfig that the family fixes, whatever its config.json says. keys:
    switches that it reads from its config.json, each with the arguments that it sets; numbers: what
    it reads under the name that the argument has here. A key that the family's own transformers
    code does not read is ignored here too. windows: of its layers; "by layer" is `layer_types`,
    "every layer" one `sliding_window`. rope_by_kind: layers with a window have rope parameters of
    their own. partial_rotary: part of a head may be rotated. no_rope: the key that lists a 0 for
    each layer without rope. activation: the key of the MLP's. experts: of a mixture.
    """

    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    windows: Literal["none", "by layer", "every layer"] = "none"
    rope_by_kind: bool = False
    partial_rotary: bool = False
    no_rope: str | None = None
    activation: str = "hidden_act"
    experts: ExpertKeys | None = None

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        activation = hf.get(self.activation) or "silu"
        if activation not in ACTIVATIONS:
            built = ", ".join(ACTIVATIONS)
            raise ConfigError(f"{self.activation}={activation!r} is not supported ({built} are)")
        if self.always.get("activation") == "clamped":
            values = tuple(hf.get(key, default) for key, default in CLAMPED.items())
            if values != tuple(CLAMPED.values()):
                built = tuple(CLAMPED.values())
                raise ConfigError(f"{', '.join(CLAMPED)}={values}: only {built} are")
        windows = () if self.windows == "none" else _sliding_windows(hf)
        hf["head_dim"] = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        set_by = {ours: bool(hf.get(key)) for key, names in self.keys.items() for ours in names}
        numbers = {name: hf[name] for name in self.numbers if hf.get(name) is not None}
        return {
            **{ours: hf[theirs] for ours, theirs in SIZES.items()},
            "activation": ACTIVATIONS[activation],
            **set_by,
            **numbers,
            **self.always,
            **self._read_rope(hf, windows),
            **self._read_experts(hf),
            "sliding_windows": windows,
        }

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        theirs = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        alike = config.switches
        raw: dict[str, Any] = {name: getattr(alike, ours) for ours, name in SIZES.items()}
        raw[self.activation] = theirs.get(alike.activation, "silu")
        raw |= {key: getattr(alike, names[0]) for key, names in self.keys.items()}
        arguments = vars(config) | vars(alike)
        raw |= {name: arguments[name] for name in self.numbers}
        raw |= self._write_rope(alike, config.max_position_embeddings)
        if self.experts is not None:
            raw |= {theirs: getattr(alike, ours) for ours, theirs in self.experts.sizes.items()}
            if self.experts.has_dense_layers:
                raw |= {"mlp_only_layers": list(alike.dense_layers), "decoder_sparse_step": 1}
        window = next((w for w in alike.sliding_windows if w), None)
        if window and self.windows != "none":
            raw |= {"use_sliding_window": True, "sliding_window": window}
        elif self.windows == "every layer":
            raw["sliding_window"] = None
        if self.windows == "by layer":
            windows = alike.sliding_windows or (None,) * alike.num_layers
            raw["layer_types"] = [
                "sliding_attention" if window else "full_attention" for window in windows
            ]
        return raw

    def _read_rope(self, hf: dict[str, Any], windows: tuple[int | None, ...]) -> dict[str, Any]:
        rope = hf["rope_parameters"]  # transformers moves every older name into it
        local = rope.get("sliding_attention") if self.rope_by_kind else None
        rope = rope["full_attention"] if self.rope_by_kind else rope
        fraction = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
        if rope["rope_type"] == "proportional":
            fraction = 1.0  # there it is an option of the scaling
        if fraction != 1.0 and not self.partial_rotary:
            raise ConfigError(f"rope_parameters={rope}: partial rotary is not supported")
        fields: dict[str, Any] = {
            "rope_theta": float(rope["rope_theta"] or 10000.0),
            "rope_scaling": _rope_scaling(rope, hf["max_position_embeddings"]),
            "partial_rotary_factor": float(fraction),
        }
        if self.no_rope:
            uses = hf[self.no_rope]
            fields["no_rope_layers"] = tuple(
                i for i in range(hf["num_hidden_layers"]) if not uses[i]
            )
        if local is not None and any(windows):
            if local["rope_type"] != "default":
                raise ConfigError(
                    f"rope_type={local['rope_type']!r} of layers with a window is not supported"
                )
            theta = float(local["rope_theta"] or 10000.0)
            if theta != fields["rope_theta"] or fields["rope_scaling"] is not None:
                fields["local_rope_theta"] = theta
        return fields

    def _write_rope(self, alike: Alike, max_position: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": alike.rope_theta}
        original: dict[str, Any] = {}
        if s := alike.rope_scaling:
            rope |= {"rope_type": s.kind, "factor": s.factor}
            if s.kind != "linear" or s.original_max_position != max_position:
                original = {"original_max_position_embeddings": s.original_max_position}
            rope |= {name: getattr(s, name) for name in ROPE_OPTIONS[s.kind]} | original
        if alike.partial_rotary_factor != 1.0:
            rope["partial_rotary_factor"] = alike.partial_rotary_factor
        if self.rope_by_kind:
            theta = alike.local_rope_theta or alike.rope_theta
            local = {"rope_type": "default", "rope_theta": theta}
            rope = {"full_attention": rope, "sliding_attention": local}
        raw: dict[str, Any] = {"rope_parameters": rope}
        if alike.rope_scaling and alike.rope_scaling.kind == "longrope":
            raw |= original  # there it counts
        if self.no_rope:
            raw[self.no_rope] = [
                int(i not in alike.no_rope_layers) for i in range(alike.num_layers)
            ]
        return raw

    def _read_experts(self, hf: dict[str, Any]) -> dict[str, Any]:
        if self.experts is None:
            return {}
        if "num_experts" not in hf:  # some config classes rename it
            hf = hf | {"num_experts": hf["num_local_experts"]}
        fields: dict[str, Any] = {ours: hf[name] for ours, name in self.experts.sizes.items()}
        if self.experts.has_dense_layers:
            step, layers = hf["decoder_sparse_step"], range(hf["num_hidden_layers"])
            dense = [i for i in layers if i in hf["mlp_only_layers"] or (i + 1) % step]
            fields["dense_layers"] = tuple(dense)
        return fields


def _rope_scaling(rope: dict[str, Any], max_position: int) -> RopeScaling | None:
    kind = rope["rope_type"]
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ConfigError(f"rope_parameters={rope}: mscale is not supported")
    if kind == "default":
        return None
    if kind not in ROPE_OPTIONS:
        raise ConfigError(
            f"rope_type={kind!r} is not supported (default, {', '.join(ROPE_OPTIONS)} are)"
        )
    original = rope.get("original_max_position_embeddings") or max_position
    options = {name: rope[name] for name in ROPE_OPTIONS[kind] if rope.get(name) is not None}
    options["factor"] = factor = rope.get("factor") or max_position / original
    lists = {k: tuple(v) for k, v in options.items() if isinstance(v, list | tuple)}
    numbers = [(k, v) for k, v in options.items() if k not in lists]
    numbers += [(k, v) for k, found in lists.items() for v in found]
    if bad := {k: v for k, v in numbers if not isinstance(v, int | float) or not math.isfinite(v)}:
        raise ConfigError(f"rope_parameters={bad}: must be numbers")
    options |= lists
    if "attention_factor" not in options and factor > 1:
        if kind == "yarn":
            options["attention_factor"] = 0.1 * math.log(factor) + 1.0
        elif kind == "longrope":
            options["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(kind=kind, original_max_position=original, **options)


def _sliding_windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """One window a layer; () where every layer attends to everything."""
    window, kinds = hf.get("sliding_window"), hf.get("layer_types")
    kinds = ["sliding_attention"] * hf["num_hidden_layers"] if kinds is None else kinds
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ConfigError(f"layer_types {sorted(unknown)} are not supported")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()
