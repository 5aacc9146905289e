"""tests/soak.py: a short soak passes, and each kind of failure is seen, said and turned into exit
status 1.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jpaged
from jpaged import LLM, CompletionOutput, RequestError, RequestOutput, SamplingParams
from jpaged.engine.cache.block_manager import BlockManager
from tests import soak
from tests.text_model import write_folder
from tests.tiny import config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(
        tmp_path_factory.mktemp("soak") / "model",
        config=config(max_position_embeddings=soak.CONTEXT),
    )


@pytest.fixture(scope="module")
def llms() -> dict[str, LLM]:
    return {}


@pytest.fixture
def tiny(folder: Path, llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, and LLMs that are compiled once for all tests, whatever state the last one
    left them in.
    """

    def kept(params: Any, **how: Any) -> LLM:
        name = str({**how, "seed": None})
        if name not in llms:
            llms[name] = LLM(params, **how)
        llm = llms[name]
        engine = llm.session.engine
        for request_id in list(engine.requests):
            llm.abort(request_id)
        llm.session.ready.clear()
        engine.recover()
        return llm

    monkeypatch.setattr(soak, "MODEL_PATH", folder)
    monkeypatch.setattr(soak, "SWAP_GIB", 32 * 4096 / 2**30)
    monkeypatch.setattr(jpaged, "LLM", kept)


@pytest.fixture
def calm(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy requests and nothing between them: two steps to compile."""
    monkeypatch.setattr(soak, "KINDS", soak.KINDS[:1])
    monkeypatch.setattr(soak, "RATES", {})


@pytest.mark.slow
def test_a_short_soak(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "RATES", {"abort": 0.1, "reset": 0.1, "snapshot": 0.1, "beam": 0.1})
    monkeypatch.setattr(soak, "ALONE", 0.5)
    flags = [
        "--requests",
        "40",
        "--seed",
        "1",
        "--num-blocks",
        "60",
        "--interval",
        "0.5",
        "--warmup",
        "10",
    ]
    status = soak.main([*flags, "--memory-every", "2", "--memory-limit", "1000"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    head, columns, *lines, last = out.splitlines()
    assert head.startswith("seed 1; 24 requests need about") and columns.split()[:2] == [
        "minutes",
        "requests",
    ]
    _, done, _, swapped, recomputed, copied, _, memory = map(float, lines[-1].split())
    assert swapped > 0 and recomputed > 0 and copied > 0 and memory > 0
    assert last.startswith(f"ok: {done:.0f} requests, ") and done < 40  # some were aborted
    assert all(f"{name} 0" not in last for name in soak.RATES), last
    assert " 0 equal to themselves alone" not in last


def test_a_leaked_block_is_seen(
    calm: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free, leaked = BlockManager.free, []

    def leak(self: BlockManager, seq: Any) -> None:
        if seq.block_tables and not leaked:
            leaked.append(seq.block_tables[0][0])
            self.groups[0].blocks[leaked[0]].ref_count += 1
        free(self, seq)

    monkeypatch.setattr(BlockManager, "free", leak)
    assert soak.main(["--num-blocks", "60", "--requests", "3"]) == 1
    out, err = capsys.readouterr()
    assert (
        err.endswith("soak: seed 0, after 3 requests: at the end blocks_in_use is 1\n")
        and "ok:" not in out
    )


def test_growing_memory_is_seen(
    calm: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = iter(range(100, 1000, 5))
    monkeypatch.setattr(soak, "rss_mib", lambda: float(next(sizes)))
    assert (
        soak.main(
            [
                "--num-blocks",
                "60",
                "--requests",
                "6",
                "--warmup",
                "0",
                "--memory-every",
                "1",
                "--memory-limit",
                "0",
            ]
        )
        == 1
    )
    # One more look at it where the machine is busy.
    grew = r"resident memory grew by (20|25|30)\.0 MiB, above the limit of 0"
    assert re.search(grew, capsys.readouterr().err)


def test_other_tokens_and_errors_are_seen(
    calm: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = LLM.generate

    def other(self: LLM, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        outs = generate(self, *args, **kwargs)
        outs[0].outputs[0].token_ids[0] ^= 1
        outs[0].outputs[0].token_logprobs -= 1.0
        return outs

    monkeypatch.setattr(soak, "ALONE", 1.0)
    monkeypatch.setattr(LLM, "generate", other)
    assert soak.main(["--num-blocks", "60", "--requests", "3"]) == 1
    assert "soak: seed 0, after 1 requests: SamplingParams(" in (err := capsys.readouterr().err)
    assert err.endswith("from token 0 on\n")

    def broken(self: LLM) -> list[RequestOutput]:
        raise RequestError("broken")

    monkeypatch.setattr(LLM, "step", broken)
    assert soak.main(["--num-blocks", "60", "--requests", "3"]) == 1
    assert "Traceback" in (err := capsys.readouterr().err) and err.endswith(
        "after 0 requests: broken\n"
    )
    monkeypatch.setattr(LLM, "step", lambda self: [])
    monkeypatch.setattr(soak, "STUCK", 10)
    assert soak.main(["--num-blocks", "60", "--requests", "3"]) == 1
    assert "nothing ended in 10 steps, 3 requests are unfinished" in capsys.readouterr().err


PARAMS = SamplingParams(max_tokens=3, min_tokens=1, logprobs=1, prompt_logprobs=1)


def output(**changes: Any) -> RequestOutput:
    """A legal result of PARAMS for the prompt [1, 2] but for the changes."""
    own = {"error", "prompt_token_ids", "prompt_logprobs"}
    c: dict[str, Any] = {"index": 0, "text": "", "token_ids": [4, 5, 6], "cumulative_logprob": 0.0}
    c |= {
        "token_logprobs": np.zeros(3, np.float32),
        "logprobs": [{}, {}, {}],
        "finish_reason": "length",
    }
    c |= {name: value for name, value in changes.items() if name not in own}
    out: dict[str, Any] = {
        "request_id": "0",
        "prompt": None,
        "prompt_token_ids": [1, 2],
        "prompt_logprobs": [None, {}],
    }
    out |= {name: value for name, value in changes.items() if name in own}
    return RequestOutput(outputs=[CompletionOutput(**c)], **out)


def check(out: RequestOutput, params: SamplingParams = PARAMS, *more: str) -> None:
    bare = soak.Soak.__new__(soak.Soak)
    bare.vocab_size = 10
    bare.check_legal(out, [1, 2], params, *more)


def test_legal_results_pass() -> None:
    short = {"token_ids": [4, 5], "token_logprobs": np.zeros(2, np.float32), "logprobs": [{}, {}]}
    check(output())
    check(output(finish_reason="stop", **short))
    check(output(finish_reason="abort", prompt_logprobs=None, **short), PARAMS, "abort")


@pytest.mark.parametrize(
    "changes",
    [
        {"error": RequestError("no")},
        {"prompt_token_ids": [1, 3]},
        {"prompt_logprobs": [None]},
        {"index": 1},
        {"token_ids": [4, 5, 10]},
        {"token_ids": [4, 5, -1]},
        {"token_ids": [4, 5]},
        {"token_ids": [4, 5, 6, 7]},
        {"token_logprobs": np.array([0, np.nan, 0], np.float32)},
        {"token_logprobs": np.zeros(2, np.float32)},
        {"logprobs": None},
        {"finish_reason": None},
        {"finish_reason": "abort"},
        {
            "finish_reason": "stop",
            "token_ids": [4],
            "token_logprobs": np.zeros(1, np.float32),
            "logprobs": [{}],
        },
    ],
    ids=str,
)
def test_illegal_results_do_not(changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="not a legal result"):
        check(output(**changes))


def test_growth() -> None:
    assert soak.growth([]) == soak.growth([1.0, 9.0]) == 0.0
    assert (
        soak.growth([5.0, 5.0, 9.0, 0.0, 0.0, 0.0, 6.0, 6.0, 5.0]) == 1.0
    )  # a lone peak says nothing


def test_is_over_by_the_clock_or_by_a_count() -> None:
    bare = soak.Soak.__new__(soak.Soak)
    bare.args, bare.began = argparse.Namespace(steps=None, requests=None, minutes=0.0), 0.0
    assert bare.is_over()
    bare.args.minutes = float("inf")
    assert not bare.is_over()
    bare.args.steps = bare.steps = 3
    assert bare.is_over()
    bare.steps = 2
    assert not bare.is_over()


@pytest.mark.slow
def test_two_minutes_on_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--minutes", "2", "--seed", "2"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.splitlines()[-1].startswith("ok: ")
