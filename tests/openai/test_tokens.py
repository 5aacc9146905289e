"""POST /inference/v1/generate: tokens in and tokens out, in vLLM's form, beside those of LLM."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, RequestError, RequestOutput, SamplingParams
from jpaged.models.config import ModelConfig
from jpaged.models.params import random_params
from tests.text_model import write_folder
from tests.tiny import ENGINE

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.server.token_bodies import ServedTokens
from tests.openai.live import Live, serving

SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
)
SETTINGS: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES}
PATH = "/inference/v1/generate"
IDS = [72, 69, 76, 76, 79]
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "eos_token_id": 96,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokens") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder, **SETTINGS, max_sampling_mask=8)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with serving(LLM(folder, **SETTINGS, max_sampling_mask=8)) as live:
        yield live


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "live" in request.fixturenames:
        request.getfixturevalue("live").assert_nothing_left()


def body_of(ids: list[int] = IDS, **sampling: Any) -> dict[str, Any]:
    return {"token_ids": ids, "sampling_params": {"seed": 3, "max_tokens": 12} | sampling}


def of_library(llm: LLM, **sampling: Any) -> RequestOutput:
    fields: dict[str, Any] = {"seed": 3, "max_tokens": 12} | sampling
    asked = SamplingParams(**fields)
    [output] = llm.generate([IDS], asked, use_tqdm=False)
    return output


def added_up(events: list[Any]) -> list[dict[str, Any]]:
    """The choices of a stream, their lists joined; spans count on from the first token."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"token_ids": [], "weight_versions": []})
            choice["token_ids"] += piece["token_ids"]
            choice["weight_versions"] += piece.get("weight_versions", [])
            for name in ("sampling_mask", "kept_logprobs"):
                if name in piece:
                    choice[name] = choice.get(name, []) + piece[name]
            if (logprobs := piece.get("logprobs")) is not None:
                choice["logprobs"] = choice.get("logprobs", []) + logprobs["content"]
            for name in ("finish_reason", "stop_reason", "routed_experts"):
                if piece.get(name) is not None:
                    choice[name] = piece[name]
    return [choices[index] for index in sorted(choices)]


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "logprobs": 0},
    {"n": 3, "logprobs": 2, "temperature": 1.3, "logprobs_mode": "tempered"},
    {"top_k": 5, "top_p": 0.8, "sampling_mask": True, "logprobs_mode": "processed"},
    {"stop_token_ids": [*range(30, 60)], "ignore_eos": True},
    {"max_tokens": None, "ignore_eos": True, "logit_bias": {"50": 3.0}},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_answers_are_the_librarys(live: Live, llm: LLM, sampling: dict[str, Any]) -> None:
    """And so are the pieces of a stream, added up. What a request leaves open is SamplingParams'
    own and not the checkpoint's, but for the length, which is up to the end of the context.
    """
    asked = dict(sampling)
    if "logit_bias" in asked:
        asked["logit_bias"] = {50: 3.0}
    expected = of_library(llm, **asked)
    answer = live.post(PATH, body_of(**sampling) | {"request_id": "mine", "model": "tiny"})
    assert (answer["request_id"], answer["model"]) == ("mine", "tiny")
    count = sum(len(done.token_ids) for done in expected.outputs)
    usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
    assert {k: v for k, v in answer["usage"].items() if k in usage} == usage
    stream = body_of(**sampling) | {"stream_options": {"include_usage": True}, "request_id": "b"}
    *pieces, last = live.events(PATH, stream)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == count
    assert {event["request_id"] for event in (*pieces, last)} == {"b"}
    streamed = added_up(pieces)
    assert len(answer["choices"]) == len(streamed) == len(expected.outputs)
    for choice, piece, done in zip(answer["choices"], streamed, expected.outputs, strict=True):
        assert choice["index"] == done.index
        assert choice["token_ids"] == piece["token_ids"] == done.token_ids
        for one in (choice, piece):
            assert one["finish_reason"] == done.finish_reason
            assert one.get("stop_reason") == done.stop_reason
        span = {"version": 1, "start": 0, "end": len(done.token_ids)}
        assert choice["weight_versions"] == [span]
        assert sum(s["end"] - s["start"] for s in piece["weight_versions"]) == span["end"]
        assert "text" not in choice
        if "logprobs" in sampling:
            check_logprobs(choice["logprobs"]["content"], done, sampling["logprobs"])
            assert piece["logprobs"] == choice["logprobs"]["content"]
        else:
            assert choice["logprobs"] is None
        if "sampling_mask" in sampling:
            assert done.sampling_mask is not None and done.kept_logprobs is not None
            kept = [ids[ids >= 0].tolist() for ids in done.sampling_mask]
            assert choice["sampling_mask"] == piece["sampling_mask"] == kept
            assert choice["kept_logprobs"] == pytest.approx(done.kept_logprobs.tolist(), abs=1e-6)


def check_logprobs(content: list[Any], done: Any, top: int) -> None:
    for token, one, logprob in zip(done.token_ids, content, done.token_logprobs, strict=True):
        assert one["token"] == f"token_id:{token}"
        assert one["logprob"] == pytest.approx(float(logprob), abs=1e-6)
        best = [entry["logprob"] for entry in one["top_logprobs"]]
        assert len(best) == top and best == sorted(best, reverse=True)
        assert all(entry["token"].startswith("token_id:") for entry in one["top_logprobs"])


def test_the_prompts_logprobs(live: Live, llm: LLM) -> None:
    answer = live.post(PATH, body_of(prompt_logprobs=0))
    first, *others = answer["prompt_logprobs"]
    scores: Any = llm.score([IDS])[0]
    own = [one[str(t)]["logprob"] for t, one in zip(IDS[1:], others, strict=True)]
    assert first is None and own == pytest.approx(scores.tolist(), abs=1e-5)


def test_what_a_stream_has_used(live: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = live.events(PATH, body_of(ignore_eos=True, n=2) | {"stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in pieces]
    assert max(counts) == 12 and all(e["usage"]["prompt_tokens"] == 5 for e in pieces)
    assert last["usage"]["total_tokens"] == 29


def test_ids_that_nobody_gave_differ(live: Live) -> None:
    ids = {live.post(PATH, body_of())["request_id"] for _ in range(3)}
    assert len(ids) == 3


def test_salts_and_priorities(live: Live) -> None:
    """A salt is of the request; a priority changes no token, and may stand in either place."""
    long = body_of([65 + i % 20 for i in range(40)], temperature=0)
    first = live.post(PATH, long | {"cache_salt": "a", "priority": -3})
    again = live.post(PATH, long | {"cache_salt": "a"})
    other = live.post(PATH, long | {"cache_salt": "b"})
    cached = [x["usage"]["prompt_tokens_details"]["cached_tokens"] for x in (first, again, other)]
    assert cached[0] == cached[2] == 0 < cached[1]
    assert first["choices"] == again["choices"] == other["choices"]
    body = body_of(priority=2)
    assert live.post(PATH, body | {"priority": 2})
    assert live.request(PATH, body | {"priority": 1})[1]["error"]["param"] == "priority"


ERRORS: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "invalid_value", "token_ids"),
    ({"token_ids": IDS}, "invalid_value", "sampling_params"),
    (body_of([]), "invalid_value", "token_ids"),
    (body_of([97]), "invalid_value", None),
    (body_of([-1]), "invalid_value", None),
    ({**body_of(), "token_ids": "hello"}, "invalid_value", "token_ids"),
    ({**body_of(), "token_ids": [1.5] * 9}, "invalid_value", "token_ids"),
    (body_of([40] * 64), "context_length_exceeded", None),
    (body_of(temperature=-1), "invalid_value", "temperature"),
    (body_of(max_tokens=0), "invalid_value", "max_tokens"),
    (body_of(n=10**9), "invalid_value", "n"),
    (body_of(logprobs=9), "invalid_value", "logprobs"),
    (body_of(logprobs=True), "invalid_value", "sampling_params"),
    (body_of(repetition_detection={"a": 1}), "unsupported_field", "sampling_params"),
    (body_of(sampling_mask=True), "invalid_value", None),
    (body_of(logit_bias={str(i): 1.0 for i in range(90)}), "invalid_value", "logit_bias"),
    (body_of() | {"features": {"mm_hashes": {}}}, "unsupported_field", "features"),
    (body_of() | {"prompt": "a"}, "unsupported_field", "prompt"),
    (body_of() | {"temperature": 0.5}, "unsupported_field", "temperature"),
    (body_of() | {"request_id": "a" * 300}, "invalid_value", "request_id"),
    (body_of() | {"stream_options": {}}, "invalid_value", "stream_options"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_errors(live: Live, stream: bool) -> None:
    """Each names the field to blame; a field of this route says on others that it is not theirs."""
    for body, code, param in ERRORS:
        sent = body if "stream_options" in body else body | {"stream": stream}
        status, answer, _ = live.request(PATH, sent)
        error = answer["error"]
        assert (status, error["code"]) == (400, code), (body, error)
        assert param is None or error["param"] == param, (body, error)
    status, answer, _ = live.request("/v1/completions", {"prompt": "a", "token_ids": [1]})
    assert (status, answer["error"]["param"]) == (400, "token_ids")
    assert live.request(PATH, body_of() | {"model": "other"})[0] == 404


def test_fields_that_are_unknown_are_told(live: Live) -> None:
    body = body_of(detokenize=False, output_kind=2, whatever=1) | {"program_id": "p"}
    status, _, headers = live.request(PATH, body | {"token_offsets": [[0, 1]]})
    assert status == 200
    assert headers["x-jpaged-ignored-fields"] == "sampling_params.whatever, program_id"


def test_forms() -> None:
    """vLLM's structured_outputs and response_format mean what they mean on other routes."""
    schema = {"type": "object"}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"structured_outputs": {"choice": ["abc"]}}, {"choice": ["abc"]}),
        ({"structured_outputs": {"json": schema}}, {"json_schema": schema}),
        ({"response_format": named}, {"json_schema": schema}),
        ({"structured": {"regex": "a+"}}, {"regex": "a+"}),
    ]
    for form, structured in forms:
        assert ServedTokens.read(body_of(**form)).params(SamplingParams()).structured == structured
    with pytest.raises(RequestError, match="exclude each other"):
        ServedTokens.read(body_of(structured={"regex": "a"}, guided_regex="b"))


def test_a_body_is_small_work_to_refuse() -> None:
    """One fault is told of many."""
    many: Any = {f"x{i}": 1 for i in range(60_000)}
    for wrong in (body_of(**many), body_of([1.5] * 60_000)):  # pyright: ignore[reportArgumentType]
        with pytest.raises(Exception, match=r"sampling_params|token_ids") as caught:
            ServedTokens.read(wrong)
        assert len(str(caught.value)) < 300


def test_routes_of_experts() -> None:
    """In vLLM's form: all tokens but the last, the base64 of an .npy file; at a stream's end."""
    config = ModelConfig.from_hf(MIXTURE)
    llm = LLM(random_params(config, seed=1), **SETTINGS, routed_experts=True)
    expected = of_library(llm, n=2, ignore_eos=True)
    assert expected.prompt_routed_experts is not None
    with serving(llm) as live:
        asked = body_of(n=2, ignore_eos=True)
        answer = live.post(PATH, asked)
        streamed = added_up(live.events(PATH, asked))
        for choice, piece, done in zip(answer["choices"], streamed, expected.outputs, strict=True):
            assert done.routed_experts is not None
            whole = np.concatenate([expected.prompt_routed_experts, done.routed_experts])[:-1]
            for one in (choice, piece):
                taken = np.load(io.BytesIO(base64.b64decode(one["routed_experts"])))
                assert taken.dtype == np.uint8 and taken.shape == (5 + 12 - 1, 2, 2)
                np.testing.assert_array_equal(taken, whole)
        live.assert_nothing_left()
