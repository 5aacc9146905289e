"""MTP heads that checkpoints have: read, and held to what transformers' own layer gives of them."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jpaged
from jpaged.models.forward import bind
from jpaged.models.head_modules import bind_any
from jpaged.models.kv_groups import dense_view
from jpaged.models.layers.linear import StepContext
from jpaged.models.mtp import MTPHead
from tests.golden.configs import CONFIGS
from tests.golden.make_golden_mtp import POSITIONS
from tests.golden.mtp import GUESSED, HEADS, file_tensors
from tests.golden.weights import state_dict

STORED = Path(__file__).parents[1] / "golden" / "mtp.npz"


@functools.cache
def stored() -> dict[str, np.ndarray]:
    with np.load(STORED, allow_pickle=False) as arrays:
        config = json.loads(str(arrays["meta"]))
        assert config == {name: CONFIGS[name] for name in HEADS}, "run make_golden.py mtp"
        return {name: arrays[name] for name in arrays if name != "meta"}


def write(folder: Path, name: str) -> Path:
    """The model's files, its head's tensors among them."""
    tensors = state_dict(name, CONFIGS[name]) | file_tensors(name, CONFIGS[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | {"torch_dtype": "float32"}))
    return folder


@pytest.mark.parametrize("name", HEADS)
def test_transformers_numbers(name: str, tmp_path: Path) -> None:
    """Logits of entries after the model's hidden states, and tokens guessed one after the other, by
    the head of a folder that is read without a tensor left over; so is the model without its head.
    """
    folder = write(tmp_path, name)
    params, guessing = jpaged.load_params(folder), jpaged.load_params(folder, mtp=True)
    assert guessing.config.is_head and not params.config.is_head
    tokens, context = stored()[f"{name}/token_ids"].tolist(), StepContext()

    model, head = bind(params.config, dict(params)), bind_any(guessing.config, dict(guessing))
    assert isinstance(head, MTPHead)

    @jax.jit
    def entries(hidden_TE: jax.Array, after_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions_T = jnp.arange(after_T.shape[0])
        view = dense_view(guessing.config, hidden_TE)
        x_TE, _ = head(model, after_T, positions_T, hidden_TE, view, context)
        return x_TE, head.logits(model, x_TE, context)

    longest = len(tokens) + GUESSED  # one compile: attention is causal
    padded = np.zeros(longest, np.int32)
    hidden_TE = jnp.zeros((longest, params.config.hidden_size))
    hidden_TE = hidden_TE.at[: len(tokens) - 1].set(stored()[f"{name}/hidden"])
    after, guesses = tokens[1:], list[int]()
    for turn in range(GUESSED):
        padded[: len(after)] = after
        x_TE, logits_TV = entries(hidden_TE, jnp.asarray(padded))
        last = len(after) - 1
        if not turn:
            expected = stored()[f"{name}/logits"]
            off = np.abs(np.asarray(logits_TV)[list(POSITIONS)] - expected).max()
            assert off < 1e-4 * np.abs(expected).max(), off
        guesses.append(int(logits_TV[last].argmax()))
        after = [*after, guesses[-1]]
        hidden_TE = hidden_TE.at[last + 1].set(x_TE[last])
    assert guesses == stored()[f"{name}/guesses"].tolist()
