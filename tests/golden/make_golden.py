"""Stores what transformers computes for the tiny models of tests/golden/configs.py:
tests/golden/NAME.npz, seeds.npz, mtp.npz, routes.npz, heads.npz, spans.npz, towers.npz,
pictures.npz, beams.json.

    python tests/golden/make_golden.py [NAME ...]
    python tests/golden/make_golden.py --here     # in this interpreter: it has torch, transformers
    python tests/golden/make_golden.py beams      # beam search alone, from the prompts stored
    python tests/golden/make_golden.py seeds      # other weights of one model a family
    python tests/golden/make_golden.py mtp        # heads that guess a further token
    python tests/golden/make_golden.py routes     # the experts that routers choose
    python tests/golden/make_golden.py spans      # embeddings in place of tokens
    python tests/golden/make_golden.py towers     # rows of embeddings of vision towers
    python tests/golden/make_golden.py pictures   # prompts with images, from pixels to logprobs

Without --here it runs in an environment of its own, .venv-golden, which the first run makes.
torch on CPU is all it needs. Its wheels lag behind Python, so each Python that is found (3.11
first) is tried until one can install it; on Linux, where a plain `pip install torch` brings the
CUDA build, PIP_EXTRA_INDEX_URL may name a place that has torch's CPU wheels. Nothing here is needed
to run or to test jpaged: the .npz files are kept in the repository.
"""

import argparse
import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
VENV = ROOT / ".venv-golden"
REQUIREMENTS = (
    "torch==2.13.0",
    "torchvision==0.28.0",
    "transformers==5.23.0",
    "numpy",
    "safetensors",
)
PROMPT_LENGTHS = (
    5,
    40,
    90,
)  # past every sliding window and every original_max_position; 40 + 24 ends a 64-token block
NEW_TOKENS = 24
ROWS = 10  # positions of a long prompt whose logits are kept
ENOUGH_GAP = (
    0.02  # a thousand times float32's error: a right implementation cannot pick the other token
)
OF_IMAGES = ("model.vision_tower.", "model.multi_modal_projector.", "model.visual.")
GRANITE = {  # parts of names in Granite 4's files, and in transformers
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
}
VARIETY = 8  # distinct tokens in a continuation
TRIES = 100
# What make_golden_beams.py, _seeds.py, _mtp.py, _routes.py, _heads.py, _spans.py, _towers.py and
# _pictures.py make, as names on the command line.
BEAMS, SEEDED, MTP, ROUTES, HEADS = "beams", "seeds", "mtp", "routes", "heads"
SPANS, TOWERS, PICTURES = "spans", "towers", "pictures"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        help="configs to make, or what is named above (default: all)",
    )
    parser.add_argument("--here", action="store_true", help="run in this interpreter")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="folder to write to (default: tests/golden)"
    )
    args = parser.parse_args()
    if not args.here:
        command = [environment(), __file__, "--here", "--out", str(args.out.resolve()), *args.names]
        return subprocess.run(command, check=False).returncode
    sys.path.insert(0, str(ROOT))
    from tests.golden.configs import CONFIGS
    from tests.golden.make_golden_beams import make_beams
    from tests.golden.make_golden_heads import make_heads
    from tests.golden.make_golden_mtp import make_mtp
    from tests.golden.make_golden_pictures import make_pictures
    from tests.golden.make_golden_routes import make_routes
    from tests.golden.make_golden_seeds import make_seeds
    from tests.golden.make_golden_spans import make_spans
    from tests.golden.make_golden_towers import make_towers

    special = {BEAMS: make_beams, SEEDED: make_seeds, MTP: make_mtp, ROUTES: make_routes}
    special |= {HEADS: make_heads, SPANS: make_spans, TOWERS: make_towers}
    special |= {PICTURES: make_pictures}
    if unknown := set(args.names) - {*CONFIGS, *special}:
        print(f"no such config: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or (*CONFIGS, *special):
        made = special[name](args.out) if name in special else make(name, CONFIGS[name], args.out)
        print(made, flush=True)
    return 0


def make(name: str, config: dict[str, Any], out: Path) -> str:
    """Computes and stores one reference; gives a line that sums it up."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    from tests.golden.weights import checksum, state_dict

    torch.set_num_threads(1)
    tensors = state_dict(name, config)
    exact, rounded = (build(config, tensors, dtype) for dtype in (torch.float32, torch.bfloat16))
    prompts, greedy, gaps = zip(
        *(choose_prompt(exact, name, config, n) for n in PROMPT_LENGTHS), strict=True
    )

    arrays: dict[str, Any] = {}
    differences = []
    for i, ids in enumerate(prompts):
        positions = np.unique(np.linspace(0, len(ids) - 1, min(ROWS, len(ids))).astype(np.int32))
        logits = forward(exact, ids)[positions].float().numpy()
        bf16 = forward(rounded, ids)[positions].to(torch.bfloat16)  # some families give f32
        differences.append((bf16.float().numpy() - logits).ravel())
        arrays |= {
            f"token_ids_{i}": np.asarray(ids, np.int32),
            f"positions_{i}": positions,
            f"logits_{i}": logits,
            f"logits_bf16_{i}": bf16.view(torch.uint16).numpy(),
            f"greedy_{i}": np.asarray(greedy[i], np.int32),
        }
    difference = np.concatenate(differences)
    meta = {
        "config": config,
        "num_prompts": len(prompts),
        "min_gap": min(gaps),
        "bf16_max_diff": float(np.abs(difference).max()),
        "bf16_rms_diff": float(np.sqrt(np.mean(difference**2))),
        "weights_sha256": checksum(tensors),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
    }
    np.savez_compressed(
        out / f"{name}.npz", allow_pickle=False, meta=np.asarray(json.dumps(meta)), **arrays
    )
    spread = np.std(np.concatenate([arrays[f"logits_{i}"].ravel() for i in range(len(prompts))]))
    distinct = min(len(set(g)) for g in greedy)
    return (
        f"{name:28s} logits std {spread:5.2f}  bf16 diff max {meta['bf16_max_diff']:.3f} "
        f"rms {meta['bf16_rms_diff']:.4f}  greedy: least gap {min(gaps):.3f}, {distinct}+ "
        f"distinct of {NEW_TOKENS}"
    )


def build(config: dict[str, Any], tensors: dict[str, Any], dtype: Any) -> Any:
    """transformers' own model of a config dict with these tensors, every one of them used and none
    missing.
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    # Its config class writes into nested dicts: hence the copy.
    made = kind.from_dict(copy.deepcopy(config))
    cls = getattr(transformers, config["architectures"][0], transformers.AutoModelForCausalLM)
    make = cls.from_config if cls is transformers.AutoModelForCausalLM else cls._from_config
    model = make(made, attn_implementation="eager").eval()
    state = fused_experts({k: torch.from_numpy(v) for k, v in tensors.items()})
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if not name.startswith(OF_IMAGES)]
    tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    assert missing == tied and not unexpected, (missing, unexpected)
    model.tie_weights()
    # Parameters only: the rotary frequencies are buffers, and from_pretrained leaves those in
    # float32 as well.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def fused_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """Experts as transformers holds them: those of a layer in one tensor, gate and up together,
    outputs before inputs; and other parts of mixtures under its names.
    """
    import torch  # pyright: ignore[reportMissingImports]

    from tests.golden.kimi import as_transformers

    state, experts = {}, {}
    other = (".linear_attn.", ".kv_b_proj.")  # of families whose files have outputs first
    is_transposed = not any(name in key for key in tensors for name in other)
    for key, tensor in tensors.items():
        of_granite = (key.replace(*names) for names in GRANITE.items() if names[0] in key)
        key = next(of_granite, as_transformers(key).replace(".block_sparse_moe.", ".mlp."))
        key = key.replace("backbone.", "model.")
        key = key.replace(".attention_layer_norm.", ".input_layernorm.")
        key = key.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")
        key = key.replace(".mlp.moe_statics.", ".mlp.gate.moe_statics.")
        key = key.replace(".attention_sink_bias", ".sinks")
        if (
            is_transposed
            and ".language_model." in key
            and key.endswith(("gate_up_proj", "experts.down_proj"))
        ):
            tensor = tensor.transpose(1, 2).contiguous()
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", key):
            node, x, name = found.groups()
            experts.setdefault(node, {})[int(x), name] = tensor
        else:
            state[key] = tensor
    for key in [key for key in state if key.endswith(".q_conv1d.weight")]:
        parts = [state.pop(key.replace("q_conv1d", f"{x}_conv1d")) for x in "qkv"]
        state[key.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    for node, own in experts.items():
        count = 1 + max(x for x, _ in own)
        if (0, "gate_proj") not in own and (0, "w1") not in own:
            for name in ("up_proj", "down_proj"):
                state[f"{node}.{name}"] = torch.stack([own[x, name] for x in range(count)])
            continue
        names = ("w1", "w3", "w2") if (0, "w1") in own else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (torch.stack([own[x, name] for x in range(count)]) for name in names)
        state |= {f"{node}.gate_up_proj": torch.cat([gate, up], 1), f"{node}.down_proj": down}
    return state


def forward(model: Any, ids: list[int]) -> Any:
    """Logits [len(ids), V], without a cache: the definition, nothing to go stale."""
    import torch  # pyright: ignore[reportMissingImports]

    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def choose_prompt(
    model: Any, name: str, config: dict[str, Any], length: int
) -> tuple[list[int], list[int], float]:
    """The first prompt whose greedy continuation is decided at every step, varied, and free of the
    end of sequence.

    Gives the prompt, its continuation and the least gap between the best two logits.
    """
    eos = config["eos_token_id"]
    stop = set(eos) if isinstance(eos, list) else {eos}
    # The configs end their vocabulary with them.
    usable = config.get("text_config", config)["vocab_size"] - len(stop)
    for attempt in range(TRIES):
        prompt = tokens(f"{name}/prompt/{length}/{attempt}", length, usable)
        ids, gap = list(prompt), float("inf")
        while len(ids) < length + NEW_TOKENS and gap >= ENOUGH_GAP and ids[-1] not in stop:
            best = forward(model, ids)[-1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
        greedy = ids[length:]
        if (
            len(greedy) == NEW_TOKENS
            and gap >= ENOUGH_GAP
            and not stop & set(greedy)
            and len(set(greedy)) >= VARIETY
        ):
            return prompt, greedy, gap
    raise SystemExit(
        f"{name}: none of {TRIES} prompts of {length} tokens is decided at every greedy step"
    )


def tokens(key: str, n: int, limit: int) -> list[int]:
    """n token ids below `limit`, the same everywhere."""
    stream = hashlib.shake_128(key.encode()).digest(4 * n)
    return [int.from_bytes(stream[4 * i : 4 * i + 4], "little") % limit for i in range(n)]


def environment() -> str:
    """The Python of .venv-golden, which is made when it is not there or its requirements have
    changed.
    """
    python, stamp = VENV / "bin" / "python", VENV / "requirements"
    if stamp.exists() and stamp.read_text() == repr(REQUIREMENTS):
        return str(python)
    for candidate in pythons():
        shutil.rmtree(VENV, ignore_errors=True)
        print(f"making {VENV.name} with {candidate}", file=sys.stderr)
        steps = (
            [candidate, "-m", "venv", str(VENV)],
            [str(python), "-m", "pip", "install", "-q", "--only-binary", ":all:", *REQUIREMENTS],
        )
        if all(
            subprocess.run(step, check=False, stderr=subprocess.DEVNULL).returncode == 0
            for step in steps
        ):
            stamp.write_text(repr(REQUIREMENTS))
            return str(python)
    shutil.rmtree(VENV, ignore_errors=True)
    raise SystemExit(
        f"no Python here can install {' '.join(REQUIREMENTS)}: install Python 3.11, or use --here"
    )


def pythons() -> Iterator[str]:
    """Interpreters that really run, from PATH and pyenv, each version once."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in ("3.11", "3.12", "3.13", "3.10", "3.14"):
        own = sorted(map(str, pyenv.glob(f"{version}.*/bin/python")), reverse=True)
        for path in filter(None, (shutil.which(f"python{version}"), *own)):
            if (
                subprocess.run(
                    [path, "-c", "import venv"], check=False, capture_output=True
                ).returncode
                == 0
            ):
                yield path
                break


if __name__ == "__main__":
    sys.exit(main())
