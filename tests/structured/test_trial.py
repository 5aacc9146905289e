"""Forms that would take a server's time, memory or life while they are compiled: told in time."""

import gc
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jpaged import ConfigError, RequestError
from jpaged.structured import spec, trial
from jpaged.structured.grammars import LIMITS, Grammars
from jpaged.structured.trial import Trial
from tests.batch_engine import ROOT
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
    return trial.judge(spec.kind_of(form), spec.grammar_of(form)).refusal is None


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
    assert ends({"choice": [f"{i} times" for i in range(1500)]}, tried)
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


UNDER_LIMITS = """
import resource, sys
from jpaged.structured import trial
from tests.structured.test_trial import make_grammars, rules
trial.MOST_SECONDS = int(sys.argv[3])
grammars = make_grammars()
most = int(sys.argv[2])
resource.setrlimit(getattr(resource, sys.argv[1]), (most, most))
processes = set()
for i in range(4):
    grammars.matcher({"regex": "[ab]{%d}" % (i + 1)})
    processes.add(grammars._trial._process)
print(len(processes))
try:
    grammars.matcher({"grammar": rules(10_000)})
except Exception as e:
    print(e)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets limits of Linux")
@pytest.mark.parametrize(
    ("kind", "most", "seconds", "count"),
    [
        ("RLIMIT_CPU", 100, 5, 1),
        ("RLIMIT_CPU", 100, 99, 4),  # another process tries each form: one leaves too little
        ("RLIMIT_AS", 900 << 20, 5, 1),
    ],
)
def test_hard_limits_of_the_process_that_serves(
    kind: str, most: int, seconds: int, count: int
) -> None:
    """`ulimit -t` and its like, which no process may raise, refuse no form that is well."""
    done = subprocess.run(
        [sys.executable, "-c", UNDER_LIMITS, kind, str(most), str(seconds)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    processes, said = done.stdout.splitlines()
    assert int(processes) == count, done.stderr
    assert said == "structured: grammar: takes more than a thread's stack or 1 GiB to compile"


def test_what_a_form_took_too_much_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the limit that was met."""
    monkeypatch.setattr(trial, "MOST_SECONDS", 1)
    tried = Trial(LIMITS)
    verdict = tried.judge("json_schema", spec.grammar_of(SLOW))
    assert verdict.refusal == "takes more than 1 s of a processor to compile"
    limit = resource.getrlimit(resource.RLIMIT_CPU)
    monkeypatch.setattr(trial.resource, "getrlimit", lambda kind: (7, 7))
    assert trial._why_it_ended(-signal.SIGKILL).endswith("this process's limit of 7 s leaves")
    monkeypatch.setattr(trial.resource, "getrlimit", lambda kind: (limit[0], -1))
    assert "stack or 1 GiB" in trial._why_it_ended(-signal.SIGKILL)


def test_a_special_token_hides_nothing_from_the_trial() -> None:
    """A form that names one of the model is tried as any other."""
    grammars = make_grammars()
    assert grammars.matcher({"grammar": 'start: "a" <end>'})
    with pytest.raises(RequestError, match=r"grammar: takes more than .* to compile"):
        grammars.matcher({"grammar": rules(10_000).replace("start:", "start: <end>")})
    with pytest.raises(RequestError, match="unknown special token"):
        grammars.matcher({"grammar": 'start: "a" <other>'})


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
        monkeypatch.setattr(Trial, "judge", None)
    assert errors[0] is not errors[1]
    with pytest.raises(RequestError, match="400009 characters are above 250000"):
        grammars.matcher({"json_schema": json.dumps({"const": "a" * 400_000})[:400_009]})


def test_equal_forms_that_come_at_once_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request of a form has come before the first has its verdict: all wait for that."""
    tried: list[str] = []
    everyone = threading.Barrier(4)

    def judge(self: Trial, kind: str, text: str) -> trial.Verdict:
        tried.append(text)
        time.sleep(0.2)  # the others reach the lock meanwhile
        return trial.Verdict("takes too long", 0)

    monkeypatch.setattr(Trial, "judge", judge)
    grammars = make_grammars()

    def ask(form: dict[str, Any]) -> str:
        everyone.wait()
        with pytest.raises(RequestError, match="takes too long") as e:
            grammars.matcher(form)
        return str(e.value)

    with ThreadPoolExecutor(4) as threads:
        errors = list(threads.map(ask, [SLOW, TAME, SLOW, SLOW]))
    assert len(errors) == 4
    assert sorted(tried) == sorted(map(spec.grammar_of, [SLOW, TAME]))
