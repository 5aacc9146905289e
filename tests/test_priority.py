"""`priority` of a request reaches the scheduler from LLM and AsyncLLM, whichever way it is given.

Servers, batch lines and Ray have tests of their own: openai/test_sharing.py, integrations/.
"""

import asyncio

import pytest

from jpaged import LLM, AsyncLLM, SamplingParams
from jpaged.engine.policy import Policy
from jpaged.engine.sequence import Sequence
from tests.tiny import ENGINE, make_params


def test_every_call_passes_a_priority_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    add = Policy.add

    def noted(self: Policy, seq: Sequence) -> None:
        seen.append(seq.priority)
        add(self, seq)

    monkeypatch.setattr(Policy, "add", noted)
    llm = LLM(make_params(), **{k: v for k, v in vars(ENGINE).items() if v is not None})

    def asked(priority: int) -> SamplingParams:
        return SamplingParams(priority=priority, max_tokens=2)

    llm.generate([[5, 6], [7]], [asked(1), asked(2)], use_tqdm=False)
    list(llm.stream([[5, 6]], asked(3)))
    llm.add_request([5, 6], asked(4))
    while llm.has_unfinished():
        llm.step()

    async def ask() -> None:
        async with AsyncLLM(llm) as served:
            await served.complete([5, 6], asked(5))
            async for _ in served.generate([5, 6], asked(6)):
                pass

    asyncio.run(ask())
    assert seen == [1, 2, 3, 4, 5, 6]
