"""Models by name: huggingface_hub's cache as it lies on disk, and a server that speaks its
protocol on this machine.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

import jpaged
from jpaged import CheckpointError, SamplingParams
from jpaged.checkpoint.hub import local_folder
from jpaged.integrations.batch import command as serve_batch
from tests.golden.reference import load

NAME = "someone/tiny-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
GOLDEN = load("qwen2_g7_d32_tied")


class Hub(BaseHTTPRequestHandler):
    """The Hub's protocol, as far as a snapshot needs it. asked: paths of files that were read."""

    def __init__(self, folder: Path, asked: list[str], *args: Any):
        self.folder, self.asked = folder, asked
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if f"/{NAME}/" not in f"{path}/":
            kind = "GatedRepo" if "gated" in path else "RepoNotFound"
            self.send(403 if "gated" in path else 404, b"", {"X-Error-Code": kind})
        elif path.startswith("/api/") and "/other" in path:
            self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            body = [
                {"type": "file", "path": name, "size": len(data), "oid": digest(data)}
                for name, data in self.files().items()
            ]
            self.send(200, json.dumps(body).encode(), {})
        elif path.startswith(f"/api/models/{NAME}"):
            names = [{"rfilename": name} for name in self.files()]
            info = {"id": NAME, "sha": COMMIT, "siblings": names}
            self.send(200, json.dumps(info).encode(), {})
        else:
            name = path.split("/resolve/")[1].partition("/")[2]
            data = self.files()[name]
            if with_body:
                self.asked.append(name)
            headers = {"ETag": f'"{digest(data)}"', "X-Repo-Commit": COMMIT}
            self.send(200, data, headers, with_body=with_body)

    def files(self) -> dict[str, bytes]:
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}

    def send(
        self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and self.command == "GET":
            self.wfile.write(body)


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, offline as all tests are."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server of one model at HF_ENDPOINT: the files that it was asked for."""
    folder = GOLDEN.write(tmp_path / "served", shards=2)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "README.md").write_text("# a model")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"the same in another layout")
    (folder / "consolidated.safetensors").write_bytes(b"and in a third")
    names: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder, names))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    yield names
    server.shutdown()
    thread.join()
    server.server_close()


def in_cache(cache: Path, *, weights: bool = True) -> Path:
    """The model as huggingface_hub keeps it: blobs, and a snapshot of links to them."""
    root = cache / ("models--" + NAME.replace("/", "--"))
    snapshot, blobs, made = root / "snapshots" / COMMIT, root / "blobs", root / "made"
    for path in (snapshot, blobs, root / "refs"):
        path.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for file in GOLDEN.write(made).iterdir():
        if weights or file.suffix == ".json":
            blob = blobs / digest(file.read_bytes())
            file.rename(blob)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_the_cache_without_network(cache: Path) -> None:
    snapshot = in_cache(cache)
    for name in (NAME, f"{NAME}@main", f"{NAME}@{COMMIT}"):
        assert local_folder(name) == snapshot
    params = jpaged.load_params(NAME)
    assert params.source == snapshot and params.config.family == "qwen2"
    np.testing.assert_array_equal(
        params["embed"]["weight"], GOLDEN.tensors()["model.embed_tokens.weight"]
    )


@pytest.mark.parametrize("half", [False, True], ids=["nothing", "no weights"])
def test_not_in_the_cache_and_no_network(cache: Path, half: bool) -> None:
    """Both say what to do; a snapshot without weights is as good as none."""
    if half:
        in_cache(cache, weights=False)
        assert local_folder(NAME, weights=False).is_dir()
    with pytest.raises(CheckpointError) as caught:
        jpaged.load_params(NAME)
    said = str(caught.value)
    assert said.startswith(f"{NAME}: no such folder") and str(cache) in said
    assert f"hf download {NAME}" in said and "\n" not in said


def test_a_folder_of_that_name_comes_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_cache(cache)
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder(NAME) == tmp_path / NAME


@pytest.mark.parametrize(
    "name", ["nowhere", "a/b/c", "./a/b", "/a/b", "~/a", "a/../b", Path("a/b")]
)
def test_what_is_no_name(name: Any) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        jpaged.load_params(name)
    assert local_folder(name) == Path(name).expanduser().absolute()


def test_fetching(asked: list[str], cache: Path) -> None:
    """What describes the model first; then its weights; then nothing, since all is there."""
    few = local_folder(NAME, weights=False)
    assert sorted(asked) == ["config.json", "tokenizer_config.json"]
    assert jpaged.ModelConfig.coerce(few).family == "qwen2"
    del asked[:]
    llm = jpaged.LLM(NAME, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
    assert sorted(asked) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    prompt = GOLDEN.prompts[0]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.generate(prompt.token_ids, greedy, use_tqdm=False)
    assert output.outputs[0].token_ids == prompt.greedy[:8]
    llm.close()
    del asked[:]
    assert local_folder(NAME) == few and not asked


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("someone/else", "it is not there, or private: then log in"),
        ("someone/gated", "it is gated: accept its terms"),
        (f"{NAME}@other", "it has no revision 'other'"),
    ],
)
def test_refusals_of_the_hub(asked: list[str], name: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        jpaged.load_params(name)


def test_batch_files(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check reads no weights; what cannot be had is one sentence."""
    lines = tmp_path / "in.jsonl"
    lines.write_text(json.dumps({"prompt_token_ids": [3, 4, 5]}) + "\n")
    arguments = [str(lines), "--output", str(tmp_path / "out.jsonl"), "--model", NAME]
    assert serve_batch.main([*arguments, "--check"]) == 1
    assert f"hf download {NAME}" in capsys.readouterr().err
    in_cache(cache, weights=False)
    assert serve_batch.main([*arguments, "--check", "--max-model-len", "64"]) == 0
