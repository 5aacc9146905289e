"""What docs/deploy has: a Grafana board of metrics that exist, a unit and a Containerfile whose
flags, files and extras exist; and the wheel, which has every file that the packages need.
"""

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.server.metrics import Metrics
from jpaged.openai.server.run import make_parser

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "deploy"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("jpaged", "kernels_cpu", "kernels_pallas")


def families() -> set[str]:
    """The names of a server's metrics; of histograms those of their samples."""
    metrics = Metrics()
    metrics.requests["/", 200] = metrics.errors["x"] = metrics.endings["stop"] = 1
    text = metrics.text({})
    return {line.split()[0].partition("{")[0] for line in text.splitlines() if line[0] != "#"}


class TestBoard:
    board: Any = json.loads((DEPLOY / "grafana.json").read_text())

    def queries(self) -> list[str]:
        found = [target["expr"] for panel in self.board["panels"] for target in panel["targets"]]
        return found + [
            v["definition"] for v in self.board["templating"]["list"] if "definition" in v
        ]

    def test_every_metric_exists(self) -> None:
        known = families()
        named = {name for query in self.queries() for name in re.findall(r"jpaged_\w+", query)}
        assert len(named) > 18 and named <= known, named - known

    def test_labels_exist(self) -> None:
        text = Metrics()
        text.requests["/", 200] = text.errors["x"] = text.endings["stop"] = 1
        labels = set(re.findall(r"[{,](\w+)=", text.text({})))
        asked = {g for query in self.queries() for g in re.findall(r"by \((\w+)\)", query)}
        assert asked <= labels and asked == {"status", "le", "code", "finish_reason"}
        shown = {t["legendFormat"] for p in self.board["panels"] for t in p["targets"]}
        assert set(re.findall(r"{{(\w+)}}", " ".join(shown))) <= labels

    def test_counters_are_rates_and_parentheses_close(self) -> None:
        for query in self.queries():
            assert query.count("(") == query.count(")") and query.count("[") == query.count("]")
            for name in re.findall(r"jpaged_\w+_(?:total|bucket)", query):
                assert f"rate({name}{{" in query, query

    def test_panels_lie_beside_each_other(self) -> None:
        places = set[tuple[int, int]]()
        panels = self.board["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels) > 10
        for panel in panels:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert at["x"] + at["w"] <= 24 and not places & cells
            places |= cells


def flags_of(command: list[str]) -> Any:
    """The flags of a command line of `jpaged serve`, which must be ones."""
    assert Path(command[0]).name == "jpaged" and command[1] == "serve"
    return make_parser().parse_args(command[2:])


def test_the_unit() -> None:
    """Its flags exist, and systemd waits for longer than requests may take to finish."""
    text = (DEPLOY / "jpaged.service").read_text()
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read_string(text.replace("\\\n", " "))
    service = unit["Service"]
    args = flags_of(shlex.split(service["ExecStart"]))
    assert args.model == "${MODEL}" and args.api_key_file and args.access_log
    assert int(service["TimeoutStopSec"]) > args.drain_s
    assert service["Type"] == "notify" and service["ExecReload"].endswith("-HUP $MAINPID")
    assert (ROOT / "docs" / Path(unit["Unit"]["Documentation"]).name).exists()


class TestContainerfile:
    lines = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ").splitlines()

    def of(self, word: str) -> list[str]:
        return [line.partition(" ")[2] for line in self.lines if line.startswith(f"{word} ")]

    def test_what_it_copies_is_there_and_is_all_that_the_wheel_needs(self) -> None:
        copied = {
            source
            for line in self.of("COPY")
            if not line.startswith("--from")
            for source in line.split()[:-1]
        }
        assert all((ROOT / source).exists() for source in copied)
        includes = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
        needed = {pattern.rstrip("*") for pattern in includes} | {"pyproject.toml"}
        needed |= {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
        assert needed <= copied

    def test_extras_and_python_exist(self) -> None:
        extras = PROJECT["project"]["optional-dependencies"]
        (arguments,) = self.of("ARG")
        named = arguments.partition("=")[2].split(",")
        named += re.findall(r"--build-arg EXTRAS=([\w,]+)", "\n".join(self.lines))[0].split(",")
        assert set(named) <= set(extras)
        least = tuple(map(int, PROJECT["project"]["requires-python"].removeprefix(">=").split(".")))
        for image in self.of("FROM"):
            found = re.search(r"python:(\d+)\.(\d+)-slim", image)
            assert found and (int(found[1]), int(found[2])) >= least

    def test_its_command(self) -> None:
        (entry,) = self.of("ENTRYPOINT")
        args = flags_of([*json.loads(entry), "/model"])
        assert (args.host, str(args.port)) == ("0.0.0.0", self.of("EXPOSE")[0])
        assert args.model == "/model" and args.log_format == "json"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as `pip wheel` builds it from a copy of what the Containerfile copies."""
    pytest.importorskip("setuptools", reason="the wheel is built without a network")
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels"))
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *PACKAGES, "pyproject.toml", "README.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = [*tracked.stdout.split("\n"), "LICENSE"] if not tracked.returncode else []
    if not names:
        pytest.skip("this is no checkout: git does not know its files")
    for name in filter(None, names):
        if (ROOT / name).exists():  # git also lists files that were removed
            place = source / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(target), str(source)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    (found,) = target.glob("jpaged-*.whl")
    return found


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *PACKAGES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = {name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()}
    assert len(files) > 200
    missing = {name for name in files if not name.endswith(".md")} - packed
    assert not missing, f"tool.setuptools.package-data leaves out {sorted(missing)}"
    others = {name for name in packed - files if ".dist-info/" not in name}
    assert not others, f"the wheel has {sorted(others)}"


def test_commands_run_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """In a folder without a checkout: a batch with the embedded model, and a plan for a card."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "in.jsonl").write_text('{"prompt": "def f", "max_tokens": 3}\n')
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"}

    def run(*argv: str) -> str:
        program = "import jpaged, runpy; assert '/site/' in jpaged.__file__, jpaged.__file__; "
        program += "runpy.run_module('jpaged', run_name='__main__', alter_sys=True)"
        done = subprocess.run(
            [sys.executable, "-c", program, *argv],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    sizes = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "64"]
    run("batch", "in.jsonl", "--output", "out.jsonl", "--token-buckets", "64", *sizes)
    assert json.loads((tmp_path / "out.jsonl").read_text())["usage"]["completion_tokens"] == 3
    plan = run("plan", "--random", "tiny", "--card", "h100", "--bound", *sizes)
    assert "tiny in bfloat16 on h100" in plan
