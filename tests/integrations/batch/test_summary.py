"""What a run says of itself at its end: which limits cut answers off, what compiled, and what
failed in the runs that it goes on with.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jpaged.integrations.batch import progress
from jpaged.integrations.batch.stats import BatchStats
from tests.batch_engine import FakeLLM, serve

LONG = "x" * 100  # above the context of FakeLLM


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "flags", "said"),
    [
        ([{"prompt": "abcd", "max_tokens": 2}], [], "raise the max_tokens of the lines themselves"),
        (
            [{"prompt": "abcd", "max_tokens": 2}],
            ["--max-tokens", "9"],
            "raise the max_tokens of the lines themselves",
        ),
        ([{"prompt": "abcd"}], ["--max-tokens", "2"], "raise --max-tokens"),
        (
            [{"prompt": "abcd", "max_tokens": 2}, {"prompt": "abcd", "n": 3}],
            ["--max-tokens", "2"],
            "raise --max-tokens (3 answers), the max_tokens of the lines themselves (1 answers)",
        ),
        (
            [
                {
                    "custom_id": "a",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": {
                        "messages": [{"role": "user", "content": "abcd"}],
                        "max_completion_tokens": 2,
                    },
                }
            ],
            ["--max-tokens", "9"],
            "raise the max_tokens of the lines themselves",
        ),
    ],
)
def test_advice_names_the_limit_that_was_met(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: list[Any],
    flags: list[str],
    said: str,
) -> None:
    source = write(tmp_path / "in.jsonl", *lines)
    assert serve(source, "--output", tmp_path / "out.jsonl", *flags) == 0
    [warning] = [x for x in capsys.readouterr().out.splitlines() if x.startswith("warning: ")]
    assert warning.endswith(f"(finish_reason 'length'): {said}")


def test_advice_where_the_context_was_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is shorter than its max_tokens met the end of the context."""
    answer = FakeLLM.answer

    def cut(self: Any) -> Any:
        output = answer(self)
        for done in output.outputs:
            done.finish_reason = "length"
        return output

    monkeypatch.setattr(FakeLLM, "answer", cut)
    source = write(tmp_path / "in.jsonl", {"prompt": "abcd", "max_tokens": 9})
    assert serve(source, "--output", tmp_path / "out.jsonl", "--max-tokens", "3") == 0
    assert "(finish_reason 'length'): raise --max-model-len\n" in capsys.readouterr().out


def test_compiling_is_no_share_of_the_time() -> None:
    """Steps compile beside each other: together they may take longer than the run."""
    stats = BatchStats()
    stats.began, stats.ended = 0.0, 4.0
    stats.engine = {"num_compiles": 3, "compile_time_s": 5.8}
    assert "compiled     3 steps, 5.8 s of work in all" in stats.table()


@pytest.mark.parametrize("style", ["openai", "vllm"])
def test_a_finished_run_that_is_resumed_names_its_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], style: str
) -> None:
    request = {"custom_id": "d", "method": "POST", "url": "/v1/completions"}
    long = {**request, "body": {"prompt": LONG}}
    lines = [{"prompt": "a"}, "{torn", {"prompt": LONG}, *["{torn"] * 6, long]
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    command = [source, "--output", output, "--error-style", style]
    assert serve(*command) == 2
    capsys.readouterr()
    llm = FakeLLM()
    assert serve(*command, "--resume", "--report", tmp_path / "page.html", llm=llm) == 2
    out = capsys.readouterr().out
    assert not llm.added
    assert "earlier      10 (1 ok, 9 failed)\n" in out
    assert "7 invalid_json (line 2, 4, 5, 6, 7, ...); " in out
    both = "2 context_length_exceeded (line 3, 10)"
    apart = ("1 context_length_exceeded (line 3)", "1 400 (line 10)")  # as vLLM writes codes
    assert all(said in out for said in ([both] if style == "openai" else apart))
    assert "--retry-failed runs the 9 failed ones again" in out
    assert "tokens " not in out and "0.0 tok/s" not in out
    summary = json.loads((tmp_path / "out.jsonl.summary.json").read_text())
    assert summary["earlier_errors"]["invalid_json"] == {"lines": 7, "first": [2, 4, 5, 6, 7]}
    assert "in an earlier run: line 2, 4, 5, 6, 7, ..." in (tmp_path / "page.html").read_text()


def test_errors_that_were_superseded_are_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path / "in.jsonl", {"prompt": "b"}, "{"), tmp_path / "out.jsonl"
    command = [source, "--output", output]
    assert serve(*command, llm=FakeLLM(fail_prompt="B")) == 2
    assert serve(*command, "--resume", "--retry-failed") == 2
    out = capsys.readouterr().out.split("requests ")[-1]
    assert "old errors" not in out and "1 invalid_json (line 2)" in out
    assert serve(*command, "--resume") == 2
    out = capsys.readouterr().out
    assert "old errors   1 invalid_json (line 2)\n" in out and "generation_failed" not in out


def test_a_finished_run_without_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path / "in.jsonl", {"prompt": "b"}), tmp_path / "out.jsonl"
    for flags in ([], ["--resume"]):
        assert serve(source, "--output", output, *flags) == 0
    out = capsys.readouterr().out
    assert out.endswith("no line was run: all lines have a row already\n")


def test_progress_names_the_kinds_of_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines, tokens a second and the time left stand beside them; earlier runs count too."""
    monkeypatch.setattr(progress, "LINES_EVERY_S", 0.0)
    good = [{"prompt": "abcd"}] * 4
    source = write(tmp_path / "in.jsonl", "{", "{", {"prompt": LONG}, *good)
    assert serve(source, "--output", tmp_path / "out.jsonl", "--max-tokens", 2, "--window", 1) == 2
    shown = capsys.readouterr().err.splitlines()
    kinds = r"3 failed \(2 invalid_json, 1 context_length_exceeded\)"
    last = rf"\[\d+ s\] [5-7]/~?7 done, {kinds}, \d+ tok/s in, \d+ out, cache \d+%, \d+s left"
    assert any(re.fullmatch(last, line) for line in shown), shown
    stats = BatchStats(errors=Counter(a=5, b=4, c=3, d=2), failed=14)
    stats.earlier_errors, stats.earlier_failed = {"d": (9, [1]), "e": (1, [2])}, 10
    assert progress.failures(stats) == "24 failed (11 d, 5 a, 4 b, 4 others)"
    assert progress.failures(BatchStats()) == "0 failed"
