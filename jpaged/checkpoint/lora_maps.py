"""lora_from makes an Adapter of the LoRA parts of another project's model, by a name map."""

import re
from typing import Any

from jpaged.checkpoint.name_maps import TOKEN, NameMap, entry_of, find_leaves, name_map
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.lora import Adapter, Target, targets


def lora_from(tree: Any, family: str | NameMap, *, config: Any, scale: float) -> Adapter:
    """Return the LoRA parts of another project's model (leaves named NAME_lora_a and NAME_lora_b,
    as qwix and tunix have them) as an Adapter, which is served without a merge; other leaves are
    not used.

    tree, family, config: as in params_from. scale: alpha / rank. ConfigError names the first part
    that does not fit, or that no weight of the map takes.
    """
    model = ModelConfig.coerce(config)
    leaves = dict(find_leaves(tree))
    table, taken, pairs = name_map(family, leaves, model), set(), {}
    for name, target in targets(model, ("embedding", "head")).items():
        if (entry := entry_of(table, target.spec, target.part)) is None:
            continue
        path, axes, *_ = entry
        sides = [f"{path}_lora_{side}" for side in "ab"]
        if sides[0] in leaves and sides[1] in leaves:
            taken.update(sides)
            a, b = (leaves[side] for side in sides)
            pairs[name] = _ours(sides[0], a, b, axes, target)
    lora = [path for path in leaves if path.endswith(("_lora_a", "_lora_b"))]
    if left := [path for path in lora if path not in taken]:
        raise ConfigError(f"the tree holds {left[0]}, which cannot be an adapter of this model")
    if not pairs:
        raise ConfigError("the tree holds no LoRA parts (NAME_lora_a and NAME_lora_b)")
    return Adapter(pairs, scale)


def _ours(path: str, a: Any, b: Any, theirs: str, target: Target) -> dict[str, Any]:
    """Return a pair [contracted axes..., rank], [rank, other axes...] as A [rank, *inputs] and B
    [*outputs, rank].
    """
    outputs, inputs = (re.findall("[A-Z]", side) for side in target.part.axes.split(","))
    letters = [x for token in TOKEN.findall(theirs) for x in token if x.isalpha()]
    first, last = letters[: len(inputs)], letters[len(inputs) :]
    sizes, rank = dict(target.spec.sizes), a.shape[-1]
    shapes = [[sizes[x] for x in side] for side in (first, last)]
    if sorted(first) != sorted(inputs) or b.shape[:1] != (rank,):
        raise ConfigError(f"{path}: its inputs are not the leading axes of {theirs!r}")
    try:
        a, b = a.reshape(*shapes[0], rank), b.reshape(rank, *shapes[1])
    except (TypeError, ValueError) as e:  # jax raises one, numpy the other
        raise ConfigError(f"{path} is of shape {a.shape}, its other side {b.shape}: {e}") from e
    a = a.transpose(len(first), *(first.index(x) for x in inputs))
    b = b.transpose(*(1 + last.index(x) for x in outputs), 0)
    # Our axis of size 1 (a part that is one head) belongs to the outputs.
    return {"a": a, "b": b.reshape(-1, rank)}
