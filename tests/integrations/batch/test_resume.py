"""A run that is cut off, resumed, retried, sharded and merged writes what an undisturbed one does;
or says why not.
"""

import functools
import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from jpaged.cli import merge as merge_shards
from jpaged.integrations.batch import rows
from tests.batch_engine import FakeLLM, serve


def openai(name: str, prompt: str) -> dict[str, Any]:
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt},
    }


def mixed(count: int = 60) -> list[Any]:
    """Lines of every form, good and bad; some ids twice."""
    rng = random.Random(1)

    def line(i: int) -> Any:
        kinds = [
            {"prompt": f"p{i}"},
            {"id": f"id{i}", "prompt": f"q{i}"},
            {"id": i % 7, "prompt": f"r{i}"},
        ]
        kinds += [
            openai(f"o{i}", f"s{i}"),
            openai(f"twice{i % 5}", f"t{i}"),
            openai(f"bad{i}", "x" * 100),
        ]
        return rng.choice(
            [*kinds, {"prompt": f"u{i}", "top_p": 7}, b"{torn", b"", {"id": f"id{i}", "nothing": 1}]
        )

    return [line(i) for i in range(count)]


class Files:
    """An input and an output, and runs of one into the other."""

    def __init__(self, folder: Path, lines: list[Any] | None = None):
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.lines = mixed() if lines is None else lines
        self.put(self.lines)

    def put(self, lines: list[Any]) -> None:
        parts = (x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines)
        self.input.write_bytes(b"".join(part + b"\n" for part in parts))

    def run(self, *flags: str, llm: Any = None, output: Path | None = None) -> int:
        llm = llm or FakeLLM(with_seed=True)
        return serve(self.input, "--output", output or self.output, *flags, llm=llm)

    def rows(self, output: Path | None = None) -> list[dict[str, Any]]:
        return [comparable(line) for line in (output or self.output).read_text().splitlines()]

    def undisturbed(self) -> list[dict[str, Any]]:
        whole = self.output.with_name("whole.jsonl")
        self.run("--ordered", "--overwrite", output=whole)
        return self.rows(whole)


def comparable(line: str) -> dict[str, Any]:
    """A row without the time at which it was made."""
    row = json.loads(line)
    if row.get("response"):
        row["response"]["body"].pop("created", None)
    return row


def number(row: dict[str, Any]) -> int:
    return row["line"] if "line" in row else int(row["id"].rpartition("_")[2])


def by_number(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=number)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize("ordered", [False, True])
def test_cut_anywhere_and_resumed(
    files: Files, ordered: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, flags = files.undisturbed(), ["--window", "6", *(["--ordered"] if ordered else [])]
    assert len(whole) == sum(line != b"" for line in files.lines)
    assert files.run(*flags, "--resume") == 2, "where there is nothing, it starts"
    done = files.output.read_bytes()
    for cut in [0, 1, len(done) - 1, len(done), *random.Random(2).sample(range(len(done)), 12)]:
        files.output.write_bytes(done[:cut])
        kept, llm = done[:cut].count(b"\n"), FakeLLM(with_seed=True)
        assert files.run(*flags, "--resume", llm=llm) == 2
        assert (
            files.output.read_bytes()[: done[:cut].rfind(b"\n") + 1]
            == done[:cut][: done[:cut].rfind(b"\n") + 1]
        )
        found = files.rows()
        assert (found if ordered else by_number(found)) == whole
        assert len(llm.added) <= len(whole) - kept and max(llm.added.values(), default=1) == 1
    summary = json.loads(files.output.with_name("out.jsonl.summary.json").read_text())
    assert summary["lines"]["done"] == summary["lines"]["total"] == len(whole)
    assert "earlier" in capsys.readouterr().out


def test_rows_in_any_order_and_an_ordered_run(files: Files) -> None:
    whole = files.undisturbed()
    assert files.run("--window", "9") == 2
    lines = files.output.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    files.output.write_text("".join(lines[: len(lines) // 2]))
    assert files.run("--resume", "--ordered") == 2
    assert files.rows() == whole


def test_zeros_after_a_power_cut_are_torn_too(files: Files) -> None:
    whole = files.undisturbed()
    files.run()
    data = files.output.read_bytes()
    files.output.write_bytes(data[:-300] + bytes(300))
    assert files.run("--resume") == 2 and by_number(files.rows()) == whole


def test_what_is_no_output_is_left_alone(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.run()
    data = files.output.read_bytes()
    files.output.write_bytes(b"hello\n" + data)
    assert files.run("--resume") == 1
    assert "row 1 of" in capsys.readouterr().err and files.output.read_bytes() == b"hello\n" + data
    files.output.write_bytes(data)
    manifest = files.output.with_name("out.jsonl.manifest.json")
    manifest.write_text("{}")
    assert files.run("--resume") == 1 and "has another version" in capsys.readouterr().err
    manifest.unlink()
    assert files.run("--resume") == 1 and "has no" in capsys.readouterr().err
    assert (
        files.run() == 1
        and "--resume continues it, --overwrite starts again" in capsys.readouterr().err
    )
    assert files.output.read_bytes() == data
    assert files.run("--overwrite") == 2


class TestManifest:
    """A run is not resumed with anything else that its answers depend on."""

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--seed", "5"], "run.seed is 0 there, 5 in this run"),
            (["--temperature", "0.5"], "run.temperature is null there, 0.5 in this run"),
            (["--max-tokens", "7"], "run.max_tokens is null there, 7 in this run"),
            (["--format", "text"], 'run.format is "jsonl" there, "text" in this run'),
            (["--ignore-unknown"], "run.ignore_unknown is false there, true in this run"),
            (["--error-style", "vllm"], 'run.error_style is "openai" there, "vllm" in this run'),
            (["--dtype", "float32"], 'run.dtype is null there, "float32" in this run'),
            (["--deterministic"], "run.deterministic is null there, true in this run"),
            (["--max-n", "3"], "run.max_n is null there, 3 in this run"),
        ],
    )
    def test_settings(
        self, files: Files, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
    ) -> None:
        files.run()
        data = files.output.read_bytes()
        assert files.run("--resume", *flags) == 1
        assert said in capsys.readouterr().err and files.output.read_bytes() == data

    def test_what_is_at_its_default_was_never_said(self, files: Files) -> None:
        """An output that was begun before there was a flag is gone on with."""
        files.run("--max-n", "256", "--no-strict")
        path = files.output.with_name("out.jsonl.manifest.json")
        manifest = json.loads(path.read_text())
        assert manifest["run"].pop("max_n") is None
        path.write_text(json.dumps(manifest))
        assert files.run("--resume") == 2

    def test_model(self, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(1000))
        files.run("--model", str(folder))
        moved = folder.rename(tmp_path / "elsewhere")
        assert files.run("--resume", "--model", str(moved)) == 2, "where it lies does not matter"
        (moved / "model.safetensors").write_bytes(bytes(999) + b"1")
        assert files.run("--resume", "--model", str(moved)) == 1
        assert "model.model.safetensors is" in capsys.readouterr().err

    def test_input(self, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
        files.run()
        files.put(files.lines[1:])
        assert files.run("--resume") == 1 and "input.bytes is" in capsys.readouterr().err
        files.put([{"prompt": "other"}, *files.lines])
        assert files.run("--resume") == 1 and "input.digest is" in capsys.readouterr().err

    def test_an_input_that_grew(self, files: Files) -> None:
        files.run()
        files.put([*files.lines, {"prompt": "one more"}])
        llm = FakeLLM(with_seed=True)
        assert files.run("--resume", llm=llm) == 2 and len(llm.added) == 1
        assert by_number(files.rows()) == files.undisturbed()

    def test_an_input_whose_last_line_grew(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        same = functools.partial(gzip.compress, mtime=0)  # whenever it is packed
        for name, pack in (("in.txt", bytes), ("in.txt.gz", same)):
            source, output = tmp_path / name, tmp_path / f"{name}.jsonl"
            source.write_bytes(pack(b"one\ntwo"))
            assert serve(source, "--output", output) == 0
            source.write_bytes(pack(b"one\ntwo") + pack(b" and more\n"))
            assert serve(source, "--output", output, "--resume") == 1
            assert "input.bytes is" in capsys.readouterr().err
            source.write_bytes(pack(b"one\n"))
            assert serve(source, "--output", output, "--overwrite") == 0
            source.write_bytes(pack(b"one\n") + pack(b"two\n"))
            assert serve(source, "--output", output, "--resume") == 0
            assert [json.loads(x)["text"] for x in output.read_text().splitlines()] == [
                "ONE",
                "TWO",
            ]

    def test_ids_that_changed_between_the_samples(
        self, files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("jpaged.integrations.batch.source.SAMPLE", 1)
        files.lines = [{"id": f"{i:04}", "prompt": "a"} for i in range(50)]
        files.put(files.lines)
        files.run()
        files.put([*files.lines[:20], {"id": "00xx", "prompt": "a"}, *files.lines[21:]])
        assert files.run("--resume") == 1
        assert "line 21 of the input has the id '00xx'" in capsys.readouterr().err


def test_a_damaged_input_keeps_what_was_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.txt.gz", tmp_path / "out.jsonl"
    rng = random.Random(0)
    text = b"".join(b"%032x\n" % rng.getrandbits(128) for _ in range(3000))
    data = gzip.compress(text)
    source.write_bytes(data[: len(data) // 2])
    assert serve(source, "--output", output) == 1
    err = capsys.readouterr().err
    assert "cannot read the input any further: EOFError" in err and "--resume" in err
    done, manifest = len(output.read_text().splitlines()), tmp_path / "out.jsonl.manifest.json"
    assert 0 < done < 3000 and "complete" not in json.loads(manifest.read_text())
    source.write_bytes(data)  # the rest has arrived
    llm = FakeLLM()
    assert serve(source, "--output", output, "--resume", llm=llm) == 0
    assert len(llm.added) == 3000 - done and json.loads(manifest.read_text())["complete"] is True
    assert sorted(json.loads(x)["line"] for x in output.read_text().splitlines()) == [
        *range(1, 3001)
    ]


def test_retry_failed(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.lines = [{"id": i, "prompt": f"p{i}"} for i in range(30)]
    files.put(files.lines)
    assert files.run(llm=FakeLLM(fail_prompt="P7", with_seed=True)) == 2
    llm = FakeLLM(with_seed=True)
    assert files.run("--resume", llm=llm) == 2 and not llm.added, "a failed line is done"
    assert files.run("--resume", "--retry-failed", llm=FakeLLM(fail_prompt="P7")) == 2
    assert len(files.rows()) == 30 and sum("error" in row for row in files.rows()) == 1
    llm = FakeLLM(with_seed=True)
    assert files.run("--resume", "--retry-failed", llm=llm) == 0 and [*llm.added] == ["line-8"]
    assert by_number(files.rows()) == files.undisturbed()
    assert not list(files.output.parent.glob("*.part"))


def test_a_retry_that_is_killed_before_the_output_is_compacted(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.lines = [{"id": i, "prompt": f"p{i}"} for i in range(30)]
    files.put(files.lines)
    files.run(llm=FakeLLM(fail_prompt="P7", with_seed=True))

    def killed(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("jpaged.integrations.batch.rows.rewrite", killed)
        assert files.run("--resume", "--retry-failed") == 1
    assert len(files.rows()) == 31
    with monkeypatch.context() as patch:  # in the middle of its writing: the old file stays
        patch.setattr(os, "replace", killed)
        with pytest.raises(RuntimeError):
            path = str(files.output)
            rows.rewrite([rows.scan(path)], path, ordered=False)
    assert len(files.rows()) == 31
    llm = FakeLLM()
    assert files.run("--resume", "--retry-failed", llm=llm) == 0 and not llm.added
    assert by_number(files.rows()) == files.undisturbed()


def test_shards_are_the_whole_run(
    files: Files, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    whole, parts = files.undisturbed(), []
    for i in range(3):
        if i == 1:  # as a SLURM array of 5, 7, 9
            for name, value in (("ID", 7), ("MIN", 5), ("STEP", 2), ("COUNT", 3)):
                monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
            assert files.run() == 2
            monkeypatch.undo()
        else:
            assert files.run("--shard", f"{i}/3", "--ordered") == 2
        part = files.output.with_name(f"out.{i}-of-3.jsonl")
        parts.append(files.rows(part))
        assert all((number(row) - 1) % 3 == i for row in parts[-1])
    assert by_number([row for part in parts for row in part]) == whole
    assert merge_shards.main([str(files.output)]) == 2
    assert files.rows() == whole and f"{len(whole)} rows" in capsys.readouterr().out
    llm = FakeLLM(with_seed=True)
    assert files.run("--resume", llm=llm) == 2 and not llm.added, (
        "the merged file is that of a whole run"
    )


def test_what_is_not_merged(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*flags: str) -> str:
        assert merge_shards.main([str(files.output), *flags]) == 1
        assert not files.output.exists()
        return capsys.readouterr().err

    assert "no shards of" in refused()
    files.run("--shard", "0/3")
    assert "out.1-of-3.jsonl is missing (--partial" in refused()
    files.run("--shard", "1/3", "--seed", "3")
    files.run("--shard", "2/3")
    assert "run.seed is 3 there, 0 in this run" in refused()
    files.run("--shard", "1/3", "--overwrite", "--max-error-rate", "0", llm=FakeLLM(with_seed=True))
    files.run("--shard", "1/3", "--overwrite")
    manifest = files.output.with_name("out.1-of-3.jsonl.manifest.json")
    ended = json.loads(manifest.read_text())
    del ended["complete"]
    manifest.write_text(json.dumps(ended))
    assert "out.1-of-3.jsonl has not finished" in refused()
    one = str(files.output.with_name("out.0-of-3.jsonl"))
    assert "are no whole run" in refused(one, one, str(files.output.with_name("out.2-of-3.jsonl")))
    files.run("--shard", "0/2")
    assert "shards of 2 and of 3" in refused()
    paths = [str(files.output.with_name(f"out.{i}-of-3.jsonl")) for i in range(3)]
    assert merge_shards.main([str(files.output), *paths, "--partial"]) == 2
    assert files.rows() == files.undisturbed()
    assert (
        merge_shards.main([str(files.output), *paths]) == 1 and "exists" in capsys.readouterr().err
    )


def test_two_runs_of_one_output(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    class Second(FakeLLM):
        status = None

        def step(self) -> Any:
            Second.status = Second.status or files.run("--resume")
            return super().step()

    assert files.run(llm=Second(with_seed=True)) == 2
    assert Second.status == 1 and "is being written by another run" in capsys.readouterr().err
