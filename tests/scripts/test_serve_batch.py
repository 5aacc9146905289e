"""scripts/serve_batch.py end to end: on a fake engine that keeps the contract, and once on the
embedded model.
"""

import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from jpaged.cli import merge as merge_shards
from jpaged.errors import CheckpointError
from jpaged.integrations.batch import command as serve_batch
from jpaged.integrations.batch import progress
from jpaged.integrations.batch.journal import Journal
from jpaged.integrations.batch.lines import BatchRequest
from tests.batch_engine import DRIVER, ROOT, FakeLLM, serve, start


@pytest.fixture
def run(monkeypatch, tmp_path, capfdbinary):
    """run(input lines, *flags, llm=...) -> exit status, output lines, stdout, stderr."""

    def run(lines, *flags, llm=None, name="in.jsonl"):
        monkeypatch.setattr(serve_batch, "make_llm", lambda args: llm or FakeLLM())
        source, target = tmp_path / name, tmp_path / "out.jsonl"
        source.write_bytes(
            b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
        )
        where = (
            []
            if "--output" in flags or "read" in flags
            else ["--output", str(target), "--overwrite"]
        )
        status = serve_batch.main([str(source), *where, *(f for f in flags if f != "read")])
        out, err = capfdbinary.readouterr()
        text = target.read_bytes() if where else out
        found = [] if "read" in flags else [json.loads(line) for line in text.splitlines()]
        return status, found, out.decode(), err.decode()

    return run


def openai(name, url="/v1/completions", **body):
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


MIXED = [
    {"prompt": "one", "max_tokens": 2},
    b"{broken",
    openai("two", prompt="two"),
    b"   ",
    openai("three", "/v1/chat/completions", messages=[{"role": "user", "content": "three"}]),
    openai("four", prompt="four", tools=[{}]),
    {"prompt_token_ids": [65, 66]},
    {"prompt": "six", "top_p": 3.0},
    {"prompt": "x" * 100},
    {"prompt": ""},
    openai("two", prompt="again"),
    {"messages": [{"role": "system", "content": "s"}]},
]


def test_every_line_is_answered_and_a_bad_one_ends_nothing(run):
    status, lines, out, err = run(MIXED)
    assert status == 2 and not err
    found = {}
    for line in lines:
        if line.get("response"):
            body = line["response"]["body"]
            found[line["custom_id"], line["response"]["status_code"]] = (
                body.get("error") or body["choices"][0]
            )
        else:
            error = line.get("error")
            found[error["line"] if error else line["line"]] = error or line
    assert len(found) == len(lines) == 11
    assert (found[1]["text"], found[1]["finish_reason"]) == ("ON", "length")
    assert found[2]["code"] == "invalid_json"
    assert found["two", 200]["text"] == "TWO"
    assert found["three", 200]["message"]["content"] == "THREE"
    assert found["four", 400]["message"].startswith("line 6: tools=")
    assert (found[7]["text"], found[7]["token_ids"]) == ("AB", [65, 66])
    assert (found[8]["param"], found[9]["code"]) == ("top_p", "context_length_exceeded")
    assert found[10]["message"] == "line 10: the prompt is empty"
    assert found["two", 400]["code"] == "duplicate_id"
    assert "chat template" in found[12]["message"]
    assert "requests     11 (4 ok, 7 failed)" in out
    assert (
        "tokens       13 in, 12 out" in out
        and "cache hits   8 tokens (61.5% of the prompts)" in out
    )
    assert "stop 3, length 1" in out
    assert "warning: 1 of 4 answers were cut off" in out


def test_ordered(run):
    _, lines, _, _ = run(MIXED, "--ordered")
    places = [
        x["error"]["line"] if x.get("error") else x.get("line") or int(x["id"].split("_")[-1])
        for x in lines
    ]
    assert places == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    _, lines, _, _ = run([{"prompt": str(i)} for i in range(100)], "--ordered", "--window", "3")
    assert [x["text"] for x in lines] == [str(i) for i in range(100)]
    _, lines, _, _ = run([{"prompt": str(i)} for i in range(100)])
    assert [x["text"] for x in lines] != [str(i) for i in range(100)]


def test_the_window_bounds_what_is_in_memory(run):
    prompts = [{"prompt": f"p{i}"} for i in range(200)]
    for flags, most in ((("--window", "7"), 7), (("--max-num-seqs", "3"), 12), ((), 200)):
        llm: Any = FakeLLM()
        assert run(prompts, *flags, llm=llm)[0] == 0
        assert llm.most_waiting == most


def test_an_ordered_run_waits_for_a_slow_line(run):
    llm: Any = FakeLLM()  # the youngest first: line 1 comes when nothing else is left to run
    begun = []
    add = llm.add_request
    llm.add_request = lambda *a, **k: (begun.append(llm.steps), add(*a, **k))[1]
    run([{"prompt": str(i)} for i in range(100)], "--ordered", "--window", "2", llm=llm)
    assert (
        begun[15] <= 15 and begun[16] >= 16
    )  # 8 windows of 2 lines are begun, then line 1 must come first


def test_text_lines(run):
    for name, flags in (("in.txt", ()), ("in", ("--format", "text"))):
        status, lines, _, _ = run(
            [b"one", b"", b'{"prompt": "two"}\r'], "--ordered", *flags, name=name
        )
        assert status == 0
        assert [(x["line"], x["text"]) for x in lines] == [(1, "ONE"), (3, '{"PROMPT": "TWO"}')]


def test_command_line_sampling_is_for_lines_that_do_not_say(run):
    lines = [
        {"prompt": "abcdef"},
        {"prompt": "abcdef", "max_tokens": 4},
        openai("a", prompt="abcdef"),
    ]
    texts = [line.get("text") for line in run(lines, "--max-tokens", "3", "--ordered")[1]]
    assert texts[:2] == ["ABC", "ABCD"]
    seen = []
    llm: Any = FakeLLM()
    add = llm.add_request
    llm.add_request = lambda prompt, params, **k: (seen.append(params), add(prompt, params, **k))[1]
    run(
        [{"prompt": "a"}, {"prompt": "a", "temperature": 0, "seed": 4}],
        "--temperature",
        "0.9",
        "--top-p",
        "0.8",
        llm=llm,
    )
    assert [(p.temperature, p.top_p) for p in seen] == [(0.9, 0.8), (0.0, 0.8)]
    assert seen[0].seed != 4 == seen[1].seed


def test_printed_to_read(run):
    status, _, out, err = run([*MIXED, {"prompt": "y" * 60}], "read")
    assert status == 2 and not err
    assert (
        "=== line 1\none\n--- answer (length, 2 tokens, 2 prompt tokens from the cache)\nON\n"
        in out
    )
    assert "=== line 5 (three)\nuser: three\n--- answer" in out
    assert "=== line 2\n--- error\nline 2: not JSON" in out
    assert "=== line 7\ntoken ids [65, 66]\n" in out
    assert "requests     12 (5 ok, 7 failed)" in out


def test_an_answer_does_not_steer_a_terminal():
    class Terminal(io.BytesIO):
        def isatty(self):
            return True

    request, line = BatchRequest(number=1), {"error": {"message": "\x1b[2Jgone\n"}}
    for stream, told in ((Terminal(), b"\xef\xbf\xbd[2Jgone\n"), (io.BytesIO(), b"\x1b[2Jgone\n")):
        journal = Journal(None, {}, ordered=False)
        journal.begin(stream)
        journal.write(request, line)
        assert told in stream.getvalue()


def test_jsonl_on_stdout_has_the_summary_on_stderr(run):
    status, lines, out, err = run([{"prompt": "a"}], "--output", "-")
    assert (status, lines[0]["text"], out.count("\n")) == (0, "A", 1)
    assert "requests     1 (1 ok, 0 failed)" in err


@pytest.mark.parametrize("flags", [(), ("--output", "-")], ids=["to read", "JSONL"])
def test_a_stdout_that_takes_text_alone(tmp_path, monkeypatch, flags):
    """That of a notebook has no bytes below it."""
    source, notebook = tmp_path / "in.txt", io.StringIO()
    source.write_text("grüße\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", notebook)
    assert serve(source, *flags) == 0
    assert "GRÜSSE" in notebook.getvalue()


def test_an_empty_input(run):
    status, lines, out, _ = run([])
    assert (status, lines) == (0, []) and "requests     0 (0 ok" in out


def test_one_failed_request_is_one_error_line(run):
    status, lines, _, _ = run(
        [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], llm=FakeLLM(fail_prompt="B")
    )
    assert status == 2
    assert sorted(x.get("text") or x["error"]["message"] for x in lines) == [
        "A",
        "C",
        "line 2: GenerationError: out of blocks",
    ]


def test_an_engine_that_stops_leaves_what_was_answered(run):
    for flags in ((), ("--ordered",)):
        status, lines, _, err = run(
            [{"prompt": x} for x in "abcdef"], *flags, llm=FakeLLM(fail_at=4)
        )
        assert (status, [x["text"] for x in lines]) == (
            1,
            ["D", "E", "F"] if flags else ["F", "E", "D"],
        )
        assert err.startswith(
            "serve_batch: the run stopped: RuntimeError: the device is gone (3 lines were answered"
        )
        assert err.count("\n") == 1


def test_a_pipe_is_written_to_and_stays_one(run, tmp_path):
    """As a device does, /dev/null above all."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run([{"prompt": "a"}], "--summary", str(pipe))[0] == 0
        assert b"seconds" in os.read(reader, 1 << 16) and pipe.is_fifo()
    finally:
        os.close(reader)
    assert not (tmp_path / "pipe.part").exists()


def test_an_output_behind_a_link_is_replaced_where_it_lies(run, tmp_path):
    (tmp_path / "disk").mkdir()
    lies, link = tmp_path / "disk" / "answers.jsonl", tmp_path / "out.jsonl"
    lies.touch()
    link.symlink_to(lies)
    lines = [{"prompt": text} for text in "abc"]
    assert run(lines, llm=FakeLLM(fail_prompt="B"))[0] == 2
    again = ("--output", str(link), "--resume", "--retry-failed")
    status, *_ = run(lines, *again, "read")  # whose end rewrites the file
    assert status == 0 and link.is_symlink()
    assert sorted(json.loads(x)["text"] for x in lies.read_text().splitlines()) == ["A", "B", "C"]
    assert os.listdir(tmp_path / "disk") == ["answers.jsonl"]


def test_an_engine_that_loses_requests_does_not_hang(run):
    llm: Any = FakeLLM()
    llm.step = lambda: llm.waiting.clear() or []
    status, _, _, err = run([{"prompt": "a"}], llm=llm)
    assert status == 1 and "the engine is idle with 1 requests unanswered" in err


def test_progress_lines(run, monkeypatch):
    monkeypatch.setattr(progress, "LINES_EVERY_S", 0.0)
    err = run([{"prompt": x} for x in "ab"])[3]
    assert re.search(
        r"^\[0 s\] 1/2 done, 0 failed, \d+ tok/s in, \d+ out, cache 200%, 0s left$", err, re.M
    )


class TestNothingRuns:
    """Exit 1, one sentence, no traceback, and no file left changed."""

    def check(self, capsys, *argv, status=1):
        assert serve_batch.main([str(a) for a in argv]) == status
        out, err = capsys.readouterr()
        assert not out and err.startswith("serve_batch: ") and err.count("\n") == 1
        return err

    @pytest.fixture
    def source(self, tmp_path):
        path = tmp_path / "in.jsonl"
        path.write_text('{"prompt": "a"}\n')
        return path

    def test_missing_input(self, capsys, tmp_path):
        assert "No such file" in self.check(capsys, tmp_path / "none.jsonl")
        assert "Is a directory" in self.check(capsys, tmp_path)

    def test_missing_model(self, capsys, source, tmp_path):
        kept = tmp_path / "kept.jsonl"
        kept.write_text("precious\n")
        error = self.check(
            capsys, source, "--model", tmp_path / "none", "--output", kept, "--overwrite"
        )
        assert "no such folder" in error and kept.read_text() == "precious\n"

    def test_output(self, capsys, source, tmp_path):
        assert "cannot write" in self.check(
            capsys, source, "--output", tmp_path / "no" / "out.jsonl"
        )
        done = tmp_path / "done.jsonl"
        done.write_text('{"line": 1}\n')
        error = self.check(capsys, source, "--output", done)
        assert (
            "--resume" in error and "--overwrite" in error and done.read_text() == '{"line": 1}\n'
        )
        assert "cannot write" in self.check(capsys, source, "--output", tmp_path)
        assert "is the input itself" in self.check(capsys, source, "--output", source)
        linked, new = tmp_path / "linked.jsonl", tmp_path / "new.jsonl"
        os.link(source, linked)
        assert "is the input itself" in self.check(capsys, source, "--report", linked)
        for flag, path, what in (
            ("--summary", new, "output"),
            ("--report", f"{new}.manifest.json", "manifest"),
            ("--report", f"{tmp_path}/./new.jsonl.summary.json", "summary"),
        ):
            error = self.check(capsys, source, "--output", new, flag, path)
            assert f"{flag} {path} is the {what} itself" in error
        assert source.read_text() == '{"prompt": "a"}\n' and not new.exists()

    def test_full_disk(self, capsys, source, monkeypatch):
        monkeypatch.setattr(serve_batch, "make_llm", lambda args: FakeLLM())
        monkeypatch.setattr(os, "dup2", lambda *a: None)
        assert "No space left" in self.check(capsys, source, "--output", "/dev/full")

    @pytest.mark.parametrize(
        "error", [CheckpointError("a.safetensors: cut short"), ValueError("bad\nheader")]
    )
    def test_damaged_model(self, capsys, source, tmp_path, monkeypatch, error):
        import jpaged

        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(jpaged, "LLM", fail, raising=False)
        sentence = self.check(capsys, source, "--model", tmp_path)
        assert "cannot start the engine" in sentence and str(error).split()[-1] in sentence

    @pytest.mark.parametrize(
        "flags", [["--bogus"], ["--window", "0"], ["--top-p", "3"], ["--temperature", "nan"]]
    )
    def test_bad_flags(self, capsys, source, flags):
        with pytest.raises(SystemExit) as caught:
            serve_batch.main([str(source), *flags])
        assert caught.value.code == 1
        assert flags[0].strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


def test_a_slow_pipe_is_answered_as_it_comes_and_interrupted_cleanly():
    with start("-", "--output", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for text in ("a", "b"):
            process.stdin.write(json.dumps({"prompt": text}).encode() + b"\n")
            process.stdin.flush()
            assert (
                json.loads(process.stdout.readline())["text"] == text.upper()
            )  # while the pipe stays open
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130  # while the pipe stays open, still
        out, err = process.stdout.read(), process.stderr.read()
    assert out == b""
    assert err.splitlines()[-1] == b"serve_batch: interrupted: 2 lines were answered"


class Signalled(FakeLLM):
    """Sends its own process signals before some of its steps."""

    def __init__(self, **signals_at: int):
        super().__init__(delay=0.001)
        self.signals_at = {int(step.strip("_")): number for step, number in signals_at.items()}

    def step(self) -> list[Any]:
        if number := self.signals_at.get(self.steps):
            os.kill(os.getpid(), number)
        return super().step()


class TestInterrupted:
    """While 300 lines run: what was answered is whole, and the command that is told goes on with
    it.
    """

    def run(self, tmp_path, capfd, llm, *flags, status):
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(300)))
        assert serve(source, "--output", target, *flags, llm=llm) == status
        err = capfd.readouterr().err
        answered = [json.loads(line)["line"] for line in target.read_text().splitlines()]
        assert len(set(answered)) == len(answered) and 0 < len(answered) < 300
        last = err.splitlines()[-1]
        said = (
            f"serve_batch: interrupted: {len(answered)} lines were answered in {target}; "
            "to resume: python "
        )
        assert last.startswith(said) and "a second signal stops at once" in err
        again = shlex.split(last.split("; to resume: ")[1])
        assert serve(*again[2:]) == 0
        assert sorted(json.loads(x)["line"] for x in target.read_text().splitlines()) == [
            *range(1, 301)
        ]
        return answered

    def test_what_runs_is_finished(self, tmp_path, capfd):
        llm = Signalled(_20=signal.SIGINT)
        answered = self.run(tmp_path, capfd, llm, "--window", "5", status=130)
        assert set(answered) == set(range(1, 26)), "20 before it, and the 5 that were running"

    def test_grace_ends(self, tmp_path, capfd):
        llm = Signalled(_20=signal.SIGTERM)
        flags = ("--grace", "0.05", "--overwrite")
        answered = self.run(tmp_path, capfd, llm, *flags, status=143)
        assert len(answered) > 20 and not llm.waiting
        assert set(answered) != set(range(1, len(answered) + 1)), "what had waited was cut off"

    def test_a_second_signal(self, tmp_path, capfd):
        llm = Signalled(_20=signal.SIGTERM, _25=signal.SIGINT)
        assert len(self.run(tmp_path, capfd, llm, "--grace", "1000", status=143)) == 25


def test_a_step_that_does_not_return_ends_with_the_grace_period(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with start(
        source, "--output", target, "--grace", "0.1", delay=2, stdout=subprocess.PIPE
    ) as process:
        while not (target.exists() and target.stat().st_size):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143 and out == b"", "it did not get to its summary"
    assert b"interrupted: 1 lines were answered in" in err.splitlines()[-1]
    assert serve(source, "--output", target, "--resume") == 0
    assert sorted(json.loads(x)["text"] for x in target.read_text().splitlines()) == ["A", "B"]


def test_streams_that_are_closed(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    program = [sys.executable, "-c", DRIVER, "0"]
    for argv, closed, status in (
        ([source, "--output", target], "1>&- 2>&-", 0),
        ([source, "--output", "-"], "1>&-", 1),
        (["-", "--output", tmp_path / "none"], "0<&-", 1),
    ):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", *program, *map(str, argv)]
        env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, timeout=120)
        assert done.returncode == status, done.stderr
        assert not status or (b"is closed" in done.stderr and done.stderr.count(b"\n") == 1)
    assert json.loads(target.read_text())["text"] == "A"


def test_a_broken_pipe_is_quiet(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": "a" * 60}) + "\n" for i in range(3000)))
    with start(source, "--output", "-", stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        # A busy machine may have come to a line of progress.
        assert all(line.startswith(b"[") for line in process.stderr)


class TestEmbeddedModel:
    """The same, with nothing faked: small shapes, so that few steps compile."""

    # One bucket a phase, so that few steps compile.
    SIZES = "--max-num-seqs 8 --max-num-batched-tokens 64 --token-buckets 64 --seq-buckets 8"
    MODEL = "--dtype float32 --max-model-len 512 --num-blocks 64"
    FLAGS = tuple(f"{SIZES} {MODEL}".split())

    @pytest.fixture(autouse=True)
    def _engine_is_freed(self, monkeypatch):
        made = []
        make = serve_batch.make_llm
        monkeypatch.setattr(
            serve_batch, "make_llm", lambda args: (made.append(make(args)), made[-1])[1]
        )
        yield
        for llm in made:
            llm.close()

    def answers(self, tmp_path, lines, *flags, status=0):
        source, target = tmp_path / "real.jsonl", tmp_path / "answers.jsonl"
        source.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        where = ["--output", str(target), "--overwrite", "--ordered"]
        assert serve_batch.main([str(source), *where, *self.FLAGS, *flags]) == status
        return [json.loads(line) for line in target.read_text().splitlines()]

    def test_the_shipped_prompts(self, capfd):
        assert serve_batch.main([str(ROOT / "examples" / "prompts.jsonl"), *self.FLAGS]) == 0
        out = capfd.readouterr().out
        assert "requests     16 (16 ok, 0 failed)" in out
        assert "prompt tokens from the cache" in out  # lines 6 to 8 share a beginning

    def test_bad_requests_are_error_lines_and_their_neighbours_are_unharmed(self, tmp_path):
        good = [
            {"id": "g1", "prompt": "def f(x):\n", "max_tokens": 12},
            {"id": "g2", "prompt": "import ", "max_tokens": 600, "temperature": 0},
            {
                "id": "g3",
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 5,
                "logprobs": 2,
            },
            {
                "id": "g4",
                "prompt": "x = ",
                "max_tokens": 5,
                "logit_bias": {"40": 100.0},
                "prompt_logprobs": 1,
            },
        ]
        bad = [
            {"prompt": "a", "max_tokens": 0},
            {"prompt": ""},
            {"prompt_token_ids": []},
            {"prompt": "word " * 2000},
            {"prompt_token_ids": [10**6]},
            {"prompt_token_ids": [-1]},
            {"prompt_token_ids": [2**63 - 1]},
            '{"prompt": "a", "temperature": NaN}',
            {"prompt": "a", "temperature": -1.0},
            {"prompt": "a", "top_p": -0.5},
            {"prompt": "a", "top_k": -2},
            {"prompt": "a", "min_p": 1.5},
            {"prompt": "a", "repetition_penalty": 0},
            {"prompt": "a", "presence_penalty": 3},
            {"prompt": "a", "min_tokens": -1},
            {"prompt": "a", "logprobs": -1},
            {"prompt": "a", "logprobs": 21},
            {"prompt": "a", "stop": ""},
            {"prompt": "a", "stop_token_ids": [10**6]},
            {"prompt": "a", "logit_bias": {str(10**6): 1}},
            {"prompt": "a", "logprobs_mode": "other"},
            {"prompt": "a", "min_tokens": 9, "max_tokens": 3},
            {"prompt": "\ud800"},
            {"prompt": "a", "top_k": 2**62},
            {"prompt": "a", "temperature": 1e300},
            {"prompt": "a", "repetition_penalty": 1e300},
        ]
        mixed = [*good[:2], *bad, *good[2:]]
        lines = self.answers(tmp_path, mixed, status=2)
        assert len(lines) == len(mixed)
        refused = {
            i + 1 for i, x in enumerate(mixed) if x in bad[:-3]
        }  # of the last three some may be clamped
        assert {x["error"]["line"] for x in lines if "error" in x} >= refused
        alone = self.answers(tmp_path, good)
        found = [x for x in lines if x.get("id") in ("g1", "g2", "g3", "g4")]
        assert [(x["id"], x["text"], x["usage"]) for x in found] == [
            (x["id"], x["text"], x["usage"]) for x in alone
        ]
        assert [x["finish_reason"] for x in alone] == ["length"] * 4
        assert alone[1]["usage"]["total_tokens"] == 512
        assert len(alone[2]["logprobs"]) == 5 and len(alone[2]["logprobs"][0]["top_logprobs"]) == 2
        assert len(alone[3]["prompt_logprobs"]) == alone[3]["usage"]["prompt_tokens"]

    @pytest.mark.middle
    def test_four_devices_answer_as_one(self, tmp_path):
        """Two of them for each KV head, or two replicas of two; the weights read onto the mesh."""
        sizes = {"max_tokens": 10, "logprobs": 2}
        lines = [{"prompt": f"def f{i % 3}(", "temperature": i % 2, **sizes} for i in range(6)]
        alone = self.answers(tmp_path, lines)
        wanted = [(x["line"], x["text"]) for x in alone]
        for sizes in (("1", "4"), ("2", "2")):
            flags = zip(("--data-parallel-size", "--tensor-parallel-size"), sizes, strict=True)
            shared = self.answers(tmp_path, lines, *itertools.chain(*flags))
            assert [(x["line"], x["text"]) for x in shared] == wanted

    def test_shards_answer_as_the_whole_run(self, tmp_path):
        lines = [
            {"prompt": f"def f{i % 3}(", "max_tokens": 10, "temperature": i % 2} for i in range(9)
        ]
        whole = self.answers(tmp_path, lines)
        assert len({x["text"] for x in whole}) > 3  # equal prompts on different lines differ
        source, target = tmp_path / "real.jsonl", tmp_path / "sharded.jsonl"
        for shard in ("0/2", "1/2"):
            assert (
                serve_batch.main(
                    [str(source), "--output", str(target), "--shard", shard, *self.FLAGS]
                )
                == 0
            )
        assert merge_shards.main([str(target)]) == 0
        merged = [json.loads(line) for line in target.read_text().splitlines()]
        assert [(x["line"], x["text"]) for x in merged] == [(x["line"], x["text"]) for x in whole]

    @pytest.mark.parametrize("damage", ["architecture", "weights", "config"])
    def test_damaged_folders(self, tmp_path, capfd, damage):
        from jpaged.demo import MODEL_PATH

        folder = tmp_path / "model"
        shutil.copytree(MODEL_PATH, folder)
        config = folder / "config.json"
        if damage == "architecture":
            raw = json.loads(config.read_text()) | {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
            }
            config.write_text(json.dumps(raw))
        elif damage == "weights":
            os.truncate(folder / "model.safetensors", 100_000)
        else:
            config.unlink()
        source = ROOT / "examples" / "prompts.jsonl"
        assert serve_batch.main([str(source), "--model", str(folder)]) == 1
        out, err = capfd.readouterr()
        named = {
            "architecture": "GPT2LMHeadModel",
            "weights": "model.safetensors",
            "config": "config.json",
        }[damage]
        assert not out and named in err and err.startswith("serve_batch: ") and err.count("\n") == 1

    def test_chat_without_a_template(self, tmp_path):
        from jpaged.demo import MODEL_PATH

        folder = tmp_path / "model"
        shutil.copytree(MODEL_PATH, folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        lines = self.answers(
            tmp_path, [chat, {"prompt": "a", "max_tokens": 2}], "--model", str(folder), status=2
        )
        assert (
            "chat template" in lines[0]["error"]["message"]
            and lines[1]["finish_reason"] == "length"
        )
