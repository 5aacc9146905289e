"""Images of batch files: where they may be, when they are decoded, and error lines."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jpaged import LLM
from jpaged.errors import ConfigError
from jpaged.images.limits import ImageLimits
from jpaged.integrations.batch import command
from jpaged.integrations.batch.images import LineImages
from jpaged.integrations.batch.journal import to_read
from jpaged.integrations.batch.lines import BatchRequest, Settings
from jpaged.integrations.batch.run import MOST_LOADING
from jpaged.openai.protocol import BodyError
from jpaged.sampling_params import SamplingParams
from tests.vision_folder import ENGINE, ROWS, data_url, picture, png, seen, write_vision_folder

FLAGS = ["--images", "--dtype", "float32", "--max-model-len", "256"]
DRAWN: dict[str, Any] = {"max_tokens": 3, "temperature": 0}


def request(messages: Any, images: LineImages, **more: Any) -> BatchRequest:
    made = BatchRequest(number=1)
    settings = Settings(defaults=SamplingParams(), images=images)
    made.parse(json.dumps({"messages": messages, **more}).encode(), settings)
    return made


class TestSources:
    """Which sources a line may have; nothing is decoded."""

    @pytest.fixture
    def images(self, tmp_path: Path) -> LineImages:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "a.png").write_bytes(png())
        (tmp_path / "secret.png").write_bytes(png())
        os.symlink(tmp_path / "secret.png", tmp_path / "in" / "link.png")
        os.mkfifo(tmp_path / "in" / "pipe")
        return LineImages.of(None, folder=str(tmp_path / "in"))

    def put(self, images: LineImages, source: str) -> Any:
        made = request(seen(source), images)
        assert made.body is not None
        llm = mock.Mock()
        llm.engine_config.images = True
        images.put_into(made.body, llm)
        assert llm.session.inputs.images.limits is images.limits
        return made.body._images

    def test_a_path_is_relative_to_the_input(self, images: LineImages, tmp_path: Path) -> None:
        assert self.put(images, "a.png") == [tmp_path / "in" / "a.png"]
        assert self.put(images, "../in/./a.png") == [tmp_path / "in" / "a.png"]
        assert self.put(images, data_url()) == [data_url()]

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("../secret.png", "below the input's folder"),
            ("link.png", "below the input's folder"),
            ("/etc/passwd", "below the input's folder"),
            ("pipe", "is no file"),
            (".", "is no file"),
            ("absent.png", "No such file"),
            ("a\0.png", "null"),
            ("file:///etc/passwd", "No such file"),
        ],
    )
    def test_other_paths(self, images: LineImages, source: str, said: str) -> None:
        with pytest.raises(BodyError, match=r"images\[0\].*" + said) as caught:
            self.put(images, source)
        assert caught.value.code == "invalid_image"

    def test_no_path_without_the_flag(self) -> None:
        closed = LineImages.of(ImageLimits(local_paths=True))
        assert not closed.limits.local_paths
        with pytest.raises(BodyError, match="must begin with data:"):
            self.put(closed, "a.png")

    def test_hosts_are_those_of_the_engine_and_of_the_run(self) -> None:
        images = LineImages.of(ImageLimits(hosts=("a.org",)), hosts=["b.org"])
        assert images.limits.hosts == ("a.org", "b.org")
        with pytest.raises(ConfigError, match="hosts"):
            LineImages.of(None, hosts=["https://a.org/x"])

    def test_flags(self, capsys: pytest.CaptureFixture[str]) -> None:
        args = command.parse_args(["x/in.jsonl", "--image-hosts", "a.org", "b.org:81"])
        assert args.line_images.limits.hosts == ("a.org", "b.org:81")
        assert args.line_images.folder is None
        args = command.parse_args(["x/in.jsonl", "--image-paths"])
        assert args.line_images.folder == os.path.abspath("x")
        for argv, said in (
            (["-", "--image-paths"], "needs an input that is a file"),
            (["x", "--image-hosts", "HTTP://A"], "hosts"),
        ):
            with pytest.raises(SystemExit):
                command.parse_args(argv)
            assert said in capsys.readouterr().err


def test_a_line_keeps_no_image(tmp_path: Path) -> None:
    made = request(seen(data_url(), text="hm"), LineImages.of(None))
    assert made.has_images and made.body is not None
    made.body.forget_sources()
    assert made.has_images and made.body.image_sources == [""]
    assert (
        to_read(made, {"error": {"message": "x"}})
        .decode()
        .startswith("=== line 1\nuser: [image]\nhm")
    )
    bare = BatchRequest(number=1)
    line = {"prompt": "<image>", "images": [data_url()]}
    bare.parse(json.dumps(line).encode(), Settings(defaults=SamplingParams()))
    assert bare.has_images and bare.body is not None
    bare.body.forget_sources()
    assert bare.body.image_sources == [""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_folder(tmp_path_factory.mktemp("batch-seeing"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder, **ENGINE)
    yield llm
    llm.close()


def lines(*bodies: Any) -> str:
    url = "/v1/chat/completions"
    named = [
        {"custom_id": f"c{i}", "method": "POST", "url": url, "body": body}
        for i, body in enumerate(bodies)
    ]
    return "".join(json.dumps(line) + "\n" for line in named)


def run(llm: LLM, *argv: Any) -> int:
    with mock.patch.object(command, "make_llm", lambda args: llm):
        return command.main([str(a) for a in argv])


def body(row: Any) -> Any:
    """What a row says, without when it was written."""
    answer = row["response"]["body"]
    return answer.get("choices"), answer.get("error")


def rows(path: Path) -> dict[str, Any]:
    return {row["custom_id"]: row for row in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(png())
    source = tmp_path / "in.jsonl"
    bodies = [
        {"messages": seen(), **DRAWN},
        {"messages": seen("a.png"), **DRAWN},
        {"messages": [{"role": "user", "content": "hey"}], **DRAWN},
        {"messages": seen(data_url(png()[:-40])), **DRAWN},
        {"messages": seen("../x.png"), **DRAWN},
        {"messages": seen("https://example.com/a.png"), **DRAWN},
        {"messages": seen(data_url(png(picture(4))), data_url()), **DRAWN},
    ]
    source.write_text(lines(*bodies))
    return source


def test_a_run(llm: LLM, folder: Path, batch: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    common = ["--model", folder, "--output", out, *FLAGS, "--ordered"]
    assert run(llm, batch, *common, "--image-paths") == 2
    answers = rows(out)
    assert list(answers) == [f"c{i}" for i in range(7)]

    def text(name: str) -> str:
        return answers[name]["response"]["body"]["choices"][0]["message"]["content"]

    [whole] = llm.chat(seen(), SamplingParams(**DRAWN), use_tqdm=False)
    assert text("c0") == text("c1") == whole.outputs[0].text
    usage = answers["c6"]["response"]["body"]["usage"]
    assert usage["prompt_tokens"] == len("u:what?;a:") + 2 * (2 + ROWS)
    said = {
        "c3": "images[0]: data: URL: a truncated or damaged image",
        "c4": "below the input's folder",
        "c5": "unless hosts lists theirs",
    }
    for name, message in said.items():
        error = answers[name]["response"]["body"]["error"]
        assert message in error["message"] and error["code"] == "invalid_image", error

    # A run that is resumed draws the same, and one that reads no path says so.
    kept = out.read_text().splitlines(keepends=True)
    out.write_text("".join(kept[:1]))
    assert run(llm, batch, *common, "--image-paths", "--resume") == 2
    assert list(map(body, rows(out).values())) == list(map(body, answers.values()))
    closed = tmp_path / "closed.jsonl"
    assert run(llm, batch, "--model", folder, "--output", closed, *FLAGS) == 2
    assert "must begin with data:" in json.dumps(rows(closed)["c1"])


def test_bare_lines(llm: LLM, folder: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    marks = "<vis><image></vis>what?"
    bare = [
        {"id": "text", "prompt": marks, "images": [data_url()], **DRAWN},
        {"id": "ids", "prompt_token_ids": [98, 97, 99, 40], "images": [data_url()], **DRAWN},
        {"id": "none", "prompt": marks, "images": [], **DRAWN},
        {"id": "few", "prompt": "hey", "images": [data_url()], **DRAWN},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in bare))
    assert run(llm, source, "--model", folder, "--output", out, *FLAGS) == 2
    answers = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert answers["text"]["usage"]["prompt_tokens"] == len("what?") + 2 + ROWS
    assert answers["ids"]["usage"]["prompt_tokens"] == 1 + 2 + ROWS
    assert "placeholder" in answers["few"]["error"]["message"]


def test_images_are_decoded_when_their_line_is_admitted(
    llm: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many lines are read ahead, few images are decoded before others are answered."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    # Of no other test: what is alive elsewhere is not prepared again.
    first = picture(size=(20, 16))
    urls = [data_url(png(first + np.uint8(i))) for i in range(40)]
    bodies = [{"messages": seen(url), **DRAWN} for url in urls]
    source.write_text(lines(*bodies))
    reader: Any = llm.session.inputs.images
    prepare, lock = reader._preparer.prepare, threading.Lock()
    decoded, most = 0, 0
    threads = set[str]()

    def counted(pixels: np.ndarray, digest: bytes | None = None) -> Any:
        nonlocal decoded, most
        with lock:
            decoded += 1
            threads.add(threading.current_thread().name)
            done = out.read_text().count("\n") if out.exists() else 0
            most = max(most, decoded - done)
        return prepare(pixels, digest)

    monkeypatch.setattr(reader._preparer, "prepare", counted)
    window = 4 * ENGINE["max_num_seqs"]
    flags = ["--model", folder, "--output", out, *FLAGS, "--window", window]
    assert run(llm, source, *flags) == 0
    assert decoded == 40 and "MainThread" not in threads
    # Those that are being decoded, wait or run, and a step's that are not written yet.
    assert most <= 2 * ENGINE["max_num_seqs"] + MOST_LOADING


def test_check_reads_them_too(
    folder: Path, batch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(batch), "--model", str(folder), *FLAGS, "--check", "--image-paths"]
    assert command.main(argv) == 2
    out = capsys.readouterr().out
    assert "7 (4 can run, 3 errors)" in out and "invalid_image" in out, out
