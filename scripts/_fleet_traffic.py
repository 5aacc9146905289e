"""Traffic for scripts/fleet.py: sessions of several turns over shared system prompts, with lengths
and reuse like public traces'.
"""

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of traffic. Tokens, means of lognormal lengths: first is a session's first message,
    message a later one, answer what is generated. systems: system prompts, of `system` tokens each,
    the k-th as popular as 1 / k. turns: mean number of a session's turns (geometric). think_s:
    mean seconds between an answer and the next message.
    """

    systems: int
    system: int
    first: int
    message: int
    answer: int
    turns: float
    think_s: float
    sigma: float = 1.0


# Chosen so that means of prompts, answers and of what an endless cache would reuse come near those
# that the papers give: Mooncake (FAST '25, table 1): conversation 12,035 tokens in, 343 out, 40%
# reused; tool and agent 8,596, 182, 59%. Azure's 2024 traces have lengths alone: chat of about
# 1,600 in and 110 out, code of about 2,500 and 25; their reuse is a guess.
KINDS = {
    "conversation": Kind(
        systems=200, system=600, first=8700, message=4400, answer=343, turns=1.7, think_s=60.0
    ),
    "tools": Kind(
        systems=60, system=3300, first=4600, message=1100, answer=182, turns=1.5, think_s=8.0
    ),
    "chat": Kind(
        systems=50, system=300, first=900, message=150, answer=110, turns=2.5, think_s=45.0
    ),
    "code": Kind(
        systems=20, system=400, first=2000, message=200, answer=25, turns=1.3, think_s=20.0
    ),
}


def unshared(prompt: int, answer: int) -> Kind:
    """Return a kind of one-turn requests whose prompts share nothing, of these mean lengths."""
    return Kind(
        systems=1,
        system=1,
        first=max(prompt - 1, 1),
        message=1,
        answer=answer,
        turns=1.0,
        think_s=1.0,
        sigma=0.5,
    )


class Asked(NamedTuple):
    """One request. prompt: its tokens, of which the first `system` are those of a system prompt,
    and the first `before` were its session's last prompt and answer. answers: where in it the
    session's answers lie, (start, end) each.
    """

    at: float
    session: int
    which: int
    system: int
    before: int
    prompt: int
    answer: int
    answers: tuple[tuple[int, int], ...] = ()


def lognormal(rng: random.Random, mean: float, sigma: float) -> int:
    """Draw a length of this mean, one token at least."""
    return max(int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)), 1)


def day_profile(swing: float) -> list[float]:
    """Return the rate of each of 24 hours over the mean: least at 4, most at 16 o'clock."""
    return [1 - swing * math.cos((hour - 4) / 24 * 2 * math.pi) for hour in range(24)]


def traffic(
    kind: Kind, *, rate: float, seconds: float, swing: float = 0.0, seed: int = 0
) -> Iterator[Asked]:
    """Yield requests in order of arrival. rate: requests a second in the mean. seconds: that a day
    takes here, whose hours differ by `swing`. Arrivals begin before the day, at negative times, so
    that sessions are in all their turns when it begins.
    """
    rng, profile = random.Random(seed), day_profile(swing)
    weights = list(itertools.accumulate(1 / (k + 1) for k in range(kind.systems)))
    later: list[tuple[float, int, Asked]] = []
    at, count, new_rate = -3 * kind.turns * kind.think_s, 0, rate / kind.turns
    stay = 1 - 1 / kind.turns

    def next_turn(asked: Asked) -> None:
        if rng.random() < stay:
            nonlocal count
            count += 1
            when = asked.at + rng.expovariate(1 / kind.think_s)
            before = asked.prompt + asked.answer
            prompt = before + lognormal(rng, kind.message, kind.sigma)
            answer = lognormal(rng, kind.answer, kind.sigma)
            spans = (*asked.answers, (asked.prompt, before))
            turn = Asked(
                when, asked.session, asked.which, asked.system, before, prompt, answer, spans
            )
            heapq.heappush(later, (when, count, turn))

    session = 0
    while True:
        hour = min(max(int(at / seconds * 24), 0), 23)
        at += rng.expovariate(new_rate * profile[hour])
        while later and later[0][0] < min(at, seconds):
            asked = heapq.heappop(later)[2]
            yield asked
            next_turn(asked)
        if at >= seconds:
            return
        session += 1
        which = rng.choices(range(kind.systems), cum_weights=weights)[0]
        prompt = kind.system + lognormal(rng, kind.first, kind.sigma)
        answer = lognormal(rng, kind.answer, kind.sigma)
        asked = Asked(at, session, which, kind.system, kind.system, prompt, answer)
        yield asked
        next_turn(asked)


def token_ids(asked: Asked, block: int = 1 << 20) -> list[int]:
    """Return ids of a prompt that are equal where prefixes are: of the system prompt, then of the
    session, whose answers are zeros, as the modelled device draws them.
    """
    system = [asked.which * block + i for i in range(asked.system)]
    first = (1 << 30) + (asked.session * 7919) % (1 << 28)
    ids = system + [first + i for i in range(asked.prompt - asked.system)]
    for start, end in asked.answers:
        ids[start:end] = [0] * (end - start)
    return ids
