"""OpenVINO GenAI as bench_peers.py drives it, in an environment of its own: openvino-genai, nncf,
gguf.

The model is read from a GGUF file in f16, as OpenVINO GenAI reads those, and kept as OpenVINO's own
files; int8 and int4 are nncf's compression of these weights, symmetric, with a scale an output in
int8, and one for 32 inputs and the head in int8 in int4. Keys and values are kept as the plugin
chooses (in 8 bits on a CPU).
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _peers_driver import Engine, New, Setup, serve
from _peers_gguf import gguf_file

BLOCK = 32  # tokens of a block of its cache on a CPU
STEP_TOKENS = 1024
FORMS = {"bf16": "f16", "int8": "nncf INT8_SYM", "int4": "nncf INT4_SYM by 32, head int8"}
MODEL = "openvino_model.xml"


class OpenVINO:
    """Its pipeline for batches, with steps of 1,024 tokens and no prefix cache."""

    def __init__(self, setup: Setup):
        import openvino  # pyright: ignore[reportMissingImports]
        import openvino_genai  # pyright: ignore[reportMissingImports]

        self._ov, self._genai = openvino, openvino_genai
        self.version, self.form = openvino_genai.__version__, FORMS[setup.weights]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.max_num_seqs = setup.rows
        scheduler.num_kv_blocks = -(-setup.tokens // BLOCK) + setup.rows
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        self._pipe = openvino_genai.ContinuousBatchingPipeline(
            str(model_folder(setup)), scheduler, "CPU", {"INFERENCE_NUM_THREADS": setup.threads}
        )
        self._count = 0

    def warm(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> None:
        self.generate(prompts, lengths, temperature)

    def generate(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> list[list[int]]:
        configs = [self._config(n, temperature) for n in lengths]
        outs = self._pipe.generate([self._tensor(prompt) for prompt in prompts], configs)
        return [list(out.m_generation_ids[0]) for out in outs]

    def stream(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> Iterator[New]:
        handles = []
        for prompt, n in zip(prompts, lengths, strict=True):
            config = self._config(n, temperature)
            handles.append(self._pipe.add_request(self._count, self._tensor(prompt), config))
            self._count += 1
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            yield self._read(handles)
        yield self._read(handles)

    def _read(self, handles: list[Any]) -> New:
        new: New = []
        for index, handle in enumerate(handles):
            while handle.can_read():
                new += [(index, list(out.generated_ids)) for out in handle.read().values()]
        return new

    def _tensor(self, prompt: list[int]) -> Any:
        import numpy as np

        return self._ov.Tensor(np.array([prompt], np.int64))

    def _config(self, length: int, temperature: float) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = length, True
        config.do_sample = temperature > 0
        if temperature:
            config.temperature, config.top_p = temperature, 1.0
            config.top_k = sys.maxsize
        return config


def model_folder(setup: Setup) -> Path:
    """Return the folder of OpenVINO's files in these weights, written at the first call."""
    folder = Path(setup.models) / f"{Path(setup.folder).name}-openvino-{setup.weights}"
    if folder.is_dir():
        return folder
    plain = gguf_file(setup.folder, setup.models, "f16")
    with tempfile.TemporaryDirectory(dir=setup.models) as made:
        new = Path(made) / "new"
        if setup.weights == "bf16":
            _from_gguf(plain, Path(made), new)
        else:
            compress(model_folder(_in_bf16(setup)), new, setup.weights)
        new.rename(folder)
    return folder


def _in_bf16(setup: Setup) -> Setup:
    import dataclasses

    return dataclasses.replace(setup, weights="bf16")


def _from_gguf(plain: str, made: Path, new: Path) -> None:
    """Load a GGUF file, whose model the library then writes beside it, in OpenVINO's files."""
    import openvino_genai  # pyright: ignore[reportMissingImports]

    file = made / Path(plain).name
    file.symlink_to(plain)
    openvino_genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True)
    new.mkdir()
    for written in made.glob("openvino*"):
        written.rename(new / written.name)


def compress(plain: Path, new: Path, weights: str) -> None:
    """Write a folder like `plain` with its weights in int8 or int4."""
    import nncf  # pyright: ignore[reportMissingImports]
    import openvino  # pyright: ignore[reportMissingImports]

    mode = nncf.CompressWeightsMode
    kinds: dict[str, dict[str, Any]] = {
        "int8": {"mode": mode.INT8_SYM},
        "int4": {"mode": mode.INT4_SYM, "group_size": 32, "ratio": 1.0},
    }
    model = nncf.compress_weights(openvino.Core().read_model(plain / MODEL), **kinds[weights])
    new.mkdir()
    for file in plain.iterdir():
        if file.stem != Path(MODEL).stem:
            shutil.copy(file, new)
    openvino.save_model(model, new / MODEL, compress_to_fp16=False)


def make(setup: Setup) -> Engine:
    return OpenVINO(setup)


if __name__ == "__main__":
    sys.exit(serve(make))
