"""JPagedLM beside the stored answers of lm-eval's "hf" model: tests/golden/lm_eval.json, by
make_golden_lm_eval.py.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import lm_eval  # pyright: ignore[reportMissingImports]
import numpy as np
import pytest
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

import jpaged
from jpaged import ConfigError, RequestError
from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH
from jpaged.integrations.lm_eval import JPagedLM
from tests import tiny
from tests.golden import lm_eval_cases as cases

pytestmark = pytest.mark.clients
ROOT = Path(__file__).resolve().parents[2]
STORED = json.loads((ROOT / "tests" / "golden" / "lm_eval.json").read_text())
SIZES: dict[str, Any] = {
    "token_buckets": (64,),
    "seq_buckets": (8,),
    "max_num_batched_tokens": 64,
    "num_blocks": 64,
}
A_TOKEN = 1e-4


@pytest.fixture(scope="module")
def model() -> Iterator[JPagedLM]:
    model = JPagedLM(
        str(MODEL_PATH), dtype="float32", max_length=cases.MAX_LENGTH, batch_size=8, **SIZES
    )
    yield model
    model._llm.close()


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def assert_near(model: JPagedLM, found: Any, stored: Any, text: str) -> None:
    """Log-probabilities within 1e-4 a token, flags and texts equal."""
    assert type(found) is type(stored)
    if isinstance(found, list):
        for a, b in zip(found, stored, strict=True):
            assert_near(model, a, b, text)
    elif isinstance(found, float):
        assert abs(found - stored) <= A_TOKEN * max(len(model.tok_encode(text)), 1)
    else:
        assert found == stored


def test_pairs(model: JPagedLM, monkeypatch: pytest.MonkeyPatch):
    """Empty contexts, requests past max_length, spaces at the end of the context; a few at a
    time.
    """
    monkeypatch.setattr("jpaged.integrations.lm_eval.SCORED_AT_ONCE", 3)
    answers = model.loglikelihood(instances("loglikelihood", cases.PAIRS), disable_tqdm=True)
    lengths = [
        len(model.tok_encode(context + continuation)) for context, continuation in cases.PAIRS
    ]
    assert max(lengths) > cases.MAX_LENGTH + 1
    for answer, stored, (_, continuation) in zip(
        answers, STORED["pairs"], cases.PAIRS, strict=True
    ):
        assert_near(model, list(answer), stored, continuation)
    assert any(
        greedy for sample in STORED["tasks"]["jpaged_choice"]["answers"] for [[_, greedy]] in sample
    )


def plain(found: Any) -> Any:
    return [plain(x) for x in found] if isinstance(found, list | tuple) else found


def test_tasks(model: JPagedLM, tmp_path: Path):
    names = cases.write_tasks(tmp_path)
    assert set(names) == set(STORED["tasks"]) == set(cases.TASKS)
    found = lm_eval.simple_evaluate(
        model, tasks=names, task_manager=TaskManager(include_path=str(tmp_path)), bootstrap_iters=0
    )
    assert found is not None
    for name in names:
        stored = STORED["tasks"][name]
        samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        for sample, answers in zip(samples, stored["answers"], strict=True):
            text = sample["doc"].get("text") or sample["doc"]["a"] + sample["doc"]["b"]
            assert_near(model, plain(sample["resps"]), answers, text)
        for metric, value in stored["metrics"].items():
            assert found["results"][name][metric] == pytest.approx(value, rel=1e-4)


def test_command_line(tmp_path: Path):
    """`python -m jpaged.integrations.lm_eval --model jpaged` on one of the tasks."""
    cases.write_tasks(tmp_path)
    sizes = ",".join(
        f"{name}={size}"
        for name, size in {"max_length": 64, "num_blocks": 64, "max_num_batched_tokens": 64}.items()
    )
    command = [
        sys.executable,
        "-m",
        "jpaged.integrations.lm_eval",
        "--model",
        "jpaged",
        "--include_path",
        str(tmp_path),
        "--model_args",
        f"pretrained={MODEL_PATH},dtype=float32,{sizes}",
        "--tasks",
        "jpaged_choice",
        "--output_path",
        str(tmp_path / "out"),
        "--batch_size",
        "8",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(results.read_text())["results"]["jpaged_choice"]
    assert found["acc,none"] == STORED["tasks"]["jpaged_choice"]["metrics"]["acc,none"]


def test_generate_until_follows_its_arguments(model: JPagedLM):
    kwargs = {"until": ["\n"], "max_gen_toks": 6}
    short, sampled, again = model.generate_until(
        instances(
            "generate_until",
            [
                ("import os\n", {**kwargs, "max_gen_toks": 2}),
                ("import os\n", {**kwargs, "do_sample": True, "temperature": 1.5, "seed": 3}),
                ("import os\n", {**kwargs, "do_sample": True, "temperature": 1.5, "seed": 3}),
            ],
        ),
        disable_tqdm=True,
    )
    assert len(model.tok_encode(short)) <= 2 and sampled == again and "\n" not in sampled
    with pytest.raises(RequestError, match="num_beams=4: supported are temperature"):
        model.generate_until(
            instances("generate_until", [("x", {"num_beams": 4, "max_gen_toks": 4})]),
            disable_tqdm=True,
        )
    with pytest.raises(RequestError, match=r"max_gen_toks=64: must be .* below max_length=64"):
        model.generate_until(
            instances("generate_until", [("x", {"max_gen_toks": 64})]), disable_tqdm=True
        )


def test_new_weights(tmp_path: Path):
    """As Params, as a dict and as a folder: answers are those of a model made of them, without a
    compile; weights of another architecture are refused and the last ones stay.
    """
    old = jpaged.load_params(MODEL_PATH, dtype="float32")
    new = jax.tree.map(lambda x: x * 1.02, old)
    jpaged.save_params(new, tmp_path / "new")
    how: dict[str, Any] = {"max_length": 64, "batch_size": 8, **SIZES}
    tokenizer = load_tokenizer(MODEL_PATH)
    pairs = instances("loglikelihood", [("import", " os"), ("def f(x):", " return x")])

    def answers(model: JPagedLM) -> Any:
        return model.loglikelihood(pairs, disable_tqdm=True)

    model, other = (JPagedLM(p, tokenizer=tokenizer, **how) for p in (old, new))
    first, second = answers(model), answers(other)
    assert abs(first[0][0] - second[0][0]) > 1e-3
    for form in (new, dict(new), str(tmp_path / "new")):
        model.update_params(old)
        np.testing.assert_allclose(answers(model), first, atol=A_TOKEN)
        with tiny.compiles() as names:
            model.update_params(form)
            found = answers(model)
        assert not {*tiny.STEPS} & {*names}
        np.testing.assert_allclose(found, second, atol=A_TOKEN)
    with pytest.raises(ConfigError, match="params of another architecture"):
        model.update_params(tiny.make_params())
    np.testing.assert_allclose(answers(model), second, atol=A_TOKEN)
    for each in (model, other):
        each._llm.close()


def test_a_policy_in_training(tmp_path: Path):
    """Weights of a trainer, never written to a folder: lm-eval's own evaluator sees each version of
    them, through a JPagedLM of arrays and through one on the LLM that draws the rollouts, and
    nothing compiles again.
    """
    (choice, *_), stored = cases.write_tasks(tmp_path), STORED["tasks"]["jpaged_choice"]
    tasks = TaskManager(include_path=str(tmp_path))
    loaded = jpaged.load_params(MODEL_PATH, dtype="float32")
    live: dict[str, Any] = dict(loaded)
    noise = jax.tree.map(
        lambda x: x + 0.02 * np.random.default_rng(0).standard_normal(x.shape, np.float32), live
    )
    tokenizer, config = load_tokenizer(MODEL_PATH), loaded.config
    of_arrays = JPagedLM(
        config, params=live, tokenizer=tokenizer, max_length=64, batch_size=8, **SIZES
    )
    rollouts = jpaged.LLM(
        config, params=live, tokenizer=tokenizer, max_model_len=65, max_num_seqs=8, **SIZES
    )
    models = {"arrays": of_arrays, "the trainer's LLM": JPagedLM(rollouts)}

    def evaluated(model: JPagedLM) -> dict[str, Any]:
        found = lm_eval.simple_evaluate(
            model, tasks=[choice], task_manager=tasks, bootstrap_iters=0
        )
        assert found is not None
        samples = sorted(found["samples"][choice], key=lambda sample: sample["doc_id"])
        return {
            "acc": found["results"][choice]["acc,none"],
            "logprobs": [[float(answer[0]) for [answer] in s["resps"]] for s in samples],
        }

    found = {name: evaluated(model) for name, model in models.items()}
    for each in found.values():
        assert each["acc"] == stored["metrics"]["acc,none"]
    of_arrays.update_params(noise)
    rollouts.update_params(noise)  # the trainer's own sync is enough
    with tiny.compiles() as names:
        trained = {name: evaluated(model) for name, model in models.items()}
    assert not {*tiny.STEPS} & {*names}
    first, second = trained.values()
    np.testing.assert_allclose(first["logprobs"], second["logprobs"], atol=A_TOKEN)
    before = found["arrays"]["logprobs"]
    assert np.abs(np.subtract(first["logprobs"], before)).max() > 0.1
    assert len(rollouts.generate(["import"], jpaged.SamplingParams(max_tokens=2))) == 1
    with pytest.raises(ConfigError, match="'num_blocks': an LLM that is made has its settings"):
        JPagedLM(rollouts, num_blocks=64)
    with pytest.raises(ConfigError, match="max_length=65: must be between 1 and the model's 64"):
        JPagedLM(rollouts, max_length=65)
    for llm in (of_arrays._llm, rollouts):
        llm.close()


def test_what_cannot_be_scored_is_refused(model: JPagedLM):
    with pytest.raises(RequestError, match=r"request 0: .* 1 and 65 tokens"):
        model._loglikelihood_tokens([(None, [5], [6] * 65)])
    with pytest.raises(RequestError, match=r"request 1: .* 1 and 0 tokens"):
        model._loglikelihood_tokens([(None, [5], [6]), (None, [5], [])])
    assert model._loglikelihood_tokens([]) == [] and model.loglikelihood_rolling([]) == []


def test_tokenizer_side(model: JPagedLM):
    eos = model.tokenizer.eos_token_id
    assert model.eot_token_id == model.prefix_token_id == eos
    assert model.tok_encode("import os", left_truncate_len=1) == model.tok_encode("import os")[-1:]
    assert model.tok_decode(model.tok_encode("import os")) == "import os"
    chat = model.apply_chat_template([{"role": "user", "content": "Write a stack."}])
    assert "Write a stack." in chat and chat == model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write a stack."}], tokenize=False, add_generation_prompt=True
    )
    assert model.chat_template(True) == model.tokenizer.chat_template


def test_bad_settings_are_refused():
    with pytest.raises(
        ConfigError, match="max_length=5000: must be between 1 and the model's 1024"
    ):
        JPagedLM(str(MODEL_PATH), max_length=5000)
    with pytest.raises(ConfigError, match="device='tpu': jax runs on 'cpu' here"):
        JPagedLM(str(MODEL_PATH), device="tpu")
    with pytest.raises(ConfigError, match="'trust_remote_code' is not a setting"):
        JPagedLM(str(MODEL_PATH), trust_remote_code=True)
