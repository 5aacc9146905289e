"""What of a model and its engine stays the same while it is served."""

import importlib.metadata
from typing import Any

import jax
from jax.sharding import Mesh

from jpaged.llm import LLM

# The controls whose defaults come from the checkpoint's generation_config.json.
CONTROLS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def version() -> str:
    """Return the version of this package; "unknown" for a checkout that was never installed."""
    try:
        return importlib.metadata.version("jpaged")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def fixed_facts(llm: LLM) -> dict[str, Any]:
    """Return what GET /status says of it."""
    config, defaults = llm.engine_config, llm.default_sampling_params()
    placement = llm.session.served.placement
    return {
        "version": version(),
        "jax_version": jax.__version__,
        "device": placement.device.device_kind,
        "platform": placement.device.platform,
        "devices": placement.mesh.size if isinstance(placement.mesh, Mesh) else 1,
        "dtype": llm.session.served.dtype.name,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.all_rows,
        "max_logprobs": config.max_logprobs,
        "vocab_size": llm.model_config.vocab_size,
        "defaults": {name: getattr(defaults, name) for name in CONTROLS},
        "has_tokenizer": llm.tokenizer is not None,
        "has_chat_template": bool(getattr(llm.tokenizer, "chat_template", None)),
    }
