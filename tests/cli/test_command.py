"""The command `jpaged`: what it answers without jax, the help of one screen, near misses, and the
script that completes it in a shell.
"""

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import jpaged
from jpaged.__main__ import COMMANDS, main, parser_of, unknown
from jpaged.flags import OTHER_NAMES

ROOT = Path(__file__).parents[2]
SCREEN = 40  # lines of 80 columns
pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")


@pytest.mark.parametrize("flags", [["--version"], ["--help"], []], ids=str)
def test_it_answers_without_jax(flags: list[str]) -> None:
    """In a process where importing jax, numpy and transformers fails."""
    program = f"""
import sys
for name in ("jax", "jaxlib", "flax", "numpy", "transformers", "pydantic", "starlette"):
    sys.modules[name] = None
sys.argv = ["jpaged", *{flags!r}]
from jpaged.__main__ import main
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == (0 if flags else 2), done.stderr
    text = done.stdout if flags else done.stderr
    if flags == ["--version"]:
        assert text.startswith("jpaged ") and "jax " in text and "Python 3." in text
    else:
        assert text.count("\n") < 24 and all(f"  {name} " in text for name in COMMANDS)


def test_the_public_names_are_those_that_type_checkers_see() -> None:
    """The table from which a name is imported at its first use says what the imports say."""
    tree = ast.parse((ROOT / "jpaged" / "__init__.py").read_text())
    seen = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == jpaged._HOMES and sorted(seen) == sorted(jpaged.__all__)
    # Importing a module sets an attribute of the package, which a name like it would lose.
    modules = {path.stem for path in (ROOT / "jpaged").iterdir()}
    assert not modules & set(seen)
    assert all(getattr(jpaged, name).__name__ for name in jpaged.__all__)
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        _ = jpaged.generat  # type: ignore[attr-defined]
    assert set(jpaged.__all__) <= set(dir(jpaged))


def test_a_module_of_the_package_is_an_attribute() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import jpaged; print(jpaged.errors.ConfigError.__name__)"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.stdout == "ConfigError\n", done.stderr


def test_whoever_reads_the_output_may_leave() -> None:
    """Quietly, also through the script that pip makes, which calls `main`."""
    program = """
import sys
from jpaged import __main__
__main__.usage = lambda: "x" * 1_000_000
sys.argv = ["jpaged", "--help"]
sys.exit(__main__.main())
"""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=pipe, stderr=pipe, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(timeout=60) == 141


def test_streams_that_are_closed_are_nobodys_files() -> None:
    """No file that is opened later gets the number of a stream, which libraries write to."""
    program = """
import os, sys
from jpaged.streams import open_closed_streams, was_closed
open_closed_streams()
closed = [name for name in ("stdin", "stdout", "stderr") if was_closed(getattr(sys, name))]
with open(sys.argv[1], "w") as file:
    file.write(f"{file.fileno() > 2} {closed}")
os.write(2, b"of a library")
"""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out"
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            argv = [sys.executable, "-c", program, str(file)]
            closing = f'exec "$@" {number}>&-'
            done = subprocess.run(["sh", "-c", closing, "sh", *argv], timeout=60, cwd=ROOT)
            assert done.returncode == 0 and file.read_text() == f"True ['{name}']"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = parser_of(name)
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0 and lines[0].startswith(f"usage: jpaged {name} ")
    assert len(lines) <= SCREEN
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    if not parser.common:
        assert all(any(flag in line for line in lines) for flag in flags)
        return
    assert all(any(argument in line for line in lines) for argument in parser.common)
    assert max(map(len, lines)) <= 80 and f"--help-all shows all {len(flags)} flags" in lines[-1]
    with pytest.raises(SystemExit) as caught:
        main([name, "--help-all"])
    whole = capsys.readouterr().out
    assert caught.value.code == 0 and all(flag in whole for flag in flags)
    assert len(whole.splitlines()) > SCREEN


@pytest.mark.parametrize("name", [name for name in COMMANDS if parser_of(name).common])
def test_common_arguments_exist(name: str) -> None:
    parser = parser_of(name)
    known = {*parser._option_string_actions, *(a.dest for a in parser._get_positional_actions())}
    assert set(parser.common) <= known


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "--gpu-memory-utilization", "0.9"], "did you mean --memory-utilization?"),
        (["serve", "--enable_prefix_caching"], "did you mean --prefix-caching?"),
        (["serve", "--model-path", "x"], "did you mean MODEL?"),
        (["serve", "-tp", "2"], "unknown argument -tp: did you mean --tensor-parallel-size?"),
        (["serve", "--lora-modules=a=b"], "did you mean --adapter?"),
        (["batch", "-i", "in.jsonl"], "unknown argument -i: did you mean INPUT?"),
        (["batch", "--output-file", "x"], "did you mean --output?"),
        (["plan", "--ctx-size", "9"], "did you mean --max-model-len?"),
        (["bench", "--zzzzzzz"], "unknown argument --zzzzzzz ("),
    ],
)
def test_what_was_meant(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    error = capsys.readouterr().err
    assert caught.value.code in (1, 2) and error.startswith(f"jpaged {argv[0]}: ")
    assert said in error and error.count("\n") == 1


def test_names_of_other_servers_lead_to_flags() -> None:
    parsers = [parser_of(name) for name in ("serve", "batch", "plan")]
    ours = {flag for parser in parsers for flag in parser._option_string_actions}
    ours |= {a.dest for parser in parsers for a in parser._get_positional_actions()}
    assert set(OTHER_NAMES.values()) <= ours
    assert not set(OTHER_NAMES) & {f for f in parsers[0]._option_string_actions if len(f) > 2}


def test_a_command_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve"]) == 2
    assert capsys.readouterr().err == (
        "jpaged: unknown command srve: did you mean serve? (--help lists the commands)\n"
    )
    assert unknown("zzz") == "unknown command zzz"


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="pip install 'jpaged[completion]'")
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert "--max-num-seqs" in script and "batch" in script and "--output" in script


def test_completion_without_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'jpaged[completion]'" in capsys.readouterr().err


def test_a_plan_through_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--max-model-len", "64"]
    assert main(["plan", "--random", "tiny", "--card", "cpu", "--length", "50", "65", *sizes]) == 0
    out = capsys.readouterr().out
    assert "requests of 50 tokens: " in out
    assert "requests of 65 tokens: none, longer than max_model_len=64" in out
