"""Measure the time to the first token of a prompt with an image, and the pace of those after it,
of jpaged beside transformers on this CPU.

    python scripts/bench_images.py --peer-python /path/to/torch/bin/python
    python scripts/bench_images.py --models gemma3 --dtypes bfloat16 --sides 448 --rounds 5

transformers runs in a process of its own, by the Python that --peer-python names, with the same
checkpoint (random weights of a seed, in the shapes of Qwen3-VL 2B and Gemma 3 4B with towers of
full width and fewer layers, written to a folder of this run's own), the same image processor,
pictures, prompts and number of threads, greedily. Without --peer-python jpaged is measured alone.

Requests take turns, jpaged's and the peer's, in rounds that go forwards and backwards; the first
round, which compiles, is left out. Every round has a picture that nobody has seen. jpaged answers
it three times: "new"; "kept", behind other text, so that the embeddings are kept and all of the
prompt is computed; and "again", the same prompt, which is found in the prefix cache. transformers
keeps nothing from one call of `generate` to the next, so it is asked once. Times are medians, from
the pixels to the first token (ms), and between tokens (ms); "equal" is the share of the peer's
tokens that jpaged's are, up to the first that differs: near ties of random weights part in
bfloat16. "reads" is how often a token could read the text model's weights at the speed of a plain
read of memory, which bounds the pace. A JSON line ends the output.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _common as common
import jax
import numpy as np

import jpaged
from jpaged.models.config import ModelConfig
from jpaged.models.params import random_params

IDS = (32000, 32001, 32002)  # of an image, its begin and its end
KINDS = ("new", "kept", "again")
PEER = Path(__file__).with_name("_images_peer.py")


def qwen3_vl(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config.json and preprocessor_config.json of a Qwen3-VL."""
    image, begin, end = IDS
    depth = args.tower_layers
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    config = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": image,
        "vision_start_token_id": begin,
        "vision_end_token_id": end,
        "video_token_id": 32003,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": 32768,
            "hidden_size": 1024 // args.shrink,
            "intermediate_size": 3072 // args.shrink,
            "num_hidden_layers": args.layers,
            "num_attention_heads": 16 // args.shrink,
            "num_key_value_heads": 8 // args.shrink,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "rope_parameters": rope | {"mrope_section": [24, 20, 20]},
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": depth,
            "hidden_size": 1024 // args.shrink,
            "num_heads": 16 // args.shrink,
            "intermediate_size": 4096 // args.shrink,
            "patch_size": 16,
            "out_hidden_size": 1024 // args.shrink,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": sorted({depth // 4, depth // 2, depth - 1})[: args.layers],
        },
    }
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return config, settings


def gemma3(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config.json and preprocessor_config.json of a Gemma 3."""
    image, begin, end = IDS
    side = 896 // args.shrink
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "image_token_index": image,
        "boi_token_index": begin,
        "eoi_token_index": end,
        "mm_tokens_per_image": (16 // args.shrink) ** 2,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 32768,
            "hidden_size": 1152 // args.shrink,
            "intermediate_size": 6912 // args.shrink,
            "num_hidden_layers": args.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256 // args.shrink,
            "query_pre_attn_scalar": 256 // args.shrink,
            "max_position_embeddings": 8192,
            "sliding_window": 1024,
            "layer_types": [
                "sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(args.layers)
            ],
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152 // args.shrink,
            "intermediate_size": 4304 // args.shrink,
            "num_hidden_layers": args.tower_layers,
            "num_attention_heads": 16,
            "image_size": side,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }
    settings = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": side, "width": side},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_pan_and_scan": None,
    }
    return config, settings


MODELS = {"qwen3_vl": qwen3_vl, "gemma3": gemma3}


def write_checkpoint(name: str, args: argparse.Namespace, folder: Path) -> None:
    """Write a checkpoint of random weights by the peer, if there is one, else what describes it."""
    hf, settings = MODELS[name](args)
    (folder / "config.json").write_text(json.dumps(hf))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if args.peer_python is not None:
        command = [args.peer_python, str(PEER), "make", str(folder), str(args.seed)]
        subprocess.run(command, check=True, env=peer_environment(args.threads))
        # transformers has written every field; both sides read the same ones.


def load(args: argparse.Namespace, folder: Path, dtype: str) -> jpaged.Params:
    """Return the weights of the checkpoint; without a peer, which writes them, some of a seed."""
    if args.peer_python is not None:
        return jpaged.load_params(folder, images=True, dtype=dtype)
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()), images=True)
    made = random_params(config, args.seed, dtype)
    return jpaged.Params(dict(made), config, folder)


def peer_environment(threads: int) -> dict[str, str]:
    """Return the environment of the peer, whose packages are its own."""
    environment = dict(os.environ) | {"OMP_NUM_THREADS": str(threads)}
    environment |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    return environment


class Peer:
    """transformers in a process of its own."""

    def __init__(self, python: str, folder: Path, dtype: str, threads: int):
        self._process = subprocess.Popen(
            [python, str(PEER), "answer", str(folder), dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=peer_environment(threads),
        )
        self.versions = self._read()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return its answer to a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with exit code {self._process.wait()}: see above")
        return json.loads(line)


@contextmanager
def peer_of(args: argparse.Namespace, folder: Path, dtype: str) -> Iterator[Peer | None]:
    """Yield the peer, or None where no Python was named."""
    if args.peer_python is None:
        yield None
        return
    peer = Peer(args.peer_python, folder, dtype, args.threads)
    try:
        yield peer
    finally:
        peer.close()


def stream(llm: jpaged.LLM, prompt: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the seconds from pixels to the first token, those between the others, and all."""
    params = jpaged.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    began, at, drawn = time.perf_counter(), list[float](), list[int]()
    for chunk in llm.stream([prompt], params):
        at.append(time.perf_counter())
        drawn += chunk.token_ids_delta
    # A chunk may have several tokens, of which the first chunk's are not counted.
    between = (at[-1] - at[0]) / max(len(drawn) - 1, 1)
    return {"first": at[0] - began, "between": between, "tokens": drawn}


def compare(
    llm: jpaged.LLM, peer: Peer | None, name: str, side: int, args: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Return the medians of one model, dtype and size of pictures."""
    rng = np.random.default_rng([args.seed, side])
    image, begin, end = IDS
    text = rng.integers(3, 32000, (2, args.prompt)).tolist()
    before, behind = text[0][: args.prompt // 2], text[0][args.prompt // 2 :]
    other = text[1][: args.prompt // 2]
    vision = llm.model_config.vision
    assert vision is not None
    rows = getattr(vision, "rows_of_an_image", 0)
    pixels = np.empty(0)
    file = folder / "pixels.npy"

    def prompt(before: list[int]) -> dict[str, Any]:
        # What stands around the rows of Gemma 3 is put there by jpaged, which has no newlines here.
        marks = [begin] if name == "gemma3" else [begin, image, end]
        return {"prompt_token_ids": [*before, *marks, *behind], "images": [pixels]}

    def new() -> dict[str, Any]:
        return stream(llm, prompt(before), args.tokens)

    def kept() -> dict[str, Any]:
        return stream(llm, prompt(other), args.tokens)

    def theirs() -> dict[str, Any]:
        assert peer is not None
        request = {"pixels": str(file), "before": [*before, begin], "behind": [end, *behind]}
        return peer.ask(request | {"image": image, "rows": rows, "tokens": args.tokens})

    ours: dict[str, Callable[[], dict[str, Any]]] = {"new": new, "kept": kept, "again": new}
    results: dict[str, list[dict[str, Any]]] = {}
    for i in range(1 + args.rounds):
        # Smooth with noise: no size of file or of pixel decides anything here.
        waves = np.indices((side, side, 3)).sum(axis=0)
        pixels = ((waves + rng.integers(0, 64, (side, side, 3))) % 256).astype(np.uint8)
        np.save(file, pixels)
        llm.reset_prefix_cache()  # the text of a round before would be found
        encoded = llm.stats()["images_encoded"]
        turns = [lambda: {kind: ours[kind]() for kind in KINDS}]
        turns += [] if peer is None else [lambda: {"transformers": theirs()}]
        for turn in turns[:: -1 if i % 2 else 1]:
            for kind, result in turn().items():
                if i:
                    results.setdefault(kind, []).append(result)
        assert llm.stats()["images_encoded"] == encoded + 1
    record: dict[str, Any] = {}
    for kind in (kind for kind in (*KINDS, "transformers") if kind in results):
        record[f"{kind}_first_ms"] = 1e3 * statistics.median(run["first"] for run in results[kind])
    for kind in ("new", "transformers"):
        if kind in results:
            between = statistics.median(run["between"] for run in results[kind])
            record[f"{kind}_between_ms"] = 1e3 * between
    if peer is not None:
        pairs = zip(results["new"], results["transformers"], strict=True)
        record["equal"] = statistics.mean(equal_share(a["tokens"], b["tokens"]) for a, b in pairs)
    return record


def equal_share(ours: list[int], theirs: list[int]) -> float:
    """Return the share of tokens up to the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(ours)) / len(ours)


def text_bytes(params: jpaged.Params) -> int:
    """Return the bytes that a step of decode reads: of all weights but the tower's."""
    parts = {name: part for name, part in params.items() if name != "vision"}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(parts))


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("bench_images", __doc__)
    add = parser.add_argument
    add("--peer-python", metavar="PATH", help="a Python with torch and transformers")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which")
    dtypes = ("float32", "bfloat16")
    add("--dtypes", nargs="+", choices=dtypes, default=list(dtypes), help="of weights")
    add("--sides", type=int, nargs="+", default=[448, 896], help="pixels of a picture's side")
    add("--layers", type=int, default=12, help="layers of the text model")
    add("--tower-layers", type=int, default=12, help="layers of the tower")
    add("--shrink", type=int, choices=(1, 2, 4), default=1, help="divide widths and heads")
    add("--prompt", type=int, default=64, help="tokens of text, half of them before the image")
    add("--tokens", type=int, default=32, help="tokens of an answer")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores of each side")
    add("--rounds", type=int, default=5, help="rounds that count")
    add("--seed", type=int, default=0, help="of weights, prompts and pictures")
    args = parser.parse_args(argv)
    names = ("sides", "layers", "tower_layers", "prompt", "tokens", "threads", "rounds")
    common.check_positive(parser, args, *names)
    cores = sorted(os.sched_getaffinity(0))
    if args.threads > len(cores):
        parser.error(f"--threads {args.threads}: this process may run on {len(cores)} cores")
    if args.tower_layers < 3 or args.prompt < 2 or args.tokens < 2:
        parser.error("--tower-layers is at least 3, --prompt and --tokens are at least 2")
    os.sched_setaffinity(0, cores[: args.threads])  # before jax counts them; the peer inherits it
    try:
        records = measure(args)
    finally:
        os.sched_setaffinity(0, cores)
    heads = ["model", "dtype", "side", *(name for name in next(iter(records.values())))]
    rows = [
        [*key.split(), *(common.number(value) for value in record.values())]
        for key, record in records.items()
    ]
    print("\n".join(common.aligned([head.replace("_", "\n", 1) for head in heads], rows, left=2)))
    settings = {name: getattr(args, name) for name in (*names, "shrink")}
    print(common.json_line(common.environment() | settings | records))
    return 0


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return what was measured, by model, dtype and side."""
    records: dict[str, dict[str, Any]] = {}
    for name in args.models:
        with tempfile.TemporaryDirectory(prefix="jpaged-bench-") as root:
            folder = Path(root)
            write_checkpoint(name, args, folder)
            for dtype in args.dtypes:
                params = load(args, folder, dtype)
                llm = jpaged.LLM(
                    params,
                    images=True,
                    max_model_len=4096,
                    max_num_seqs=1,
                    max_num_batched_tokens=4096,
                    block_size=16,
                    num_blocks=768,
                )
                with peer_of(args, folder, dtype) as peer:
                    for side in args.sides:
                        record = compare(llm, peer, name, side, args, folder)
                        read = text_bytes(params) / common.read_bandwidth() / 1e6
                        record["reads_ms"] = read
                        records[f"{name} {dtype} {side}"] = record
                        told = (f"{key} {common.number(value)}" for key, value in record.items())
                        print(name, dtype, side, *told, sep=", ", file=sys.stderr)  # one by one
                llm.close()
                del llm, params
    return records


if __name__ == "__main__":
    sys.exit(main())
