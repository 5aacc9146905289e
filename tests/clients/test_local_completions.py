"""lm-eval's local-completions against a server, beside JPagedLM: the same figures by HTTP."""

from collections.abc import Iterator
from typing import Any

import pytest
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.models.openai_completions import (  # pyright: ignore[reportMissingImports]
    LocalCompletionsAPI,
)

from jpaged import LLM
from jpaged.demo import MODEL_PATH
from jpaged.integrations.lm_eval import JPagedLM
from tests.openai.live import Live, serving

pytestmark = pytest.mark.clients
SIZES: dict[str, Any] = {
    "token_buckets": (64,),
    "seq_buckets": (8,),
    "max_num_batched_tokens": 64,
    "num_blocks": 64,
}
PAIRS = [
    ("import os\n", "import sys\n"),
    ("def f(self, x):\n    return", " x + 1"),
    ("for i in range(", "10):"),
    ("class A:\n", "    pass"),
    ("import", " os"),
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = LLM(str(MODEL_PATH), dtype="float32", max_num_seqs=8, max_model_len=256, **SIZES)
    with serving(llm, models=("demo",)) as live:
        yield live


def instances(kind: str, arguments: list[Any]) -> list[Any]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihoods_and_texts(live: Live, batch_size: int):
    there = LocalCompletionsAPI(
        base_url=f"http://127.0.0.1:{live.port}/v1/completions",
        model="demo",
        tokenizer=str(MODEL_PATH),
        tokenizer_backend="huggingface",
        max_length=256,
        batch_size=batch_size,
        num_concurrent=2,
        max_retries=1,
    )
    here = JPagedLM(str(MODEL_PATH), dtype="float32", max_length=256, batch_size=8, **SIZES)
    asked = instances("loglikelihood", PAIRS)
    expected = here.loglikelihood(asked, disable_tqdm=True)
    found = there.loglikelihood(asked, disable_tqdm=True)
    for (logprob, greedy), (own, own_greedy) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(own, abs=2e-3) and greedy == own_greedy
    until = instances(
        "generate_until", [(p, {"until": ["\n"], "max_gen_toks": 16}) for p, _ in PAIRS]
    )
    assert there.generate_until(until, disable_tqdm=True) == here.generate_until(
        until, disable_tqdm=True
    )
    live.assert_nothing_left()
