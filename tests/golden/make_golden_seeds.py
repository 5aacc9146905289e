"""More weights of one tiny model a family, and its odd relatives, stored small: see make_golden.py,
which runs it as `seeds`.
"""

import json
from pathlib import Path
from typing import Any

from tests.golden.configs import CONFIGS, SEEDED, SEEDS
from tests.golden.odd import ODD

PROMPT_LENGTH = 90
POSITIONS = (17, 53, 89)  # whose logits are kept
STORED: dict[str, dict[str, Any]] = {  # the config of what is stored under a key
    **{f"{name}/{seed}": CONFIGS[name] for name in SEEDED for seed in SEEDS},
    **ODD,
}


def make_seeds(out: Path) -> str:
    """Computes and stores them all; gives a line that sums them up."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    from tests.golden.make_golden import build, choose_prompt, forward
    from tests.golden.weights import checksum, state_dict

    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    meta, gaps = {}, []
    for key, config in STORED.items():
        tensors = state_dict(key, config)
        model = build(config, tensors, torch.float32)
        ids, greedy, gap = choose_prompt(model, key, config, PROMPT_LENGTH)
        arrays |= {
            f"{key}/token_ids": np.asarray(ids, np.int32),
            f"{key}/greedy": np.asarray(greedy, np.int32),
            f"{key}/logits": forward(model, ids)[list(POSITIONS)].numpy(),
        }
        meta[key] = {"config": config, "weights_sha256": checksum(tensors)}
        gaps.append(gap)
    np.savez_compressed(
        out / "seeds.npz", allow_pickle=False, meta=np.asarray(json.dumps(meta)), **arrays
    )
    return f"{len(meta)} models, greedy: least gap {min(gaps):.3f}"
