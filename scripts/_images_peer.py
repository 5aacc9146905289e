"""transformers as the peer of bench_images.py, in a process and an environment of its own: torch,
transformers, Pillow and numpy are all that it imports.

It reads one request a line from its standard input and answers each with one line of JSON.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

PROCESSORS = {
    "qwen3_vl": "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    "gemma3": "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
}


class Times:
    """What `generate` streams its tokens to: when each came."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.tokens: list[int] = []
        self._is_prompt = True

    def put(self, value: Any) -> None:
        """Take the prompt, and then each token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.at.append(time.perf_counter())
        self.tokens += value.tolist()

    def end(self) -> None:
        """Take the end of an answer."""


def make(config: Any, folder: str, seed: int) -> None:
    """Write the random weights of a config into its folder, in f32."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:  # also those that begin at 0, so that the image counts
                weight.normal_(std=0.02)
    model.save_pretrained(folder)


def answer(
    model: Any, processor: Any, kind: str, request: dict[str, Any]
) -> dict[str, float | list[int]]:
    """Return the seconds from pixels to the first token, those between the others, and all tokens.
    request: the file of the pixels, the ids before and behind the image, and how many tokens.
    """
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    pixels, streamer = np.load(request["pixels"]), Times()
    began = time.perf_counter()
    made = processor(images=[pixels], input_data_format="channels_last", return_tensors="pt")
    inputs = {"pixel_values": made["pixel_values"].to(model.dtype)}
    count = request["rows"]
    if kind == "qwen3_vl":
        inputs["image_grid_thw"] = made["image_grid_thw"]
        count = int(made["image_grid_thw"].prod()) // processor.merge_size**2
    ids = [*request["before"], *[request["image"]] * count, *request["behind"]]
    tokens = torch.tensor([ids])
    name = "mm_token_type_ids" if kind == "qwen3_vl" else "token_type_ids"
    inputs[name] = (tokens == request["image"]).long()
    with torch.inference_mode():
        model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=request["tokens"],
            do_sample=False,
            streamer=streamer,
            **inputs,
        )
    between = (streamer.at[-1] - streamer.at[0]) / max(len(streamer.at) - 1, 1)
    return {"first": streamer.at[0] - began, "between": between, "tokens": streamer.tokens}


def main() -> int:
    """Make a checkpoint ("make FOLDER SEED"), or answer requests about one ("answer FOLDER DTYPE
    THREADS").
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    job, folder, *words = sys.argv[1:]
    config = transformers.AutoConfig.from_pretrained(folder)
    if job == "make":
        make(config, folder, int(words[0]))
        return 0
    dtype, threads = words
    torch.set_num_threads(int(threads))
    kind = config.model_type
    module, _, name = PROCESSORS[kind].rpartition(".")
    of_class = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    settings = json.loads((Path(folder) / "preprocessor_config.json").read_text())
    processor = of_class(**{k: v for k, v in settings.items() if k != "image_processor_type"})
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=getattr(torch, dtype)
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, processor, kind, json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
