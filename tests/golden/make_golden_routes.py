"""Which experts transformers' routers choose in tiny mixtures: see make_golden.py, which runs it as
`routes`.
"""

import json
from pathlib import Path
from typing import Any

from tests.golden.configs import CONFIGS

# Of each kind of router one: softmax, normalised or not, with a bias, with groups, beside an MLP.
ROUTED = (
    "mixtral_g2_d64",
    "qwen3_moe_g2_d32_normed",
    "qwen2_moe_g2_d32_shared",
    "qwen3_5_moe_h2x2_c16_y32",
    "gpt_oss_g4_d64",
    "glm4_moe_g4_d32_groups",
    "deepseek_v3_h4_l32_groups",
    "gemma4_experts",
)
PROMPT_LENGTH = 60


def make_routes(out: Path) -> str:
    """Computes and stores them all; gives a line that sums them up."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    from tests.golden.make_golden import build
    from tests.golden.weights import state_dict, text_part

    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    for name in ROUTED:
        config = CONFIGS[name]
        model = build(config, state_dict(name, config), torch.float32)
        rng = np.random.default_rng(0)
        ids = rng.integers(0, text_part(config)["vocab_size"] - 4, PROMPT_LENGTH).tolist()
        chosen: list[Any] = []

        def keep(module: Any, args: Any, told: Any, chosen: list[Any] = chosen) -> None:
            chosen.append(_choice(told))

        for module in model.modules():
            if type(module).__name__.endswith("Router"):
                module.register_forward_hook(keep)
        with torch.no_grad():
            model(torch.tensor([ids]), use_cache=False)
        assert chosen, f"{name} has no router"
        arrays[f"{name}/token_ids"] = np.asarray(ids, np.int32)
        arrays[f"{name}/experts"] = np.stack(chosen, axis=1).astype(np.int16)
    meta = {name: CONFIGS[name] for name in ROUTED}
    np.savez_compressed(
        out / "routes.npz", allow_pickle=False, meta=np.asarray(json.dumps(meta)), **arrays
    )
    return f"routes of {len(ROUTED)} mixtures"


def _choice(told: Any) -> Any:
    """The experts of each token, [T, A], of what a router gives."""
    (indices,) = [x for x in told if x is not None and not x.is_floating_point()]
    return indices.reshape(-1, indices.shape[-1]).numpy()
