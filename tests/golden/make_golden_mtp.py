"""What transformers' MtpLayer gives of the tiny heads of mtp.py: see make_golden.py, which runs it
as `mtp`.
"""

import json
from pathlib import Path
from typing import Any

from tests.golden.configs import CONFIGS
from tests.golden.mtp import GUESSED, HEADS, base_layer, joining_tensors, layer_tensors

PROMPT_LENGTH = 40
POSITIONS = (0, 1, 17, 38)  # of entries whose logits are kept


def make_mtp(out: Path) -> str:
    """Computes and stores them all; gives a line that sums them up."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    from tests.golden.make_golden import build
    from tests.golden.weights import state_dict, text_part

    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    gaps: list[float] = []
    for name in HEADS:
        config = CONFIGS[name]
        model = build(config, state_dict(name, config), torch.float32)
        head = _head(model, name, config)
        rng = np.random.default_rng(0)
        ids = rng.integers(0, text_part(config)["vocab_size"] - 4, PROMPT_LENGTH).tolist()
        with torch.no_grad():
            out_of = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
            hidden, after, guesses = out_of.hidden_states[-1][:, :-1], ids[1:], list[int]()
            arrays[f"{name}/hidden"] = hidden[0].numpy()
            for turn in range(GUESSED):
                given = _run(model, head, hidden, after)
                logits = model.lm_head(given)[0]
                if not turn:
                    arrays[f"{name}/logits"] = logits[list(POSITIONS)].numpy()
                best = logits[-1].topk(2).values
                gaps.append(float(best[0] - best[1]))
                guesses.append(int(logits[-1].argmax()))
                hidden, after = torch.cat([hidden, given[:, -1:]], 1), [*after, guesses[-1]]
        arrays |= {f"{name}/token_ids": np.asarray(ids, np.int32)}
        arrays |= {f"{name}/guesses": np.asarray(guesses, np.int32)}
    meta = {name: CONFIGS[name] for name in HEADS}
    np.savez_compressed(
        out / "mtp.npz", allow_pickle=False, meta=np.asarray(json.dumps(meta)), **arrays
    )
    return f"MTP heads of {len(HEADS)} models: least gap {min(gaps):.3f}"


def _head(model: Any, name: str, config: dict[str, Any]) -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers.modeling_layers import MtpLayer  # pyright: ignore[reportMissingImports]

    from tests.golden.make_golden import fused_experts
    from tests.golden.weights import text_part

    text, base = model.config.get_text_config(), model.get_decoder()
    at = base_layer(text_part(config))
    norm = type(base.layers[at].input_layernorm)
    if getattr(text, "indexer_types", None):
        text.indexer_types = ["full"] * len(text.indexer_types)
    head = MtpLayer(text, type(base.layers[at]), norm, at).eval()
    layer = {k: torch.from_numpy(v.copy()) for k, v in layer_tensors(name, config).items()}
    state = {f"mtp_block.{key}": x for key, x in fused_experts(layer).items()}
    kinds = {"embed_norm": "enorm", "hidden_norm": "hnorm", "fc": "eh_proj", "norm": "post_norm"}
    joining = joining_tensors(name, config)
    state |= {f"{kinds[kind]}.weight": torch.from_numpy(x) for kind, x in joining.items()}
    head.load_state_dict(state, strict=True)
    # Layers with an indexer also give what it chose.
    head.mtp_block.register_forward_hook(lambda _, __, y: y[0] if isinstance(y, tuple) else y)
    return head


def _run(model: Any, head: Any, hidden: Any, after: list[int]) -> Any:
    """What the head gives of whole sequences, without a cache."""
    import torch  # pyright: ignore[reportMissingImports]

    count = len(after)
    embedded = model.get_input_embeddings()(torch.tensor([after]))
    positions = torch.arange(1, count + 1)[None]
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    return head(
        embedded,
        hidden,
        position_embeddings=model.get_decoder().rotary_emb(embedded, positions),
        attention_mask=mask,
        position_ids=positions,
        past_key_values=None,
    )
