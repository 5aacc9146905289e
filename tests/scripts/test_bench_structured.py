"""bench_structured: what is read of the official suite, and who judges."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_structured import judged, suite


def test_schemas_of_the_suite(tmp_path: Path) -> None:
    cases = [{"description": "x", "schema": {"enum": [6]}, "tests": []}]
    (tmp_path / "enum.json").write_text(json.dumps([*cases, {"description": "y", "schema": True}]))
    (tmp_path / "other.txt").write_text("no json")
    assert suite(tmp_path) == {"enum: x": {"enum": [6]}, "enum: y": True}


def test_what_becomes_of_documents(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonschema")

    def out(text: str, reason: str = "stop", error: Any = None) -> Any:
        return SimpleNamespace(
            outputs=[SimpleNamespace(text=text, finish_reason=reason)], error=error
        )

    schemas = {"a": {"type": "integer", "multipleOf": 0.0001}, "b": False}
    schemas |= {"c": {"multipleOf": 0.0001}}
    outs = [
        out("6"),
        out("{}"),
        out("{"),
        out("12", "length"),
        out("", "error", ValueError()),
        out("1"),
        out("0.3000"),
        out("0.00005"),
        out("6.0"),
    ]
    found = judged(schemas, ["a", "a", "a", "a", "a", "b", "c", "c", "a"], outs)
    assert found == {
        ("a", "valid"): 2,
        ("c", "valid"): 1,
        ("c", "INVALID"): 1,
        ("a", "INVALID"): 2,
        ("a", "cut off"): 1,
        ("a", "refused"): 1,
        ("b", "INVALID"): 1,
    }
    assert capsys.readouterr().out.count("\n") == 4
