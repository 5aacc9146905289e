"""scripts/quality.py: what its figures are, on a tiny model."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import quality

from jpaged.models.served import quantized_tree
from tests.test_quantization import params_of


def test_a_form_is_further_from_the_model_than_the_model() -> None:
    params = params_of(dtype=jnp.bfloat16)
    tokens = quality.windows(list(np.random.default_rng(0).integers(0, 96, 130)), 32, 100)
    assert tokens.shape == (3, 32)
    own, int8, int4 = quality.quality(params, tokens, ["int8", "int4"])
    assert (own["weights"], own["kl"], own["greedy_kept"]) == ("bfloat16", 0.0, 1.0)
    assert 0 < int8["kl"] < int4["kl"] < 1 and int4["greedy_kept"] <= 1
    assert own["MB"] > int8["MB"] > int4["MB"]
    assert own["perplexity"] == pytest.approx(int8["perplexity"], rel=0.05)


def test_the_tree_is_what_is_measured() -> None:
    """A form that is far off shows: the control of the figures."""
    params = params_of()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 96, (1, 32)), jnp.int32)
    tree = quantized_tree(params, "int8")
    tree["norm"] = {"scale": -jnp.asarray(params["norm"]["scale"])}
    _, divergence, equal = quality.measured(params.config, dict(params), tree, tokens)
    assert divergence > 1 and equal < 31


def test_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("def f():\n")
    with pytest.raises(SystemExit):
        quality.main(["--text", str(text), "--window", "512"])
    assert "--window 512: the text has" in capsys.readouterr().err


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x\n" * 8)
    assert quality.main(["--text", str(text), "--window", "16", "--forms", "int8"]) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    assert "perplexity" in table[0] and [row["weights"] for row in json.loads(line)["rows"]] == [
        "bfloat16",
        "int8",
    ]
