"""Help, errors and suggestions of the command lines."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest

from jpaged import EngineConfig
from jpaged.command_line import Parser
from jpaged.flags import ENGINE_GROUPS

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "scripts").glob("*.py")
    if "Parser(" in path.read_text() or "make_parser(" in path.read_text()
)


def make_parser() -> Parser:
    parser = Parser("program", "What it does.", flags="[--most-used N]")
    parser.add_argument("source")
    parser.add_argument("rest", nargs="*")
    add = parser.add_argument_group("sizes").add_argument
    add("--max-tokens", type=int, default=16, help="tokens to generate")
    add("--sizes", nargs="+", type=int, default=[1, 2])
    add("--label", help="a name (default: none)")
    add("--output", required=True)
    return parser


def help_of(main: Any, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def refused(main: Any, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code in (1, 2)
    return capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(make_parser().parse_args, capsys)
    lines = text.splitlines()
    assert lines[:4] == [
        "usage: program SOURCE [REST ...] --output OUTPUT [--most-used N] [FLAGS]",
        "       program --help lists the flags",
        "",
        "What it does.",
    ]
    assert "\nsizes:\n" in text
    assert "tokens to generate (default: 16)" in text and "(default: 1 2)" in text
    assert text.count("(default: none)") == 1


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--max-token", "unknown argument --max-token: did you mean --max-tokens?"),
        ("--max_tokens=3", "unknown argument --max_tokens: did you mean --max-tokens?"),
        ("--outptu", "unknown argument --outptu: did you mean --output?"),
        ("--xyzzy", "unknown argument --xyzzy"),
    ],
)
def test_near_misses(argument: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["source", "--output", "x", argument, "5"]
    error = refused(make_parser().parse_args, argv, capsys)
    assert error.splitlines()[-1] == f"program: {sentence}"
    assert error.count("\n") == 3  # the usage, which is two lines, and the sentence


def test_arguments_that_are_known_arrive() -> None:
    args = make_parser().parse_args(["in", "a", "b", "--output", "x", "--max-tokens", "5"])
    assert (args.source, args.rest, args.output, args.max_tokens) == ("in", ["a", "b"], "x", 5)


def test_serve(capsys: pytest.CaptureFixture[str]) -> None:
    from jpaged.openai.server.run import main

    text = help_of(main, capsys)
    assert text.startswith(
        "usage: jpaged serve [MODEL] [--host ADDRESS] [--port N] [--api-key KEY] [FLAGS]\n"
        "       jpaged serve --help lists the flags\n"
    )
    for title in ("address and keys", "model", "requests: limits and forms", *ENGINE_GROUPS):
        assert f"\n{title}:\n" in text
    error = refused(main, ["--max-num-seq", "4"], capsys)
    assert error.endswith("unknown argument --max-num-seq: did you mean --max-num-seqs?\n")


def test_serve_batch(capsys: pytest.CaptureFixture[str]) -> None:
    import serve_batch

    text = help_of(serve_batch.main, capsys)
    assert text.startswith(
        "usage: serve_batch [INPUT] [--model DIR] [--output FILE] [--resume] [FLAGS]\n"
        "       serve_batch --help lists the flags\n"
    )
    assert all(f"\n{title}:\n" in text for title in ENGINE_GROUPS)
    error = refused(serve_batch.main, ["in.jsonl", "--max-token", "4"], capsys)
    assert error == (
        "serve_batch: unknown argument --max-token: did you mean --max-tokens? "
        "(serve_batch --help lists the flags)\n"
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every script has the usage of two lines and suggests a flag."""
    if name.startswith("_"):
        return
    main = importlib.import_module(name).main
    lines = help_of(main, capsys).splitlines()
    assert lines[0].startswith("usage: ") and lines[0].endswith("[FLAGS]")
    assert lines[1].endswith("--help lists the flags") and lines[2] == ""
    assert "did you mean --help?" in refused(main, ["--hlep"], capsys)


def test_every_engine_field_is_in_one_group() -> None:
    names = [name for names in ENGINE_GROUPS.values() for name in names]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(EngineConfig))
