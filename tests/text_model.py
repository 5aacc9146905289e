"""A checkpoint folder of the tiny model, with a tokenizer that has one token a character."""

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jpaged.models.config import ModelConfig
from jpaged.models.hf_defaults import import_transformers
from tests.golden.weights import state_dict
from tests.tiny import CONFIG

TILDE, TOKENIZER_EOS, CONFIG_EOS = (
    94,
    95,
    96,
)  # three sources of EOS: generation_config, tokenizer, config.json
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') "
    "}}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if tone %}({{ tone }}){% endif %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """One token a printable ASCII character, then two special ones."""
    vocabulary = {chr(32 + i): i for i in range(95)} | {"<eos>": TOKENIZER_EOS, "<end>": CONFIG_EOS}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", additional_special_tokens=["<end>"]
    )
    fast.chat_template = template
    return fast


def write_folder(folder: Path, name: str = "text", config: ModelConfig = CONFIG) -> Path:
    """A Hugging Face folder: config.json, the weights that belong to `name`, tokenizer and
    generation defaults.
    """
    raw = config.to_hf()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(state_dict(name, raw), folder / "model.safetensors")
    make_tokenizer().save_pretrained(folder)
    defaults = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "eos_token_id": [TILDE, CONFIG_EOS],
        "do_sample": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder
