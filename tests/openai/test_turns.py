"""One request's work does not hold up the others: it is cut into turns."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.request.outputs import CompletionChunk, CompletionOutput, NamedLogprobs, RequestOutput
from tests.text_model import make_tokenizer, write_folder
from tests.tiny import ENGINE

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai import responses
from jpaged.openai.parts import Plain
from jpaged.openai.responses import AnswerForm
from jpaged.openai.server.answers import PART_BYTES, WholeAnswer, json_pieces
from jpaged.openai.server.asked import Asked
from jpaged.openai.server.bodies import ServedCompletion
from jpaged.openai.server.generation import LONG_BODY, MOST_A_TURN, MOST_LONG
from tests.openai.live import Live, serving

SIZES = (
    *("block_size", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("max_logprobs", "max_logit_bias", "max_stop_ids"),
)
SETTINGS: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES} | {"num_blocks": 256}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_folder(tmp_path_factory.mktemp("turns") / "tiny")
    with serving(LLM(folder, max_num_seqs=8, **SETTINGS), max_waiting=1000) as live:
        yield live


def asked(**body: Any) -> Asked:
    read = ServedCompletion.read({"prompt": "a", **body})
    return Asked(
        body=read,
        params=SamplingParams(n=body.get("n", 1)),
        prompts=[],
        form=AnswerForm(top=3),
        model="tiny",
        name="name",
        echo=None,
        reader=Plain,
    )


def output(num_tokens: int, n: int = 1) -> RequestOutput:
    """With three alternatives of each token, of prompt and answer."""
    tokenizer = make_tokenizer()
    rows = [[(t % 90 + i, -0.5 - i, i + 1) for i in range(3)] for t in range(num_tokens)]
    completions = [
        CompletionOutput(
            index=i,
            text="x" * num_tokens,
            token_ids=[t % 90 for t in range(num_tokens)],
            token_logprobs=np.full(num_tokens, -0.5, np.float32),
            cumulative_logprob=-0.5 * num_tokens,
            logprobs=NamedLogprobs(rows, tokenizer),
            finish_reason="length",
        )
        for i in range(n)
    ]
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=list(range(num_tokens)),
        prompt_logprobs=NamedLogprobs([None, *rows[1:]], tokenizer),
        outputs=completions,
    )


def parts_of(answer: WholeAnswer) -> list[bytes]:
    parts = [answer.next(None)]
    while not answer.is_ended:
        parts.append(answer.next(None))
    return parts


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize(("num_tokens", "n"), [(3, 1), (2000, 2)])
def test_a_whole_answer_is_made_in_parts(num_prompts: int, num_tokens: int, n: int):
    outputs = [output(num_tokens, n) for _ in range(num_prompts)]
    whole = asked(n=n, logprobs=3, prompt_logprobs=3)
    parts = parts_of(WholeAnswer(whole, outputs))
    body, size = json.loads(b"".join(parts)), sum(map(len, parts))
    assert len(parts) >= max(size // (2 * PART_BYTES), 1)
    assert all(len(part) < 2 * PART_BYTES for part in parts), "a part took more than its turn"
    wanted = json.loads(json.dumps(responses.completion(outputs[0], whole.form, **whole.how)))
    assert len(body["choices"]) == num_prompts * n
    for i, choice in enumerate(body["choices"]):
        of_prompt = choice.pop("prompt_logprobs", None)
        assert choice == wanted["choices"][i % n] | {"index": i}
        is_first = num_prompts > 1 and i % n == 0
        assert of_prompt == (wanted["prompt_logprobs"] if is_first else None)
    if num_prompts == 1:
        assert body["prompt_logprobs"] == wanted["prompt_logprobs"]
    assert body["usage"]["completion_tokens"] == num_prompts * n * num_tokens


VALUES = [
    *({}, [], [[]], {"a": {}}, "text", None, 1.5, {"é": ["\ud83d"]}),
    {"a": list(range(100)), "b": [{"c": [None] * 50}] * 40, "d": {"e": [], "f": "g"}},
]


@pytest.mark.parametrize("value", VALUES)
def test_json_in_pieces_is_json(value: Any):
    pieces = list(json_pieces(value))
    assert json.loads(b"".join(pieces)) == value
    assert json.loads(b"".join(json_pieces({"a": iter([value] * 40)}))) == {"a": [value] * 40}
    assert b"".join(json_pieces(iter(()))) == b"[]"


class Counted:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: Any, **how: Any) -> str:
        self.decoded += 1
        return self._tokenizer.decode(ids, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_logprobs_are_named_when_they_are_read(tmp_path: Path):
    """Not in the engine's thread, for which everybody waits; each token once."""
    tokenizer: Any = Counted(make_tokenizer())
    llm = LLM(write_folder(tmp_path / "tiny"), tokenizer=tokenizer, max_num_seqs=4, **SETTINGS)
    params = SamplingParams(max_tokens=8, n=2, logprobs=3, prompt_logprobs=3, ignore_eos=True)
    (out,) = llm.generate([[5, 6, 7] * 10], params, use_tqdm=False)
    assert tokenizer.decoded == len(out.outputs), "one text a completion, and no token of logprobs"
    assert out.prompt_logprobs is not None and out.outputs[0].logprobs is not None
    named = list(out.prompt_logprobs)
    assert named[0] is None and all(len(entries or ()) >= 3 for entries in named[1:])
    before = tokenizer.decoded
    assert before < 30 * 3 and list(out.prompt_logprobs) == named
    assert tokenizer.decoded == before


def test_a_stream_of_many_pieces_gives_others_turns(live: Live):
    """The event loop comes to others between the pieces of one step."""
    generation: Any = live.server._generation
    top, count = 20, 128
    row = [[(i, -1.0, i) for i in range(top)]]
    chunks = [
        CompletionChunk(
            request_index=0,
            index=i,
            text_delta="a",
            token_ids_delta=[1],
            finish_reason=None,
            token_logprobs_delta=[-1.0],
            logprobs_delta=NamedLogprobs(row, None),
        )
        for i in range(count)
    ]
    news = [(0, chunk) for chunk in chunks]
    turns: list[int] = []

    async def run() -> None:
        served = asked(n=count, logprobs=5, stream=True)
        served = dataclasses.replace(served, form=AnswerForm(top=top), prompts=[None])

        async def done(*_: Any, **__: Any) -> None:
            return None

        class Ended(Exception):
            pass

        async def pass_on(use: Any) -> Any:
            assert not use(news), "it is too much for one turn"
            raise Ended

        exchange = SimpleNamespace(
            status=200, begin=done, write=done, write_piece=done, is_ready=True
        )
        watch = SimpleNamespace(chunk=lambda *_: None)

        async def others() -> None:
            while True:
                turns.append(1)
                await asyncio.sleep(0)

        beside = asyncio.ensure_future(others())
        inbox = SimpleNamespace(pass_on=pass_on)
        with pytest.raises(Ended):
            await generation._stream(exchange, served, inbox, news, watch)
        beside.cancel()

    asyncio.run(run())
    assert len(turns) >= count * (top + 1) // (MOST_A_TURN + top + 1)


def test_a_bystander_is_not_behind_all_prompts_of_another(live: Live):
    prompts = [[5 + (i + j) % 80 for j in range(20)] for i in range(100)]
    body = {"prompt": prompts, "max_tokens": 20, "ignore_eos": True, "stream": True, "seed": 1}
    with live.begin(COMPLETIONS, body):
        live.post(COMPLETIONS, {"prompt": "a bystander", "max_tokens": 1})
        left = live.call(lambda llm: len(llm.session.engine.requests))
    assert left > 50, "most of the other's prompts came first"
    live.assert_nothing_left()


def test_a_bystander_finds_a_row(live: Live):
    """Beside one request with more completions than there are rows."""
    body = {"prompt": "a", "n": 24, "max_tokens": 40, "ignore_eos": True, "stream": True, "seed": 1}
    with live.begin(COMPLETIONS, body):
        live.post(COMPLETIONS, {"prompt": "a bystander", "max_tokens": 1})
        running = live.call(lambda llm: len(llm.session.engine.replicas[0].queues.waiting))
    assert running > 0, "the other's completions came first"
    live.assert_nothing_left()


def test_long_bodies_leave_threads_to_others(live: Live):
    """As many are read and tokenized at once as leave some of the threads free."""
    generation: Any = live.server._generation
    at_once: list[int] = []
    running = 0

    async def run() -> None:
        async def work() -> None:
            nonlocal running
            running += 1
            at_once.append(running)
            await asyncio.sleep(0.001)
            running -= 1

        class Prepared:
            async def prepare(self, function: Any) -> None:
                await function()

        stand_in = SimpleNamespace(_reading_long=asyncio.Semaphore(MOST_LONG), _llm=Prepared())
        prepare = type(generation).prepare
        await asyncio.gather(*(prepare(stand_in, LONG_BODY + 1, work) for _ in range(9)))
        assert max(at_once) == MOST_LONG
        await asyncio.gather(*(prepare(stand_in, 10, work) for _ in range(9)))
        assert max(at_once) == 9

    asyncio.run(run())
