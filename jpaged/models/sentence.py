"""The modules of sentence-transformers beside a model: how its folder says what makes a vector of
hidden states. modules.json lists them; each has a folder of its own with a config.json.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from jpaged.checks import read_json
from jpaged.errors import CheckpointError, UnsupportedError
from jpaged.models.pooling import ACTIVATIONS, DenseConfig, Pooled, PoolingConfig

MODULES = "modules.json"
LIBRARY = "sentence_transformers.models."
# Modes of its Pooling that are served, and what they are called here.
MODES: dict[str, Pooled] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
}
# The class of an activation that a file names by its path in torch, by our name of it.
CLASSES = {
    "identity": "torch.nn.modules.linear.Identity",
    "tanh": "torch.nn.modules.activation.Tanh",
    "relu": "torch.nn.modules.activation.ReLU",
    "gelu": "torch.nn.modules.activation.GELU",
    "silu": "torch.nn.modules.activation.SiLU",
}
KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")  # in this order


class Module(NamedTuple):
    """One entry of modules.json: the name of its class, and its folder."""

    kind: str
    folder: Path


def read_pooling(folder: Path) -> PoolingConfig | None:
    """Return how a folder's modules make a vector; None where it has no modules.json. Raises
    CheckpointError for files that are damaged, UnsupportedError for modules that are not served.
    """
    modules = _modules(folder)
    if not modules:
        return None
    places = [KNOWN.index(module.kind) for module in modules]
    if places != sorted(places):
        kinds = ", ".join(module.kind for module in modules)
        raise UnsupportedError(
            f"{folder / MODULES}: modules {kinds} in this order: {', '.join(KNOWN)} is served"
        )
    at: Pooled = "last"
    for module in modules:
        if module.kind == "Pooling":
            at = _mode(module.folder)
    return PoolingConfig(
        at=at,
        dense=tuple(_dense(module.folder) for module in modules if module.kind == "Dense"),
        normalize=any(module.kind == "Normalize" for module in modules),
    )


def dense_folders(folder: Path) -> list[Path]:
    """Return the folders of a model's dense layers, in order: each has its weights."""
    return [module.folder for module in _modules(folder) if module.kind == "Dense"]


def write_pooling(folder: Path, pooling: PoolingConfig) -> None:
    """Write the files that `read_pooling` reads back. The weights of dense layers are elsewhere."""
    modules: list[tuple[str, dict[str, Any] | None]] = [("Transformer", None)]
    mode = next(mode for mode, at in MODES.items() if at == pooling.at)
    modules.append(("Pooling", {**dict.fromkeys(MODES, False), mode: True}))
    modules += [
        (
            "Dense",
            {
                "in_features": dense.inputs,
                "out_features": dense.outputs,
                "bias": dense.bias,
                "activation_function": CLASSES[dense.activation],
            },
        )
        for dense in pooling.dense
    ]
    modules += [("Normalize", None)] if pooling.normalize else []
    listed: list[dict[str, Any]] = []
    for i, (kind, config) in enumerate(modules):
        path = f"{i}_{kind}" if i else ""
        listed.append({"idx": i, "name": str(i), "path": path, "type": LIBRARY + kind})
        if config is not None:
            (folder / path).mkdir()
            _write_json(folder / path / "config.json", config)
    _write_json(folder / MODULES, listed)


def _modules(folder: Path) -> list[Module]:
    file = folder / MODULES
    if not file.is_file():
        return []
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        entries = [(str(entry["type"]), str(entry["path"])) for entry in listed]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{file}: is no list of modules with a type and a path: {e}") from e
    modules: list[Module] = []
    for kind, path in entries:
        name = kind.rpartition(".")[2]
        if name not in KNOWN:
            raise UnsupportedError(f"{file}: the module {kind} ({', '.join(KNOWN)} are served)")
        if path.startswith("/") or ".." in Path(path).parts:
            raise CheckpointError(f"{file}: path={path!r} is not inside the folder")
        modules.append(Module(name, folder / path))
    return modules


def _mode(folder: Path) -> Pooled:
    """Return the one mode of a Pooling."""
    raw = read_json(folder / "config.json", CheckpointError)
    modes = [key for key, value in raw.items() if key.startswith("pooling_mode_") and value is True]
    if (mode := raw.get("pooling_mode")) is not None:  # of newer versions
        names = {"lasttoken": "last", "cls": "first", "mean": "mean"}
        modes = [key for key, at in MODES.items() if at == names.get(mode)] or [str(mode)]
    if len(modes) != 1 or modes[0] not in MODES:
        raise UnsupportedError(
            f"{folder / 'config.json'}: pooling by {', '.join(modes) or 'no mode'}: one of "
            f"{', '.join(MODES)} is served"
        )
    return MODES[modes[0]]


def _dense(folder: Path) -> DenseConfig:
    raw = read_json(folder / "config.json", CheckpointError)
    named = str(raw.get("activation_function", CLASSES["tanh"])).rpartition(".")[2].lower()
    kind = next((activation for activation in ACTIVATIONS if activation == named), None)
    if kind is None:
        raise UnsupportedError(
            f"{folder / 'config.json'}: activation_function={raw.get('activation_function')!r}: "
            f"one of {', '.join(ACTIVATIONS)} is served"
        )
    try:
        return DenseConfig(
            inputs=int(raw["in_features"]),
            outputs=int(raw["out_features"]),
            bias=bool(raw.get("bias", True)),
            activation=kind,
        )
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{folder / 'config.json'}: sizes of a dense layer: {e}") from e


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
