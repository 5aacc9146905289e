"""Memory that forms take: of the process that serves them, as the system counts it, and of the one
that tries them.
"""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jpaged.errors import RequestError
from jpaged.structured import grammars as module
from jpaged.structured.grammars import BYTES_A_MASK, LIMITS, Grammars, Matcher
from jpaged.structured.trial import MOST_BYTES
from tests.batch_engine import ROOT
from tests.byte_tokenizer import EOS, make_tokenizer

pytest.importorskip("llguidance")

BOMBS = 8
# Each took 155 MB, which stayed with the form. LATE unfolds after more tokens than a trial makes.
SCRIPT = """
import sys
from pathlib import Path
from tests.structured.test_form_memory import answered, make_grammars

def held(pid="self", name="VmRSS"):
    return int(Path(f"/proc/{pid}/status").read_text().split(name + ":")[1].split()[0]) << 10

grammars = make_grammars()
assert answered(grammars, {"regex": "[ab]{3}"}, "aaa") is None
before, said = held(), set()
for i in range(%d):
    bomb = "((((a{100}){100}){100}){%%d})" %% (100 + i)
    said.add(answered(grammars, {"regex": sys.argv[1] + bomb}, sys.argv[1] + "a"))
print(held() - before, held(grammars._trial._process.pid, "VmHWM"), len(grammars._kept))
print(*said, sep="|")
"""


def make_grammars() -> Grammars:
    tokenizer = make_tokenizer()
    return Grammars(tokenizer, len(tokenizer), frozenset({EOS}))


def mask_of(matcher: Matcher) -> set[int]:
    """The tokens that may come next."""
    grammars = matcher.grammars
    mask_SW = np.zeros((1, grammars.words), np.int32)
    grammars.fill([(matcher, 0)], mask_SW)
    bits = np.unpackbits(mask_SW.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def answered(grammars: Grammars, form: dict[str, Any], text: str) -> str | None:
    """What is wrong with an answer of this form that begins so, as the engine would find it."""
    try:
        matcher = grammars.matcher(form)
    except RequestError as e:
        return str(e)
    tokens = make_tokenizer().encode(text)
    for count, token in enumerate(tokens):
        mask_of(matcher)
        if matcher.error is not None and not matcher.renew(tokens[:count]):
            return matcher.error
        matcher.push(token)
    mask_of(matcher)
    if matcher.error is not None and not matcher.renew(tokens):
        return matcher.error
    return matcher.error


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("start", ["", "bbbbbbbbbbbb"])
def test_forms_that_unfold_leave_nothing(start: str) -> None:
    """Refused when they are tried; where that finds nothing, an error when they unfold. Either way
    no form is left of them.
    """
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT % BOMBS, start],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    figures, said = done.stdout.splitlines()
    grown, tried, kept = map(int, figures.split())
    assert "too many" in said and "None" not in said
    assert grown < 120 << 20, f"{grown >> 20} MiB more than before"
    assert tried < MOST_BYTES
    assert kept == 1, "of the form that was asked for first"


def test_the_cache_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is used much grows, and goes first; what is used again is compiled again."""
    monkeypatch.setattr(module, "KEPT_BYTES", 40 * BYTES_A_MASK)
    grammars = make_grammars()
    small, large = {"regex": "[ab]{3}"}, {"regex": "[ab]{300}"}
    kept = grammars.matcher(small)
    used = grammars.matcher(large)
    assert grammars.kept_bytes > 0 and len(grammars._kept) == 2
    measured = used.form.tried_bytes
    assert 1000 < measured < 10 << 20
    for _ in range(50):
        assert mask_of(used)
        assert grammars.kept_bytes <= module.KEPT_BYTES
    assert [*grammars._kept.values()] == [kept.form]
    again = grammars.matcher(large)
    assert again.form is not used.form and again.form.tried_bytes == measured
    assert mask_of(used) == mask_of(again), "a row keeps the form that it is in"


def test_a_refusal_keeps_no_form() -> None:
    grammars = make_grammars()
    for i in range(3):
        with pytest.raises(RequestError, match="regex: lexer error: too many expressions"):
            grammars.matcher({"regex": f"((((a{{100}}){{100}}){{100}}){{{90 + i}}})"})
    with pytest.raises(RequestError, match=r"grammar: .*unknown name"):
        grammars.matcher({"grammar": "start: nothing"})
    assert not grammars._kept and len(grammars._judged) == 4
    process = grammars._trial._process
    with pytest.raises(RequestError, match="too many expressions"):
        grammars.matcher({"regex": "((((a{100}){100}){100}){90})"})
    assert grammars._trial._process is process


def test_a_lexer_that_others_have_filled_fails_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lexer has so many states for all rows in it: what a row may draw depends on it alone."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 3000)
    form, letters = {"regex": "(a|b)*a(a|b){20}"}, np.random.default_rng(0)
    texts = ["".join(letters.choice(["a", "b"], 60)) for _ in range(40)]
    alone = [answered(make_grammars(), form, text) for text in texts[-3:]]
    assert alone == [None] * 3
    grammars = make_grammars()
    first = grammars.matcher(form).form
    assert [answered(grammars, form, text) for text in texts] == [None] * len(texts)
    assert grammars._kept and first not in grammars._kept.values(), "its lexer was full"
    ids = make_tokenizer().encode("a" * 21)
    full = Matcher(grammars, first, first.compiled.deep_copy())
    assert full.scoring(0, ids, 0).error is None
