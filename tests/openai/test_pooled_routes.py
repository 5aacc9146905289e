"""Embeddings, scores of pairs, ranks and labels: from a server, and from lines of a batch file."""

import base64
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged import LLM, ModelConfig
from tests.batch_engine import FakeLLM, serve
from tests.text_model import write_folder
from tests.tiny import CONFIG, ENGINE

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from tests.openai.live import Live, serving

SETTINGS: dict[str, Any] = {"block_size": ENGINE.block_size, "num_blocks": ENGINE.num_blocks}
TEXTS = ["hello there", "hey", "something else, and longer"]
EMBEDDINGS = "/v1/embeddings"


def classifier_folder(path: Path, labels: int) -> Path:
    """A folder of the tiny model with a head of labels."""
    switches = dataclasses.asdict(CONFIG.switches)
    del switches["rope"], switches["attention"], switches["experts"], switches["router"]
    config = ModelConfig(
        family=CONFIG.family,
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        max_position_embeddings=CONFIG.max_position_embeddings,
        eos_token_ids=CONFIG.eos_token_ids,
        num_labels=labels,
        **switches,
    )
    folder = write_folder(path, config=config)
    file = folder / "model.safetensors"
    score = np.random.default_rng(labels).standard_normal((labels, config.hidden_size))
    save_file(load_file(file) | {"score.weight": score.astype(np.float32)}, file)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("embeddings") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder, **SETTINGS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with serving(LLM(folder, **SETTINGS)) as live:
        yield live


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    llm = LLM(classifier_folder(tmp_path_factory.mktemp("reward") / "one", 1), **SETTINGS)
    yield llm
    llm.close()


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "live" in request.fixturenames:
        request.getfixturevalue("live").assert_nothing_left()


def test_embeddings(live: Live, llm: LLM) -> None:
    answer = live.post(EMBEDDINGS, {"input": TEXTS, "model": "tiny", "user": "me"})
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    expected = llm.embed(TEXTS)
    ours = np.array([entry["embedding"] for entry in answer["data"]], np.float32)
    np.testing.assert_array_equal(ours, expected)
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    count = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    packed = live.post(EMBEDDINGS, {"input": TEXTS[1], "encoding_format": "base64"})
    raw = base64.b64decode(packed["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), expected[1])
    short = live.post(EMBEDDINGS, {"input": TEXTS, "dimensions": 4})["data"][2]["embedding"]
    np.testing.assert_array_equal(np.array(short, np.float32), llm.embed(TEXTS, dimensions=4)[2])
    ids = live.post(EMBEDDINGS, {"input": [[40, 41], [42]], "normalize": False})["data"]
    plain = llm.embed([[40, 41], [42]], normalize=False)
    np.testing.assert_array_equal(np.array([x["embedding"] for x in ids], np.float32), plain)
    one = live.post(EMBEDDINGS, {"input": [40, 41], "truncate_prompt_tokens": 1})["data"]
    np.testing.assert_array_equal(np.array(one[0]["embedding"], np.float32), llm.embed([[41]])[0])


def test_a_salt_keeps_prefixes_apart(live: Live) -> None:
    """A text is found again under the salt that it came with, and under no other."""
    text = "a long text of that salt alone"
    found: list[int] = []
    for salt in ("one", "two", "one"):
        before = live.call(lambda llm: llm.stats()["prefill_tokens"])
        live.post(EMBEDDINGS, {"input": text, "cache_salt": salt})
        found.append(live.call(lambda llm: llm.stats()["prefill_tokens"]) - before)
    assert found[0] == found[1] > found[2]


def test_beside_what_is_generated(live: Live) -> None:
    """One batch with a stream, whose tokens are as if alone."""
    body = {"prompt": "hello there", "seed": 3, "max_tokens": 30, "ignore_eos": True}
    alone = live.post("/v1/completions", body)["choices"][0]["text"]
    with live.begin("/v1/completions", body | {"stream": True}) as connection:
        assert len(live.post(EMBEDDINGS, {"input": TEXTS})["data"]) == 3
        raw = b""
        while b"[DONE]" not in raw:
            raw += connection.recv(1 << 16)
    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line[:7] == "data: {"]
    assert "".join(event["choices"][0]["text"] for event in events) == alone


def test_scores_and_ranks_by_cosine(live: Live, llm: LLM) -> None:
    vectors = llm.embed(TEXTS)
    cosines = vectors @ vectors[0]
    for path, body in (
        ("/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
        ("/v1/score", {"queries": [TEXTS[0]], "documents": TEXTS}),
    ):
        scores = [entry["score"] for entry in live.post(path, body)["data"]]
        np.testing.assert_allclose(scores, cosines, atol=1e-6)
    pairs = live.post("/score", {"queries": TEXTS, "documents": TEXTS})["data"]
    np.testing.assert_allclose([entry["score"] for entry in pairs], 1, atol=1e-5)
    order = np.argsort(-cosines, kind="stable")
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = live.post(path, {"query": TEXTS[0], "documents": TEXTS, "top_n": 2})
        assert [result["index"] for result in answer["results"]] == order[:2].tolist()
        best = answer["results"][0]
        assert best["document"] == {"text": TEXTS[0]} and best["relevance_score"] > 0.999


def test_labels(reward: LLM, tmp_path: Path) -> None:
    three = LLM(classifier_folder(tmp_path / "three", 3), **SETTINGS)
    logits = three.classify(TEXTS)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    with serving(three) as live:
        data = live.post("/classify", {"input": TEXTS})["data"]
        probs = powers / powers.sum(axis=1, keepdims=True)
        np.testing.assert_allclose([x["probs"] for x in data], probs, rtol=1e-5)
        assert [x["label"] for x in data] == [f"LABEL_{i}" for i in logits.argmax(axis=1)]
        raw = live.post("/classify", {"input": TEXTS, "use_activation": False})["data"]
        np.testing.assert_allclose([x["probs"] for x in raw], logits, rtol=1e-6)
        status, error, _ = live.request("/score", {"queries": "a", "documents": "b"})
        assert status == 400 and "has 3 labels" in error["error"]["message"]
        status, error, _ = live.request("/v1/completions", {"prompt": "hey"})
        assert status == 400 and "no vocabulary" in error["error"]["message"]
        live.assert_nothing_left()


def test_pairs_by_a_head_of_one_label(folder: Path, reward: LLM) -> None:
    """The two texts one after the other, as the tokenizer joins them."""
    pairs = [reward.tokenizer.encode(TEXTS[0], text) for text in TEXTS]
    logits = reward.classify(pairs)[:, 0]
    with serving(LLM(reward.session.inputs._source or folder, **SETTINGS)) as live:
        data = live.post("/score", {"queries": TEXTS[0], "documents": TEXTS})["data"]
        np.testing.assert_allclose([x["score"] for x in data], 1 / (1 + np.exp(-logits)), rtol=1e-5)
        ranked = live.post(
            "/rerank",
            {
                "query": TEXTS[0],
                "documents": TEXTS,
                "use_activation": False,
                "return_documents": False,
            },
        )["results"]
        order = np.argsort(-logits, kind="stable")
        assert [x["index"] for x in ranked] == order.tolist() and "document" not in ranked[0]
        np.testing.assert_allclose([x["relevance_score"] for x in ranked], logits[order], rtol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "said", "param"),
    [
        (EMBEDDINGS, {}, "a request needs input", "input"),
        (EMBEDDINGS, {"input": []}, "prompt [] is empty", None),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "at most 2048", "input"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions=0", "dimensions"),
        (EMBEDDINGS, {"input": "a", "dimensions": 1000}, "dimensions=1000: must be", None),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format=", None),
        (EMBEDDINGS, {"input": "a" * 100}, "longer than max_model_len", None),
        (EMBEDDINGS, {"input": [[5000]]}, "5000", None),
        (EMBEDDINGS, {"input": "a", "model": "other"}, "not served here", "model"),
        (EMBEDDINGS, {"input": "a", "priority": 1}, "priority=1", "priority"),
        (EMBEDDINGS, {"input": "a", "cache_salt": ""}, "cache_salt=", "cache_salt"),
        (EMBEDDINGS, {"input": "a", "add_special_tokens": False}, "add_special_tokens=", None),
        ("/classify", {"input": "a"}, "no head of labels", None),
        ("/score", {"queries": "a"}, "documents or text_2: this one has neither", None),
        ("/score", {"queries": ["a", "b"], "documents": ["c"]}, "2 queries and 1 doc", None),
        ("/score", {"queries": "a", "text_1": "a", "documents": "c"}, "has both", None),
        ("/rerank", {"query": "a", "documents": []}, "documents=", "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n=-1", "top_n"),
    ],
)
def test_bad_requests(
    live: Live, path: str, body: dict[str, Any], said: str, param: str | None
) -> None:
    status, answer, _ = live.request(path, body)
    assert status in (400, 404) and said in answer["error"]["message"], answer
    if param is not None:
        assert answer["error"]["param"] == param


def batch_line(name: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def test_lines_of_a_batch_file(
    folder: Path, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of every kind side by side, good and bad: each has its own answer."""
    lines = [
        batch_line("a", EMBEDDINGS, {"input": TEXTS}),
        batch_line("b", "/v1/completions", {"prompt": "hey", "max_tokens": 3}),
        batch_line("c", EMBEDDINGS, {"input": TEXTS[0], "dimensions": 3}),
        batch_line("d", "/v1/rerank", {"query": TEXTS[0], "documents": TEXTS}),
        batch_line("e", EMBEDDINGS, {"input": "x" * 100}),
        batch_line("f", EMBEDDINGS, {"input": TEXTS[0], "dimensions": 1000}),
        batch_line("g", "/v1/score", {"queries": TEXTS[0], "documents": TEXTS}),
        batch_line("h", EMBEDDINGS, {"input": TEXTS[0], "dimensions": 3}),
        batch_line("i", "/v1/score", {"queries": "a"}),
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert serve(source, "--output", output, "--ordered", llm=LLM(folder, **SETTINGS)) == 2
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == list("abcdefghi")
    bodies = {row["custom_id"]: row["response"]["body"] for row in rows}
    vectors = llm.embed(TEXTS)
    made = np.array([x["embedding"] for x in bodies["a"]["data"]], np.float32)
    np.testing.assert_array_equal(made, vectors)
    assert bodies["a"]["id"] == "embd-1" and bodies["a"]["usage"]["prompt_tokens"] > 0
    assert bodies["b"]["usage"]["completion_tokens"] == 3
    short = llm.embed(TEXTS[:1], dimensions=3)[0]
    for name in "ch":
        np.testing.assert_array_equal(
            np.array(bodies[name]["data"][0]["embedding"], np.float32), short
        )
    assert bodies["d"]["results"][0]["index"] == 0
    np.testing.assert_allclose(
        [entry["score"] for entry in bodies["g"]["data"]], vectors @ vectors[0], atol=1e-6
    )
    statuses = [row["response"]["status_code"] for row in rows]
    assert statuses == [200, 200, 200, 200, 400, 400, 200, 200, 400]
    for name, said in (
        ("e", "longer than max_model_len"),
        ("f", "dimensions=1000"),
        ("i", "neither"),
    ):
        assert said in bodies[name]["error"]["message"]
    capsys.readouterr()
    assert serve(source, "--check", "--model", folder) == 2  # three lines cannot run
    assert "9 (6 can run, 3 errors)" in capsys.readouterr().out.replace("  ", " ")


def test_replicas_on_ray_say_that_they_do_not(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(batch_line("a", EMBEDDINGS, {"input": "hey"})) + "\n")
    far = FakeLLM()
    far.is_remote = True  # pyright: ignore[reportAttributeAccessIssue]
    assert serve(source, "--output", output, llm=far) == 2
    (row,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert "replicas on Ray" in row["response"]["body"]["error"]["message"]
