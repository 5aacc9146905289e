"""Write a Qwen3 checkpoint with tied embeddings as a GGUF file, which llama.cpp and OpenVINO GenAI
read. It runs in a peer's environment and needs the packages gguf and numpy.

Matrices are in the type asked for: bf16, f16, q8_0, or q4_0 with the embedding, which is the head
too, in q8_0. The vocabulary is made up: prompts come as ids, and engines only want one to be there.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TYPES = {"bf16": "BF16", "f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


def gguf_file(folder: str, models: str, kind: str) -> str:
    """Return the GGUF file of a checkpoint, written at the first call; kind: one of TYPES."""
    file = Path(models) / f"{Path(folder).name}-{kind}.gguf"
    if not file.exists():
        part = file.with_suffix(".part")
        write(Path(folder), part, kind)
        os.replace(part, file)
    return str(file)


def write(folder: Path, file: Path, kind: str) -> None:
    import gguf  # pyright: ignore[reportMissingImports]

    c = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), "qwen3")
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{TYPES[kind]}"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_rope_freq_base(float(c["rope_parameters"]["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(c["rms_norm_eps"]))
    writer.add_vocab_size(c["vocab_size"])
    _add_vocabulary(writer, gguf, c["vocab_size"])
    matrices = gguf.GGMLQuantizationType[TYPES[kind]]
    for name, values in tensors(folder / "model.safetensors"):
        stored = stored_name(name)
        if values.ndim == 1:
            writer.add_tensor(stored, values)
            continue
        form = matrices
        if stored == "token_embd.weight" and kind == "q4_0":
            form = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(stored, gguf.quants.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names and f32 values of a safetensors file of bf16."""
    import numpy as np

    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    raw = np.memmap(file, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is in {entry['dtype']}, not in BF16")
        begin, end = entry["data_offsets"]
        bits = raw[begin:end].view(np.uint16).astype(np.uint32) << 16
        yield name, bits.view(np.float32).reshape(entry["shape"])


def stored_name(name: str) -> str:
    """Return GGUF's name of a tensor."""
    stem = name.removesuffix(".weight")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{IN_LAYER[part]}.weight"


def _add_vocabulary(writer: Any, gguf: Any, size: int) -> None:
    """Add bytes, one merge, an end and words that no text has."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in visible]
    letters = [chr(byte) for byte in visible] + [chr(256 + i) for i in range(len(rest))]
    words = ["<|endoftext|>", *letters, "th"]
    words += [f"<|unused{i}|>" for i in range(size - len(words))]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    kinds = [normal if 0 < i <= len(letters) + 1 else control for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    writer.add_add_bos_token(False)
