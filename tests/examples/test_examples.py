"""The examples run and do what they say."""

import contextlib
import importlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jpaged
from tests.tiny import compiles

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports one by name, as `python examples/NAME.py` would find it and those that it imports."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    jpaged.release(compiled=True)


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("x = ", "1 + 2\nnever looked at (", 1.0),
        ("for name in ", "names:\n", 1.0),  # a header without its body
        ("x = ", "1 +\n", 0.0),
        ("x = ", "'\0'\n", 0.0),
        ("x = ", "1", 0.5),
    ],
)
def test_grpo_reward(example: Any, prompt: str, completion: str, expected: float) -> None:
    assert example("grpo").reward(prompt, completion) == expected


@pytest.mark.own_steps
@pytest.mark.train
def test_grpo(example: Any, tmp_path: Path) -> None:
    """A few updates: records, no compile once warm, a plot; that the reward rises is the slow
    test's.
    """
    grpo = example("grpo")
    history = grpo.train(grpo.Settings(updates=4, samples=2, max_tokens=6))
    assert [record["update"] for record in history] == [0, 1, 2, 3]
    assert history[0]["compiles"] > 0 and history[-1]["compiles"] == 0
    assert all(0 <= record["reward"] <= 1 and np.isfinite(record["loss"]) for record in history)
    grpo.plot(history, tmp_path / "rewards.png")
    assert (tmp_path / "rewards.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.own_steps
@pytest.mark.train
def test_grpo_lora(example: Any) -> None:
    """Adapters are served as trained: no compile once warm, and the policy moves off the base."""
    settings = example("grpo").Settings(updates=4, samples=2, max_tokens=6, learning_rate=1e-2)
    history = example("grpo_lora").train(settings, rank=2)
    assert history[0]["compiles"] > 0 and history[-1]["compiles"] == 0
    assert abs(history[0]["moved"]) < 1e-5 and history[-1]["moved"] != 0
    assert all(0 <= record["reward"] <= 1 and np.isfinite(record["loss"]) for record in history)


@pytest.mark.slow
@pytest.mark.train
def test_grpo_learns(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = example("grpo").main(["--updates", "30", "--json", str(tmp_path / "run.jsonl")])
    rewards = [
        json.loads(line)["reward"] for line in (tmp_path / "run.jsonl").read_text().splitlines()
    ]
    assert rewards == [record["reward"] for record in history]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15
    assert "mean reward of the first" in capsys.readouterr().out


@pytest.mark.own_steps
@pytest.mark.train
def test_distill(example: Any) -> None:
    """The student comes nearer to its teacher on its own text; nothing compiles once warm."""
    module, compiled = example("distill"), list[int]()
    score = jpaged.score
    with pytest.MonkeyPatch.context() as patch, compiles() as names:

        def counted(*args: Any, **options: Any) -> Any:
            compiled.append(len(names))
            return score(*args, **options)

        patch.setattr(jpaged, "score", counted)
        history = module.distill(6)
    # By the second score all of the first update has been compiled.
    assert 0 < compiled[0] < compiled[1] == compiled[-1] == len(names)
    assert len(history) == 6 and history[-1] < 0.8 * history[0]


@pytest.mark.slow
@pytest.mark.own_steps
@pytest.mark.train
def test_grpo_on_an_own_model(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module computes what is served, it learns, and nothing compiles once warm."""
    module = example("grpo_nnx")
    model, _ = module.make()
    (tokens,) = module.prompts_of(1, 0)
    tokens = tokens * 4
    served = jpaged.score(module.served(model), [tokens], engine_config=module.ENGINE)[0]
    dense = jax.nn.log_softmax(model(np.array([tokens])))[0]
    want = np.take_along_axis(np.asarray(dense)[:-1], np.array(tokens)[1:, None], axis=1)
    np.testing.assert_allclose(served, want[:, 0], atol=1e-5)
    counts = counted(module, monkeypatch)
    with compiles() as names:
        counts.names = names
        history = module.train(12)
    assert np.mean(history[-3:]) > np.mean(history[:3]) + 0.2
    assert 0 < counts[0] < counts[1] == counts[-1] == len(names)


@pytest.mark.slow
@pytest.mark.own_steps
@pytest.mark.train
def test_asynchronous_grpo(example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It learns while tokens are of older weights than those that are trained, by an update or a
    few; nothing compiles once warm; the synchronous loop has no lag.
    """
    module = example("grpo_async")
    counts = counted(module, monkeypatch)
    with compiles() as names:
        counts.names = names
        history = module.train(16)
    assert 0 < counts[0] < counts[1] == counts[-1] == len(names)
    rewards = [record["reward"] for record in history]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.15
    assert history[0]["most_lag"] == 0 < max(record["lag"] for record in history)
    module.plot({"synchronous": [history], "asynchronous": [history]}, tmp_path / "async.png")
    assert (tmp_path / "async.png").read_bytes()[:4] == b"\x89PNG"
    assert module.seconds_to(history, 2.0) == float("inf")
    assert module.seconds_to(history, 0.0) == history[4]["seconds"]
    plain = module.train(2, ahead=0)
    assert [record["most_lag"] for record in plain] == [0, 0]


class Counts(list[int]):
    """How many functions were compiled before each update. names: those compiled so far."""

    names: list[str]


def counted(module: Any, monkeypatch: pytest.MonkeyPatch, name: str = "update") -> Counts:
    """Have a function of a module count."""
    counts, update = Counts(), getattr(module, name)

    def counting(*args: Any) -> Any:
        counts.append(len(counts.names))
        return update(*args)

    monkeypatch.setattr(module, name, counting)
    return counts


def test_best_of_n(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """More samples never pass less often, since the first k are among the first 2k."""
    passed = example("best_of_n").main(["-n", "8"])
    assert list(passed) == [1, 2, 4, 8] and list(passed.values()) == sorted(passed.values())
    assert passed[8] > passed[1]
    said = re.search(r"computed: (\d+), by one request a sample: (\d+)", capsys.readouterr().out)
    assert said is not None and int(said[1]) < int(said[2]) // 2


@pytest.mark.train
def test_reward_model(example: Any) -> None:
    """Its head tells samples apart that it has not seen; a toss of a coin would tell a half."""
    shares = example("reward_model").main(["-n", "8", "--labelled", "24"])
    assert 0.1 < shares["an average sample"] < 0.7
    assert shares["pairs told apart"] > 0.65


def test_tree_search(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tree = example("tree_search")
    assert (
        tree.is_prefix("def f(x):\n")
        and tree.is_prefix("if x:\n    y = 1\n")
        and not tree.is_prefix("if (x:\n")
    )
    found = tree.main(["--lines", "2", "--width", "4", "--expansions", "12"])
    assert found and [node.score for node in found] == sorted(
        (node.score for node in found), reverse=True
    )
    for node in found:
        assert node.text.startswith(tree.PROMPT) and node.lines >= 2 and tree.is_prefix(node.text)
    hits = int(capsys.readouterr().out.split("; ")[1].split("%")[0])
    assert hits > 30, "children find their parent's blocks"


def test_quickstart_notebook() -> None:
    """Every cell runs, in order; what is committed holds no outputs."""
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 8 and not any(cell.get("outputs") for cell in notebook["cells"])
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for i, cell in enumerate(cells):
            exec(compile(cell, f"cell {i}", "exec"), names)
    jpaged.release(compiled=True)
    assert "weight version 1 -> 2" in printed.getvalue()
    assert (
        names["arrays"]["completion_ids"].shape == (3, 16) and names["stats"]["decode_tokens"] > 0
    )


def test_structured(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    example("structured").main()
    kinds = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert [kind for kind, _ in kinds] == ["json_schema", "choice", "regex", "grammar"]
    assert all(reason == "stop" for kind, reason in kinds if kind in ("choice", "regex"))


@pytest.mark.own_steps
@pytest.mark.train
def test_a_mixture_learns_by_the_rollouts_routes(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ratios begin nearer to 1 with the routes than without; nothing compiles once warm."""
    module = example("grpo_routes")
    counts = counted(module, monkeypatch, "mismatch")
    with compiles() as names:
        counts.names = names
        history = module.main(["--updates", "6"])
    assert 0 < counts[0] < counts[1] == counts[-1] == len(names)
    rewards = [record["reward"] for record in history]
    assert rewards[-1] > rewards[0] + 0.2
    routes, without = (np.mean([x[name] for x in history]) for name in ("routes", "no_routes"))
    assert 0 < routes < without
    assert capsys.readouterr().out.count("|ratio - 1| with routes") == 6


@pytest.mark.slow
@pytest.mark.own_steps
@pytest.mark.train
def test_a_model_that_sees_learns(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns to name colours that it sees, by a tower that learns too; trainer and rollout agree
    at every update, and nothing compiles once warm.
    """
    history = example("grpo_image").main(["--updates", "60"])
    assert history[0]["compiles"] > 0
    assert all(record["compiles"] == 0 for record in history[2:])
    assert all(record["apart"] < 2e-5 and record["tower"] > 0 for record in history)
    rewards = [record["reward"] for record in history]
    assert np.mean(rewards[-6:]) > np.mean(rewards[:6]) + 0.25
    assert "of the last" in capsys.readouterr().out


@pytest.mark.own_steps
@pytest.mark.train
def test_a_tool_over_several_turns(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It learns to open the box that it was asked for, and to report what it saw there, which no
    dialog did at first; nothing compiles once warm.
    """
    module = example("grpo_tool")
    counts = counted(module, monkeypatch, "play")
    with compiles() as names:
        counts.names = names
        history = module.main(["--updates", "90"])
    assert 0 < counts[0] <= counts[2] == counts[-1] == len(names)
    assert max(history[0][name] for name in ("opened", "told")) < 0.2
    opened, told = (np.mean([x[name] for x in history[-10:]]) for name in ("opened", "told"))
    assert opened > 0.8 and told > 0.5
    assert capsys.readouterr().out.count("opened the right box") == 10
