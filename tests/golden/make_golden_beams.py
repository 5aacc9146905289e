"""transformers' beam search on some of the tiny models: tests/golden/beams.json. `make_golden.py
beams` runs it.

Nothing of a case is left to rounding. Its eos ids are searched for, among the tokens that the model
likes to write, so that beams end early and at different lengths; and a replay of the algorithm, on
logits of a forward pass without a cache, has to find what transformers finds with every choice on
the way decided by ENOUGH_GAP or more.
"""

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

FILE = "beams.json"
ENOUGH_GAP = 0.003  # in log-probability: a hundred times float32's error in the sum of 24
MAX_ERROR = 2e-5  # between transformers' scores and the replay's, in log-probability a token
PAIRS = 12  # tokens whose pairs are tried where there are two eos ids

Tokens = tuple[int, ...]


class Group(NamedTuple):
    """Cases that share eos ids: one for each prompt and each kind of early stopping. Results of
    kinds must differ.
    """

    prompts: tuple[int, ...]  # which of the stored prompts: 0 has 5 tokens, 1 has 40
    width: int
    max_tokens: int
    length_penalty: float
    kinds: tuple[bool | str, ...]
    eos: int | Tokens = 1  # how many ids to search for, or which ones to take


KINDS = (True, False, "never")
GROUPS: dict[str, tuple[Group, ...]] = {
    "qwen3_g2_d32_tied": (
        Group((1,), 3, 24, 1.0, KINDS, eos=2),
        Group((0, 1), 3, 16, 1.0, (False,), eos=2),
        Group((1,), 5, 20, 2.0, (True,)),
        Group((1,), 2, 12, 0.0, ("never",)),
        Group((1,), 5, 16, -0.5, (True,)),
        Group((0,), 1, 8, 1.0, (False,)),
    ),
    "llama_g4_d64_llama3": (
        Group((1,), 2, 24, 1.0, KINDS, eos=2),
        Group((0, 1), 2, 12, 0.0, (True,)),
        Group((0,), 5, 24, 1.0, (False,)),
        Group((1,), 3, 16, -0.5, ("never",)),
        Group((1,), 2, 12, 2.0, ("never",)),
        Group((0,), 1, 16, 2.0, ("never",)),
    ),
    "mistral_g4_d128_window": (
        Group((0,), 3, 24, 1.0, KINDS),
        Group((0, 1), 3, 16, 0.0, ("never",)),
        Group((0,), 2, 16, -0.5, (False,)),
        # Found by trying them all: it ends too soon if "never" hopes for the greatest length here
        # too.
        Group((0,), 5, 16, -0.5, ("never",), eos=(157, 105)),
        Group((1,), 5, 24, 0.0, (False,)),
        Group((1,), 5, 12, 1.0, (True,)),
        Group((0,), 2, 16, 2.0, (False,), eos=2),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    beam_width: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | str
    eos_token_ids: Tokens


class Found(NamedTuple):
    """Beams, best first, their scores, and the least difference of log-probability that a choice
    hung on.
    """

    beams: list[Tokens]  # a beam's eos included
    scores: list[float]
    gap: float


def make_beams(out: Path) -> str:
    """Computes and stores all cases; gives a line that sums them up."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    from tests.golden.configs import CONFIGS
    from tests.golden.weights import checksum, state_dict

    torch.set_num_threads(1)
    # it would say of one beam that its settings "may be ignored"
    transformers.logging.set_verbosity_error()
    cases, sums = [], {}
    for name, groups in GROUPS.items():
        tensors = state_dict(name, CONFIGS[name])
        cases += config_cases(name, CONFIGS[name], tensors, groups)
        sums[name] = checksum(tensors)
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    lines = ",\n".join(json.dumps(case) for case in cases)  # a line a case
    head = f'"versions": {json.dumps(versions)},\n"weights_sha256": {json.dumps(sums)}'
    (out / FILE).write_text(f'{{\n{head},\n"cases": [\n{lines}\n]\n}}\n')
    return (
        f"{FILE:28s} {len(cases)} cases of {len(GROUPS)} models, least gap "
        f"{min(c['gap'] for c in cases):.4f}"
    )


def config_cases(
    name: str, config: dict[str, Any], tensors: Any, groups: Iterable[Group]
) -> list[dict[str, Any]]:
    """The cases of one model, as they are stored."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    from tests.golden.make_golden import FOLDER, build

    model = build(config, tensors, torch.float32)
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as stored:
        prompts = [tuple(stored[f"token_ids_{i}"].tolist()) for i in range(2)]
    logprobs = next_logprobs(model)
    cases, used = [], []
    for group in groups:
        chosen = choose(logprobs, prompts, group, used, config["vocab_size"])
        if chosen is None:
            raise SystemExit(f"{name}: no eos ids decide {group}")
        for prompt, settings, ours in chosen:
            theirs = generate(model, prompt, settings)
            for a, b, x, y in zip(
                ours.beams, theirs.beams, ours.scores, theirs.scores, strict=True
            ):
                assert a == b and abs(x - y) * len(a) ** settings.length_penalty <= MAX_ERROR * len(
                    a
                ), (settings, a, b)
            case = {"config": name, "prompt": prompt} | dataclasses.asdict(settings)
            cases.append(
                case | {"beams": theirs.beams, "scores": theirs.scores, "gap": round(ours.gap, 5)}
            )
        if (eos := chosen[0][1].eos_token_ids) not in used:
            used.append(eos)
    return cases


def choose(
    logprobs: Callable[[Tokens], list[float]],
    prompts: list[Tokens],
    group: Group,
    used: list[Tokens],
    vocab_size: int,
) -> list[tuple[Tokens, Settings, Found]] | None:
    """The group's cases with the first eos ids that make all of them good ones; those in use come
    first.
    """
    liked: dict[int, None] = {}
    for i in group.prompts:
        found = replay(
            logprobs, prompts[i], Settings(**shared(group), early_stopping=False, eos_token_ids=())
        )
        liked |= dict.fromkeys(itertools.chain(*found.beams))
    if isinstance(group.eos, tuple):
        attempts: Iterable[Tokens] = [group.eos]
    elif group.eos == 1:
        attempts = itertools.chain(used, ((token,) for token in [*liked, *range(vocab_size)]))
    else:
        attempts = itertools.chain(used, itertools.combinations(list(liked)[:PAIRS], group.eos))
    for eos in attempts:
        if isinstance(group.eos, int) and len(eos) != group.eos:
            continue
        cases = []
        for i, kind in itertools.product(group.prompts, group.kinds):
            settings = Settings(**shared(group), early_stopping=kind, eos_token_ids=eos)
            cases.append((prompts[i], settings, replay(logprobs, prompts[i], settings)))
            if cases[-1][2].gap < ENOUGH_GAP:
                break
        else:
            if good(cases, group, eos):
                return cases
    return None


def good(cases: list[tuple[Tokens, Settings, Found]], group: Group, eos: Tokens) -> bool:
    """No two cases give the same, each eos id ends a beam before the limit, and the beams of a case
    vary in length.
    """
    early = {
        beam[-1] for *_, found in cases for beam in found.beams if len(beam) < group.max_tokens
    }
    lengths = [len(set(map(len, found.beams))) for *_, found in cases]
    different = {(prompt, *found.beams) for prompt, _, found in cases}
    varied = min(lengths) >= min(2, group.width) and max(lengths) >= min(3, group.width)
    varied = varied and all(max(map(len, found.beams)) > 1 for *_, found in cases)
    return len(different) == len(cases) and early == set(eos) and varied


def shared(group: Group) -> dict[str, Any]:
    return {
        "beam_width": group.width,
        "max_tokens": group.max_tokens,
        "length_penalty": group.length_penalty,
    }


def next_logprobs(model: Any) -> Callable[[Tokens], list[float]]:
    """A function from token ids to the log-probabilities [V] of the next one, which remembers what
    it has computed.
    """
    import torch  # pyright: ignore[reportMissingImports]

    from tests.golden.make_golden import forward

    known: dict[Tokens, list[float]] = {}

    def logprobs(ids: Tokens) -> list[float]:
        if ids not in known:
            known[ids] = torch.log_softmax(forward(model, list(ids))[-1].double(), dim=-1).tolist()
        return known[ids]

    return logprobs


def replay(logprobs: Callable[[Tokens], list[float]], prompt: Tokens, settings: Settings) -> Found:
    """transformers' algorithm (GenerationMixin._beam_search) for one prompt, written from what it
    does.

    It keeps the best (1 + number of eos ids) * width continuations of a step. More would change
    nothing: at most one continuation of each beam ends on each eos id, so those always hold `width`
    that go on.
    """
    width, power = settings.beam_width, settings.length_penalty
    running: list[tuple[float, Tokens]] = [
        (0.0, ())
    ]  # (sum of log-probabilities, tokens), best first
    finished: list[tuple[float, Tokens]] = []  # (score, tokens), best first
    gap = math.inf
    for length in range(1, settings.max_tokens + 1):
        following = [
            (total + logprob, (*tokens, token))
            for total, tokens in running
            for token, logprob in enumerate(logprobs(prompt + tokens))
        ]
        following.sort(reverse=True)
        # The best `width` may finish; a beam below them that ends is dropped, and its place goes to
        # one that goes on.
        gap = min(gap, following[width - 1][0] - following[width][0])
        last = length == settings.max_tokens
        for total, tokens in following[:width]:
            if last or tokens[-1] in settings.eos_token_ids:
                finished.append((total / length**power, tokens))
        finished.sort(reverse=True)
        for better, worse in itertools.pairwise(
            finished[: width + 1]
        ):  # those kept, their order, and the first left
            gap = min(
                gap, (better[0] - worse[0]) * min(len(better[1]) ** power, len(worse[1]) ** power)
            )
        finished = finished[:width]
        if last:
            break
        running = [item for item in following if item[1][-1] not in settings.eos_token_ids]
        gap = min(gap, running[width - 1][0] - running[width][0])
        running = running[:width]
        if len(finished) < width:
            continue
        if settings.early_stopping is True:
            break
        longest = settings.early_stopping == "never" and power > 0
        hoped = (
            settings.max_tokens if longest else length
        )  # the length at which a running beam's hope is scored
        margin = running[0][0] / hoped**power - finished[-1][0]
        gap = min(gap, abs(margin) * min(hoped**power, len(finished[-1][1]) ** power))
        if margin <= 0:
            break
    return Found([tokens for _, tokens in finished], [score for score, _ in finished], gap)


def generate(model: Any, prompt: Tokens, settings: Settings) -> Found:
    """What transformers itself gives, with nothing in the generation config but these settings."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import GenerationMode

    # It takes greedy search for one beam, unless it is told that this is a beam search too.
    with mock.patch.object(
        GenerationConfig, "get_generation_mode", return_value=GenerationMode.BEAM_SEARCH
    ):
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(
                (1, len(prompt)), dtype=torch.long
            ),  # it would look for padding otherwise
            num_beams=settings.beam_width,
            num_return_sequences=settings.beam_width,
            do_sample=False,
            max_new_tokens=settings.max_tokens,
            length_penalty=settings.length_penalty,
            early_stopping=settings.early_stopping,
            eos_token_id=list(settings.eos_token_ids),
            pad_token_id=settings.eos_token_ids[0],
            output_scores=True,
            return_dict_in_generate=True,
        )
    beams = []
    for row in result.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in settings.eos_token_ids]
        beams.append(tuple(row[: ends[0] + 1] if ends else row))
    return Found(beams, result.sequences_scores.tolist(), math.nan)
