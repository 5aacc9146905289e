"""Reads the stored references and writes the checkpoints that they belong to."""

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.golden.configs import CONFIGS
from tests.golden.make_golden_seeds import POSITIONS, STORED
from tests.golden.weights import checksum, state_dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What transformers gave for one prompt in float32; lists hold token ids."""

    token_ids: list[int]
    positions: (
        np.ndarray
    )  # [R] int32: the prompt positions whose logits are stored, the last one among them
    logits: np.ndarray  # [R, V] float32
    greedy: list[int]  # greedy continuation; no end-of-sequence token in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt(Answer):
    """The same, and in bfloat16."""

    logits_bf16: np.ndarray  # [R, V] float32, from the same model in bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A tiny model and what transformers gave of it in float32."""

    name: str
    config: dict[str, Any]  # Hugging Face's
    prompts: Sequence[Answer]
    weights_sha256: str

    def tensors(self) -> dict[str, np.ndarray]:
        """The checkpoint's tensors, float32, exact in bfloat16 and float16 too; asserts that they
        are the same.
        """
        tensors = state_dict(self.name, self.config)
        assert checksum(tensors) == self.weights_sha256, (
            f"{self.name}: run tests/golden/make_golden.py, its weights changed"
        )
        return tensors

    def write(self, folder: Path, dtype: str = "float32", shards: int = 1) -> Path:
        """A Hugging Face folder (config.json, safetensors, an index for several shards); gives
        `folder`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config | {"torch_dtype": dtype}))
        kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        tensors = {k: v.astype(kind) for k, v in self.tensors().items()}
        if shards == 1:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        names = sorted(tensors)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = names[i::shards]
            save_file({k: tensors[k] for k in part}, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        total = sum(v.nbytes for v in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden(Model):
    """The reference of one tiny model."""

    prompts: Sequence[Prompt]
    min_gap: float  # least distance between the best two logits over all greedy steps
    bf16_max_diff: float  # max |bfloat16 - float32| of transformers itself over all stored logits
    bf16_rms_diff: float
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamCase:
    """What transformers' beam search gave for one prompt, float32; lists of int hold token ids."""

    config: str  # one of CONFIGS
    prompt: list[int]
    beam_width: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    eos_token_ids: list[int]  # of this case; the config's own do not count
    beams: list[
        list[int]
    ]  # completions, best first, as many as beam_width; one that met an eos ends with it
    scores: list[float]  # sum of log-probabilities / length ** length_penalty, of each beam
    gap: float  # least difference of log-probability that any choice on the way hung on


def load_beams() -> list[BeamCase]:
    """Every stored case of beam search; asserts that their models' weights are the same."""
    stored = json.loads((Path(__file__).parent / "beams.json").read_text())
    for name, expected in stored["weights_sha256"].items():
        assert load(name).weights_sha256 == expected, (
            f"run tests/golden/make_golden.py beams, the weights of {name} changed"
        )
    return [BeamCase(**case) for case in stored["cases"]]


def load(name: str) -> Golden:
    """The stored reference of one of CONFIGS."""
    with np.load(Path(__file__).parent / f"{name}.npz", allow_pickle=False) as stored:
        meta = json.loads(str(stored["meta"]))
        assert meta.pop("config") == CONFIGS[name], (
            f"{name}: run tests/golden/make_golden.py, its config changed"
        )
        prompts = [
            Prompt(
                token_ids=stored[f"token_ids_{i}"].tolist(),
                positions=stored[f"positions_{i}"],
                logits=stored[f"logits_{i}"],
                logits_bf16=stored[f"logits_bf16_{i}"].view(ml_dtypes.bfloat16).astype(np.float32),
                greedy=stored[f"greedy_{i}"].tolist(),
            )
            for i in range(meta.pop("num_prompts"))
        ]
    return Golden(name=name, config=copy.deepcopy(CONFIGS[name]), prompts=prompts, **meta)


def load_seeds(*keys: str) -> list[Model]:
    """Return what transformers gives for models of STORED, float32 alone."""
    with np.load(Path(__file__).parent / "seeds.npz", allow_pickle=False) as stored:
        meta = json.loads(str(stored["meta"]))
        assert meta.keys() == STORED.keys(), "run tests/golden/make_golden.py seeds"
        models = []
        for key in keys:
            said = "run tests/golden/make_golden.py seeds, its config changed"
            assert meta[key]["config"] == STORED[key], f"{key}: {said}"
            prompt = Answer(
                token_ids=stored[f"{key}/token_ids"].tolist(),
                positions=np.asarray(POSITIONS, np.int32),
                logits=stored[f"{key}/logits"],
                greedy=stored[f"{key}/greedy"].tolist(),
            )
            models.append(Model(name=key, prompts=[prompt], **copy.deepcopy(meta[key])))
    return models
