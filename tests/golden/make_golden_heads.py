"""What transformers gives of the tiny models of heads.py: see make_golden.py, which runs it as
`heads`.
"""

import copy
import json
from pathlib import Path
from typing import Any

from tests.golden.heads import (
    MODELS,
    config_of,
    dense_configs,
    dense_tensors,
    prompts_of,
    tensors_of,
)


def make_heads(out: Path) -> str:
    """Computes and stores them all; gives a line that sums them up."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    for name, (_, _, labels) in MODELS.items():
        model = _build(name)
        for i, ids in enumerate(prompts_of(name)):
            with torch.no_grad():
                tokens = torch.tensor([ids])
                if labels:
                    arrays[f"{name}/logits_{i}"] = model(tokens, use_cache=False).logits[0].numpy()
                    continue
                states = model(tokens, use_cache=False).last_hidden_state[0]
                arrays[f"{name}/states_{i}"] = states.numpy()
                arrays[f"{name}/dense_{i}"] = _through_dense(states.mean(0)).numpy()
    meta = {name: config_of(name) for name in MODELS}
    np.savez_compressed(
        out / "heads.npz", allow_pickle=False, meta=np.asarray(json.dumps(meta)), **arrays
    )
    return f"heads of {len(MODELS)} models"


def _build(name: str) -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    from tests.golden.make_golden import fused_experts

    config = config_of(name)
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    made = kind.from_dict(copy.deepcopy(config))
    cls = getattr(transformers, config["architectures"][0])
    model = cls._from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
    state = fused_experts({k: torch.from_numpy(v.copy()) for k, v in tensors_of(name).items()})
    model.load_state_dict(state, strict=True)
    return model


def _through_dense(vector: Any) -> Any:
    """What sentence-transformers' Dense and Normalize make of a pooled vector."""
    import torch  # pyright: ignore[reportMissingImports]

    width = vector.shape[-1]
    for config, tensors in zip(dense_configs(width), dense_tensors(width), strict=True):
        bias = tensors.get("linear.bias")
        vector = torch.nn.functional.linear(
            vector,
            torch.from_numpy(tensors["linear.weight"].copy()),
            None if bias is None else torch.from_numpy(bias.copy()),
        )
        if config["activation_function"].endswith("Tanh"):
            vector = torch.tanh(vector)
    return torch.nn.functional.normalize(vector, p=2, dim=-1)
