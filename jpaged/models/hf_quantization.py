"""`quantization_config` of a Hugging Face folder: which of the known formats its weights are in."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jpaged.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How the linear weights of a file lie; those that it holds plain are read as they are.

    form: of the values. group: inputs that share a scale; None is all of an output. block: outputs
    and inputs that share one, of fp8. minus_one: GPTQ's first files hold zeros less one.
    has_zeros: whether something is taken off values before they are scaled.
    """

    method: Literal["mxfp4", "fp8", "awq", "gptq", "compressed-tensors"]
    form: Literal["mxfp4", "fp8", "int8", "int4"]
    group: int | None = None
    block: tuple[int, int] | None = None
    minus_one: bool = False
    has_zeros: bool = False


def read_format(raw: Any, *, are_stacked: bool) -> Format | None:
    """The format that a quantization_config names, None without one; ConfigError, by name, for any
    that is not read. are_stacked: a family whose experts lie in one tensor a layer.
    """
    if not raw:
        return None
    method = raw.get("quant_method") if isinstance(raw, Mapping) else raw
    if are_stacked:
        if method == "mxfp4":
            return Format(method="mxfp4", form="mxfp4")
        raise _refused(method, "these experts are read in mxfp4 or plain")
    known = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
    if not isinstance(raw, Mapping) or method not in known:
        raise _refused(method, f"not one of {', '.join(known)}, nor mxfp4 of GPT-OSS")
    return known[method](raw)


def _refused(method: Any, reason: str) -> ConfigError:
    return ConfigError(f"quantization_config ({method!r}): {reason}")


def _fp8(raw: Mapping[str, Any]) -> Format:
    if (kind := raw.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refused("fp8", f"fmt={kind!r}: only e4m3")
    block = raw.get("weight_block_size")
    return Format(method="fp8", form="fp8", block=None if block is None else (block[0], block[1]))


def _bits(method: str, bits: Any, wanted: int = 4) -> None:
    if bits != wanted:
        raise _refused(method, f"{bits} bits: only {wanted}")


def _group(size: Any) -> int | None:
    return None if size in (None, -1) else int(size)


def _awq(raw: Mapping[str, Any]) -> Format:
    _bits("awq", raw.get("bits", raw.get("w_bit")))
    if (version := str(raw.get("version", "gemm")).lower()) != "gemm":
        raise _refused("awq", f"version={version!r}: only gemm")
    group = _group(raw.get("group_size", raw.get("q_group_size")))
    return Format(method="awq", form="int4", group=group, has_zeros=True)


def _gptq(raw: Mapping[str, Any]) -> Format:
    _bits("gptq", raw.get("bits"))
    version = raw.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _refused("gptq", f"checkpoint_format={version!r}: only gptq and gptq_v2")
    minus_one, group = version == "gptq", _group(raw.get("group_size"))
    return Format(method="gptq", form="int4", group=group, minus_one=minus_one, has_zeros=True)


def _compressed(raw: Mapping[str, Any]) -> Format:
    name, groups = "compressed-tensors", list((raw.get("config_groups") or {}).values())
    if not groups or any(group.get("weights") != groups[0].get("weights") for group in groups):
        raise _refused(name, "config_groups that differ in their weights, or none")
    weights, layout = groups[0].get("weights") or {}, raw.get("format")
    forms = {"float-quantized": "fp8", "int-quantized": "int8", "pack-quantized": "int4"}
    if layout not in forms:
        raise _refused(name, f"format={layout!r}: only {', '.join(forms)}")
    _bits(name, weights.get("num_bits"), 4 if layout == "pack-quantized" else 8)
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise _refused(name, f"strategy={strategy!r}: only tensor, channel, group and block")
    if weights.get("actorder") == "group":
        raise _refused(name, "actorder='group': groups of inputs in another order than theirs")
    group = _group(weights.get("group_size")) if strategy == "group" else None
    form: Any = forms[layout]
    own = (block[0], block[1]) if strategy == "block" and block else None
    has_zeros = form == "int4" and not weights.get("symmetric", True)
    return Format(method=name, form=form, group=group, block=own, has_zeros=has_zeros)
