"""Flags for the fields of EngineConfig, and of other dataclasses of settings."""

import argparse
import dataclasses
import typing
from typing import Any, Literal

from jpaged.config import EngineConfig, Speculative

# Every field of EngineConfig, under the title of its group in --help.
ENGINE_GROUPS: dict[str, tuple[str, ...]] = {
    "engine: sizes and memory": (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "num_blocks",
        "memory_utilization",
        "enable_prefix_caching",
        "swap_space_gib",
        "swap_min_tokens",
    ),
    "engine: what a request may ask for": (
        "max_n",
        "max_logprobs",
        "max_logit_bias",
        "max_stop_ids",
        "structured_output",
        "max_loras",
        "max_lora_rank",
        "lora_extra",
    ),
    "engine: numbers": (
        "dtype",
        "quantization",
        "quantized_activations",
        "kv_cache_dtype",
        "attention",
        "deterministic",
    ),
    "engine: steps": (
        "token_buckets",
        "seq_buckets",
        "decode_steps",
        "separate_draw",
        "mixed",
        "speculative",
        "strict",
        "compilation_cache_dir",
    ),
    "engine: several devices": (
        "tensor_parallel_size",
        "data_parallel_size",
        "tensor_axis",
        "peer_timeout_s",
    ),
}


def add_engine_groups(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of EngineConfig, in the groups above."""
    for title, names in ENGINE_GROUPS.items():
        add_engine_flags(parser.add_argument_group(title), *names)


def add_engine_flags(parser: Any, *names: str, **defaults: Any) -> None:
    """Add a flag for every field, or for those that are named, to a parser or to one group."""
    add_flags(parser, EngineConfig, *names, **defaults)


def add_flags(parser: Any, settings: type, *names: str, **defaults: Any) -> None:
    """Add a flag for every field of a dataclass that has a help, or for the fields that are named.

    The parsed result lacks a field whose flag was left out. `enable_x` becomes --x and --no-x; the
    word "none" means None for a field that may be None. defaults: by field, a program's defaults.
    """
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if (names and field.name not in names) or "help" not in field.metadata:
            continue
        default = defaults.get(field.name, field.default)
        shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
        parser.add_argument(
            f"--{field.name.removeprefix('enable_').replace('_', '-')}",
            help=f"{field.metadata['help']} (default: {shown})",
            dest=field.name,
            default=defaults.get(field.name, argparse.SUPPRESS),
            **_values_of(hints[field.name]),
        )


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of EngineConfig that flags have set."""
    return given_settings(args, EngineConfig)


def given_settings(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Return the fields of a dataclass of settings that flags have set."""
    names = (field.name for field in dataclasses.fields(settings))
    return {name: getattr(args, name) for name in names if name in args}


def _values_of(hint: Any) -> dict[str, Any]:
    """Return argparse's settings for a flag whose values are of a type: a number, text, one of
    several words, a list of numbers, on or off; the word "none" where None is one of them.
    """
    is_one = typing.get_origin(hint) is tuple or not typing.get_args(hint)
    kinds = [hint] if is_one else [k for k in typing.get_args(hint) if k is not type(None)]
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    kind = kinds[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind is Speculative:
        return {"type": Speculative.parse, "metavar": "JSON"}
    if typing.get_origin(kind) is tuple:
        member = typing.get_args(kind)[0]
        if typing.get_origin(member) is Literal:
            return {"choices": typing.get_args(member), "nargs": "+"}
        return {"type": int, "nargs": "+", "metavar": "N"}
    if type(None) not in typing.get_args(hint):
        return {"type": kind}
    words = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
    plain = str if words else kind

    def value(text: str) -> Any:
        return None if text == "none" else plain(text)

    value.__name__ = plain.__name__  # argparse names it where a value is none
    if words is None:
        return {"type": value}
    return {"type": value, "choices": (*words, None), "metavar": "|".join((*words, "none"))}
