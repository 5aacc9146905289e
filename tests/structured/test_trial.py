"""Forms that would take a server's time, memory or life while they are compiled: told in time."""

import gc
import itertools
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jpaged import ConfigError, RequestError
from jpaged.structured import spec, trial
from jpaged.structured.grammars import LIMITS, Grammars
from jpaged.structured.trial import Trial
from tests.byte_tokenizer import EOS, make_tokenizer

pytest.importorskip("llguidance")

SLOW: dict[str, Any] = {"json_schema": {"type": "integer", "multipleOf": 1_000_003}}
TAME: dict[str, Any] = {"json_schema": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}}


def chain(length: int) -> dict[str, Any]:
    """References to references: each is short, and following them takes a stack as long."""
    names = [f"d{i}" for i in range(length)]
    defs = {a: {"$ref": f"#/$defs/{b}"} for a, b in itertools.pairwise(names)}
    return {"$defs": {**defs, names[-1]: {"type": "null"}}, "$ref": "#/$defs/d0"}


def rules(length: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(length)) + f'r{length}: "a"'


KILLERS: list[dict[str, Any]] = [
    SLOW,
    {"json_schema": '{"type": "integer", "multiple\\u004ff": 1000003}'},
    {"json_schema": chain(20_000 // 4)},
    {"grammar": rules(10_000)},
    {"regex": "a?" * 30_000},
]


def ends(form: dict[str, Any], trial: Trial) -> bool:
    return trial.ends(spec.kind_of(form), spec.grammar_of(form))


def make_grammars() -> Grammars:
    tokenizer = make_tokenizer()
    return Grammars(tokenizer, len(tokenizer), frozenset({EOS}))


def test_what_does_not_end_is_told_and_the_next_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST_SECONDS", 1)
    tried = Trial(LIMITS)
    assert ends(TAME, tried)
    for form in KILLERS:
        began = time.perf_counter()
        assert not ends(form, tried), form
        assert ends(TAME, tried)
        assert time.perf_counter() - began < 60
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda form: ends(form, tried), [TAME, KILLERS[3], TAME, TAME] * 2)
        assert [*found] == [True, False, True, True] * 2


def test_only_what_may_not_end_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is started for the first of those, and ends with the object."""
    tried = Trial(LIMITS)
    for form in (
        {"choice": ["a", "b"]},
        {"json_object": True},
        {"json_schema": {"type": "object", "properties": {"a": {"enum": [1, "x"]}}}},
    ):
        assert ends(form, tried)
    assert tried._process is None
    assert ends({"choice": [f"{i} times" for i in range(2000)]}, tried)
    process = tried._process
    assert process is not None and process.poll() is None
    process.kill()
    process.wait()
    assert ends(TAME, tried)  # by another
    process = tried._process
    assert process is not None and process.poll() is None
    del tried
    gc.collect()
    assert process.poll() is not None
    monkeypatch.setattr(trial.sys, "executable", "/bin/true")
    with pytest.raises(ConfigError, match=r"/bin/true cannot run .*trial_process"):
        ends(TAME, Trial(LIMITS))


def test_a_refusal_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the request told why, each time anew."""
    monkeypatch.setattr(trial, "MOST_SECONDS", 1)
    grammars = make_grammars()
    errors = []
    for _ in range(2):
        with pytest.raises(RequestError, match=r"json_schema: takes more than .* to compile") as e:
            grammars.matcher(SLOW)
        errors.append(e.value)
        monkeypatch.setattr(subprocess, "Popen", None)
        monkeypatch.setattr(Trial, "ends", None)
    assert errors[0] is not errors[1]
    with pytest.raises(RequestError, match="400009 characters are above 250000"):
        grammars.matcher({"json_schema": json.dumps({"const": "a" * 400_000})[:400_009]})
