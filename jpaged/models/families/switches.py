"""Switches: a table by which most families are read from a config.json and written back."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from jpaged.errors import ConfigError
from jpaged.models.alike import Alike
from jpaged.models.layers.mlp import Activation
from jpaged.models.layers.rope import QueryScaling
from jpaged.models.layers.router import RouterConfig
from jpaged.models.rope_scaling import ROPE_OPTIONS, RopeScaling

SIZES = {  # of models.alike.Alike, in a config.json
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # a config.json's, and ours
CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # of the activation of that name
BIASES = {"attention_bias": ("qkv_bias", "out_bias")}
MSCALES = ("mscale", "mscale_all_dim")
ALIKE = tuple(field.name for field in dataclasses.fields(Alike))


class DenseLayers(Protocol):
    """How a config.json says which layers of a mixture have an MLP instead of experts."""

    def read(self, hf: dict[str, Any]) -> tuple[int, ...]:
        """Return those layers, ascending."""
        ...

    def write(self, layers: tuple[int, ...], num_layers: int) -> dict[str, Any]:
        """Return what `read` reads back; ConfigError where nothing says it."""
        ...


class ListedDenseLayers:
    """They are listed, or in the steps between those with experts."""

    def read(self, hf: dict[str, Any]) -> tuple[int, ...]:
        """See DenseLayers."""
        step, listed = hf["decoder_sparse_step"], hf["mlp_only_layers"]
        return tuple(i for i in range(hf["num_hidden_layers"]) if i in listed or (i + 1) % step)

    def write(self, layers: tuple[int, ...], num_layers: int) -> dict[str, Any]:
        """See DenseLayers."""
        return {"mlp_only_layers": list(layers), "decoder_sparse_step": 1}


@dataclasses.dataclass(frozen=True)
class FirstDenseLayers:
    """They are the first ones. key: of how many."""

    key: str = "first_k_dense_replace"

    def read(self, hf: dict[str, Any]) -> tuple[int, ...]:
        """See DenseLayers."""
        return tuple(range(min(hf[self.key], hf["num_hidden_layers"])))

    def write(self, layers: tuple[int, ...], num_layers: int) -> dict[str, Any]:
        """See DenseLayers."""
        if layers != tuple(range(len(layers))):
            raise ConfigError(f"dense_layers={layers}: {self.key} says the first alone")
        return {self.key: len(layers)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertKeys:
    """What a config.json calls the sizes of a mixture of experts, by our names.

    num_shared: the key of how many experts of expert_size every token takes; they are one of that
    many times the size. dense_layers: None where all layers have experts. router, experts: fields
    of RouterConfig and ExpertsConfig that the family fixes; router_keys: the keys of those that
    its config.json has, by our names.
    """

    sizes: Mapping[str, str]
    num_shared: str | None = None
    dense_layers: DenseLayers | None = None
    router: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    router_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    experts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of Alike."""
        if "num_local_experts" in hf:  # some config classes rename it
            hf = {"num_experts": hf["num_local_experts"]} | hf
        fields: dict[str, Any] = {ours: hf[name] for ours, name in self.sizes.items()}
        if self.num_shared is not None:
            fields["shared_expert_size"] = hf[self.num_shared] * fields["expert_size"]
        if self.dense_layers is not None:
            fields["dense_layers"] = self.dense_layers.read(hf)
        keys = {ours: hf[name] for ours, name in self.router_keys.items()}
        fields["router"] = tuple({**self.router, **keys}.items())
        fields["experts"] = tuple(self.experts.items())
        return fields

    def write(self, alike: Alike) -> dict[str, Any]:
        """Return what `read` reads back."""
        raw = {theirs: getattr(alike, ours) for ours, theirs in self.sizes.items()}
        if self.num_shared is not None:
            count, rest = divmod(alike.shared_expert_size, alike.expert_size or 1)
            if rest:
                sizes = f"shared_expert_size={alike.shared_expert_size}"
                raise ConfigError(f"{sizes} is no multiple of expert_size={alike.expert_size}")
            raw[self.num_shared] = count
        if self.dense_layers is not None:
            raw |= self.dense_layers.write(alike.dense_layers, alike.num_layers)
        router = RouterConfig(**dict(alike.router))
        return raw | {theirs: getattr(router, ours) for ours, theirs in self.router_keys.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switches:
    """A family whose layers are alike (models/alike.py): its `Family.description`.

    always: arguments of ModelConfig that the family fixes, whatever its config.json says.
    attention, rope: fields of AttentionConfig and of RopeConfig that it fixes and that no argument
    sets. keys: switches that it reads from its config.json, each with the arguments that it sets;
    numbers: what it reads under the name that the argument has here. only: keys with the one value
    that is supported, where a file has them. A key that the family's own transformers code does not
    read is ignored here too, unless it is in `only`. windows: of its layers; "by layer" is
    `layer_types`, "every layer" one `sliding_window`. rope_by_kind: layers with a window have rope
    parameters of their own. partial_rotary: part of a head may be rotated. query_scaling: rotated
    queries may be scaled by their position. no_rope: the key that lists a 0 for each layer without
    rope. axes: sections of a rope by positions on three axes, where a file does not say them and
    the rope is of as many dimensions; None: the rope has one position. alternating: as of
    RopeConfig. activation: the key of the MLP's. experts: of a mixture.
    """

    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    attention: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    windows: Literal["none", "by layer", "every layer"] = "none"
    rope_by_kind: bool = False
    axes: tuple[int, int, int] | None = None
    alternating: bool = False
    partial_rotary: bool = False
    query_scaling: bool = False
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
        for key, value in self.only.items():
            if key in hf and hf[key] != value:
                raise ConfigError(f"{key}={hf[key]!r} is not supported ({value!r} is)")
        arguments = {**self.switches(hf), **self.always}
        switches = {name: arguments.pop(name) for name in ALIKE if name in arguments}
        alike = Alike(**switches)
        return {"layers": alike.layers(), "norm": alike.norm, **arguments}

    def switches(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of ModelConfig and of Alike that a config.json with the family's
        defaults says. ConfigError for what is not supported.
        """
        windows = () if self.windows == "none" else _sliding_windows(hf)
        hf["head_dim"] = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        set_by = {ours: bool(hf.get(key)) for key, names in self.keys.items() for ours in names}
        numbers = {name: hf[name] for name in self.numbers if hf.get(name) is not None}
        experts = {} if self.experts is None else self.experts.read(hf)
        if "intermediate_size" not in hf:  # no layer has an MLP
            hf["intermediate_size"] = experts["expert_size"]
        return {
            **{ours: hf[theirs] for ours, theirs in SIZES.items()},
            "activation": ACTIVATIONS[hf.get(self.activation) or "silu"],
            **set_by,
            **numbers,
            **self._read_rope(hf, windows),
            **experts,
            "attention": tuple(self.attention.items()),
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
            raw |= self.experts.write(alike)
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
        axes = self._read_axes(rope, int(hf["head_dim"] * fraction))
        fields: dict[str, Any] = {
            "rope_theta": float(rope["rope_theta"] or 10000.0),
            "rope_scaling": read_scaling(rope, hf["max_position_embeddings"]),
            "partial_rotary_factor": float(fraction),
            "rope": tuple({**self.rope, **self._read_query_scaling(rope), **axes}.items()),
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

    def _read_axes(self, rope: dict[str, Any], dim: int) -> dict[str, Any]:
        """Return the sections of a rope of `dim` dimensions of a head. Those of the family are of
        its own dimensions alone: with others and without the key, tokens have one position.
        """
        if self.axes is None:
            return {}
        sections = rope.get("mrope_section")
        if sections is None:
            if 2 * sum(self.axes) != dim:
                return {}
            sections = self.axes
        if not isinstance(sections, list | tuple):
            raise ConfigError(f"mrope_section={sections!r}: must be three numbers of frequencies")
        return {"sections": tuple(sections), "alternating_sections": self.alternating}

    def _read_query_scaling(self, rope: dict[str, Any]) -> dict[str, Any]:
        scaling = read_query_scaling(rope) if self.query_scaling else None
        return {} if scaling is None else {"query_scaling": scaling}

    def _write_rope(self, alike: Alike, max_position: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": alike.rope_theta}
        original: dict[str, Any] = {}
        if s := alike.rope_scaling:
            rope |= {"rope_type": s.kind, "factor": s.factor}
            if s.kind != "linear" or s.original_max_position != max_position:
                original = {"original_max_position_embeddings": s.original_max_position}
            rope |= {name: getattr(s, name) for name in ROPE_OPTIONS[s.kind]} | original
        if (scaling := dict(alike.rope).get("query_scaling")) is not None:
            original = {"original_max_position_embeddings": scaling.length}
            rope |= {"llama_4_scaling_beta": scaling.beta} | original
        if (sections := dict(alike.rope).get("sections")) is not None:
            rope["mrope_section"] = list(sections)
            rope["mrope_interleaved"] = dict(alike.rope).get("alternating_sections", False)
        if self.partial_rotary:  # also 1.0: some families have another default
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


def read_scaling(rope: dict[str, Any], max_position: int) -> RopeScaling | None:
    """Return what the rope_parameters of a config.json do to frequencies, or None. ConfigError for
    what is not supported.
    """
    kind = rope["rope_type"]
    if kind in ("default", "dynamic"):  # dynamic is plain up to max_position_embeddings
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
    if kind == "yarn":
        numbers += [(k, rope[k]) for k in MSCALES if rope.get(k) is not None]
    numbers += [(k, v) for k, values in lists.items() for v in values]
    if bad := {k: v for k, v in numbers if not isinstance(v, int | float) or not math.isfinite(v)}:
        raise ConfigError(f"rope_parameters={bad}: must be numbers")
    options |= lists
    if "attention_factor" not in options and factor > 1:
        if kind == "yarn":
            options["attention_factor"] = _yarn_attention_factor(factor, rope)
        elif kind == "longrope":
            options["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(kind=kind, original_max_position=original, **options)


def read_query_scaling(rope: dict[str, Any]) -> QueryScaling | None:
    """Return how rope_parameters scale rotated queries by their position, or None."""
    beta = rope.get("llama_4_scaling_beta")
    if not beta:
        return None
    length = rope.get("original_max_position_embeddings")
    if not length:
        raise ConfigError(
            f"llama_4_scaling_beta={beta} without original_max_position_embeddings: the length "
            "after which queries are scaled"
        )
    return QueryScaling(beta=beta, length=length)


def _yarn_attention_factor(factor: float, rope: dict[str, Any]) -> float:
    """Return the factor on cos and sin of a file that does not say it."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    above, below = (rope.get(key) for key in MSCALES)
    return mscale(above) / mscale(below) if above and below else mscale(1.0)


def _sliding_windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """Return one window a layer; () where every layer attends to everything."""
    window, kinds = hf.get("sliding_window"), hf.get("layer_types")
    kinds = ["sliding_attention"] * hf["num_hidden_layers"] if kinds is None else kinds
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ConfigError(f"layer_types {sorted(unknown)} are not supported")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()
