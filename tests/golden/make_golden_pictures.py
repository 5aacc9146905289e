"""What transformers makes of prompts with images, from pixels to logprobs: see make_golden.py,
which runs it as `pictures`.
"""

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

from tests.golden.pictures import (
    FILE,
    NAMES,
    NEW_TOKENS,
    PROMPTS,
    RESIZED,
    config_of,
    noisy,
    pictures,
    settings,
    token_ids,
)

PROCESSORS = {
    "qwen": "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    "gemma3": "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
    "gemma4_clipped": "gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil",
    # This one is torchvision's alone.
    "gemma4_unified": "gemma4_unified.image_processing_gemma4_unified.Gemma4UnifiedImageProcessor",
}
SPECIAL = {17, 18, 19, 20, 23}  # tokens of images, which would need more of these, and EOS


def make_pictures(out: Path) -> str:
    """Computes and stores them all; gives a line that sums them up."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    library = need_torchvision()  # before transformers is imported, and as long as it is used
    from tests.golden.make_golden_towers import model_of

    torch.set_num_threads(1)
    arrays: dict[str, Any] = {f"resized/{i}": x for i, x in enumerate(_resized())}
    for name in NAMES:
        model, _ = model_of(name, config_of(name))
        for prompt in PROMPTS:
            arrays |= {f"{name}/{prompt}/{k}": v for k, v in _run(model, name, prompt).items()}
    del library
    np.savez_compressed(out / FILE.name, allow_pickle=False, **arrays)
    return f"{FILE.name}: {len(NAMES)} models, {len(PROMPTS)} prompts of each"


def need_torchvision() -> Any:
    """Have torchvision's Python import where its C++ does not load, as that of a CUDA build beside
    a CPU build of torch: its operators are declared, and none of them runs here. Return what
    declares them.
    """
    import torch  # pyright: ignore[reportMissingImports]

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("pictures: pip install torchvision, of the same release as torch")
    try:
        importlib.import_module("torchvision")
        return None
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        source = Path(spec.origin).with_name("_meta_registrations.py").read_text()
        named = r'register_meta\("(\w+)"|register_fake\("torchvision::(\w+)'
        for names in set(re.findall(named, source)):
            library.define(f"{names[0] or names[1]}() -> ()")
        importlib.import_module("torchvision")
        return library


def _resized() -> list[Any]:
    """What torchvision makes of the images of RESIZED."""
    import torch  # pyright: ignore[reportMissingImports]
    from torchvision.transforms.v2 import (  # pyright: ignore[reportMissingImports]
        InterpolationMode,
        functional,
    )

    made = []
    for before, after in RESIZED:
        image = torch.from_numpy(noisy(before)).permute(2, 0, 1)
        out = functional.resize(image, list(after), InterpolationMode.BICUBIC, antialias=True)
        made.append(out.permute(1, 2, 0).numpy())
    return made


def _run(model: Any, name: str, prompt: str) -> dict[str, Any]:
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    from tests.golden.make_golden import ENOUGH_GAP, TRIES

    inputs, rows = _images(name, prompt)
    for seed in range(TRIES):
        asked = token_ids(name, prompt, seed)
        whole, gap = _expanded(name, asked, rows), float("inf")
        length = len(whole)
        while len(whole) < length + NEW_TOKENS and not SPECIAL & set(whole[length:]):
            logprobs = _logprobs(model, name, whole, inputs)
            best = logprobs[-1].topk(2).values
            gap = min(gap, float(best[0] - best[1]))
            whole.append(int(logprobs[-1].argmax()))
        if gap < ENOUGH_GAP or SPECIAL & set(whole[length:]):
            continue
        logprobs = _logprobs(model, name, whole, inputs)
        taken = logprobs[:-1].gather(1, torch.tensor(whole[1:])[:, None])[:, 0].numpy()
        return {
            "prompt": np.asarray(asked, np.int32),
            "token_ids": np.asarray(whole[:length], np.int32),
            "logprobs": taken[: length - 1],
            "greedy": np.asarray(whole[length:], np.int32),
            "greedy_logprobs": taken[length - 1 :],
        }
    raise SystemExit(f"{name}/{prompt}: no prompt is decided at every greedy step")


def _images(name: str, prompt: str) -> tuple[dict[str, Any], list[int]]:
    """What a model's forward takes of the images of a prompt, and how many tokens each takes."""
    import torch  # pyright: ignore[reportMissingImports]

    kind = "qwen" if name.startswith("qwen") else name
    module, _, of_class = PROCESSORS[kind].rpartition(".")
    made = getattr(importlib.import_module(f"transformers.models.{module}"), of_class)
    fields = {k: v for k, v in settings(name).items() if k != "image_processor_type"}
    processor = made(**fields)
    images = pictures(prompt)
    out = processor(images=images, input_data_format="channels_last", return_tensors="pt")
    if kind == "qwen":
        grids = out["image_grid_thw"]
        inputs = {"pixel_values": out["pixel_values"], "image_grid_thw": grids}
        return inputs, (grids.prod(-1) // 4).tolist()
    if kind == "gemma3":
        return {"pixel_values": out["pixel_values"]}, [9] * len(images)
    inputs = {
        "pixel_values": out["pixel_values"].to(torch.float32),
        "image_position_ids": out["image_position_ids"],
    }
    counts = (out["image_position_ids"][:, :, 0] >= 0).sum(-1)
    if kind != "gemma4_unified":
        counts = counts // 9
    return inputs, counts.tolist()


def _expanded(name: str, asked: list[int], rows: list[int]) -> list[int]:
    """A prompt with the ids of its images in place of placeholders."""
    whole, left = list[int](), iter(rows)
    for token in asked:
        if name.startswith("qwen"):
            whole += [17] * next(left) if token == 17 else [token]
        elif name == "gemma3":
            whole += [18, *[17] * 9, 19] if token == 18 else [token]  # no tokenizer, no newlines
        else:
            whole += [18, *[17] * next(left), 19] if token == 17 else [token]
    return whole


def _logprobs(model: Any, name: str, ids: list[int], inputs: dict[str, Any]) -> Any:
    """log_softmax of the logits of all tokens, [T, V]."""
    import torch  # pyright: ignore[reportMissingImports]

    tokens = torch.tensor([ids])
    kinds, mask = (tokens == 17).long(), torch.ones_like(tokens)
    more = {"token_type_ids": kinds} if name == "gemma3" else {"mm_token_type_ids": kinds}
    if name == "gemma4_unified":
        # This model has two masks in transformers 5.23: the one that `generate` makes in advance,
        # which is Gemma 4's (tokens of an image see each other within the window, and not in full
        # layers), and another of `forward`, where no window bounds them and full layers have it too
        # (transformers issue 46711, mended there for Gemma 4 alone).
        embeddings = model.get_input_embeddings()(tokens)
        mask = model.create_masks_for_generate(
            model.config, embeddings, mask, None, None, mm_token_type_ids=kinds
        )
    with torch.no_grad():
        logits = model(
            input_ids=tokens,
            attention_mask=mask,
            use_cache=False,
            **inputs,
            **more,
        ).logits[0]
    return torch.log_softmax(logits.float(), -1)
