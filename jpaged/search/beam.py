"""BeamSearch: the `width` likeliest completions of a prompt, kept by score; the rules are
transformers'.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

from jpaged.engine.generated import Generated
from jpaged.engine.queues import Queues
from jpaged.engine.sequence import Request, Sequence

EarlyStopping = bool | Literal["never"]


class Hypothesis(NamedTuple):
    """A completion that has ended. score: the sum of its logprobs / its number of tokens **
    length_penalty.
    """

    generated: Generated
    score: float
    finish_reason: Literal["stop", "length", "abort", "error"]


class Continuation(NamedTuple):
    """A beam with one more token. weight_version: of the weights that offered it."""

    beam: Sequence
    token: int
    logprob: float
    weight_version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamStep:
    """What a search does with one more token.

    continued: the next beams; one beam may go on in several ways. hypotheses: all so far, best
    first. is_last: whether the search ends here.
    """

    continued: list[Continuation]
    hypotheses: list[Hypothesis]
    is_last: bool


class BeamSearch(Request):
    """A request whose sequences are beams, all of one length. A step's best continuations, of
    whichever beams, are the next beams.

    root: the prompt's sequence. early_stopping: True stops at `width` hypotheses; False when no
    beam's score, taken at its length of now, beats the worst of them; "never" when none can, taken
    at the greatest length that it may reach.
    """

    steers = True

    def __init__(
        self,
        root: Sequence,
        width: int,
        *,
        length_penalty: float,
        early_stopping: EarlyStopping,
        prompt: str | None,
    ):
        super().__init__([root], prompt=prompt)
        self.width = self.max_sequences = width
        self.length_penalty = length_penalty
        self.early_stopping: EarlyStopping = early_stopping
        self.num_candidates = num_candidates(width, len(root.eos_ids))
        self.prompt_len, self.end = root.prompt_len, root.end
        # The beams, their length and the hypotheses, replaced together: an interrupted step leaves
        # the last ones whole.
        self._state: tuple[list[Sequence], int, list[Hypothesis], bool] = (
            [root],
            len(root),
            [],
            False,
        )

    @property
    def is_finished(self) -> bool:
        return self._state[3] or super().is_finished

    def steer(self, queues: Queues) -> None:
        """Go one token further once every beam has drawn: beams that are left behind end, and those
        that go on in several ways are forked.
        """
        if any(seq.candidates is None for seq in self.sequences):
            return
        step = self.choose()
        parents = {parent for parent, *_ in step.continued}
        for seq in self.sequences:
            if seq not in parents and not step.is_last:
                queues.retire(seq)
        beams: list[Sequence] = []  # all forks before any of them gets its token
        for parent, *_ in step.continued:
            beams.append(queues.fork(parent) if parent in beams else parent)
        for beam, (_, token, logprob, version) in zip(beams, step.continued, strict=True):
            beam.append(token, logprob, version)
            beam.settle()
            if beam.structured is not None:
                beam.structured.push(token)
        self.settle(step, beams)  # from here on a failed step goes back to this
        for seq in self.sequences:
            if step.is_last:
                queues.finish(seq, "length")
            else:
                queues.resume(seq)

    def choose(self) -> BeamStep:
        """Return the next beams and hypotheses, from what the last draw offers to each beam."""
        _, length, hypotheses, _ = self._state
        length += 1
        generated = length - self.prompt_len
        divisor = float(generated**self.length_penalty)
        options = [
            (total + logprob, Continuation(beam, token, logprob, beam.candidates.weight_version))
            for beam in self.sequences
            for total in (sum(beam.generated.logprobs),)
            if beam.candidates is not None
            for token, logprob, _ in beam.candidates.tokens[1:]
            if logprob > -math.inf  # else its grammar forbids it
        ]
        options.sort(key=lambda option: -option[0])
        continued, ended = [], []
        for place, (total, option) in enumerate(options[: self.num_candidates]):
            beam, token, logprob, version = option
            at_eos = token in beam.eos_ids
            if not at_eos and length < self.end:
                continued.append((total, option))
            elif place < self.width:  # the others are there to keep the search wide
                whole = beam.generated.copy()
                whole.append(token, logprob, version)
                ended.append(Hypothesis(whole, total / divisor, "stop" if at_eos else "length"))
        continued = continued[: self.width]
        hypotheses = sorted(hypotheses + ended, key=lambda h: -h.score)[: self.width]
        is_last = not continued or (
            len(hypotheses) == self.width
            and (
                self.early_stopping is True
                or self._best_possible(continued[0][0], generated) <= hypotheses[-1].score
            )
        )
        goes_on = [] if is_last else [option for _, option in continued]
        return BeamStep(continued=goes_on, hypotheses=hypotheses, is_last=is_last)

    def settle(self, step: BeamStep, beams: list[Sequence]) -> None:
        """Take a step's beams and hypotheses as what the search has come to."""
        self._state = (beams, self._state[1] + 1, step.hypotheses, step.is_last)
        if beams:
            self.sequences = beams

    def results(self) -> list[Hypothesis]:
        """Return the hypotheses, best first, and the beams too if the search was cut off."""
        beams, length, hypotheses, is_done = self._state
        divisor = float(max(length - self.prompt_len, 1) ** self.length_penalty)
        cut = [
            Hypothesis(beam.generated.copy(), sum(beam.generated.logprobs) / divisor, reason)
            for beam in beams
            for reason in ("error" if beam.error is not None else "abort",)
        ]
        return sorted(hypotheses + ([] if is_done else cut), key=lambda h: -h.score)[: self.width]

    def doomed_with(self, seq: Sequence) -> list[Sequence]:
        return list(self.sequences)

    def restart(self) -> list[Sequence]:
        beams, length, _, is_done = self._state
        self.sequences = beams or self.sequences
        for beam in beams:
            beam.restart(length)
        return [] if is_done else beams

    def _best_possible(self, total: float, generated: int) -> float:
        """Return the best score that a beam of this sum of logprobs can be hoped to end with."""
        reach = (
            self.end - self.prompt_len
            if self.early_stopping == "never" and self.length_penalty > 0
            else generated
        )
        return total / float(reach**self.length_penalty)


def num_candidates(width: int, num_eos: int) -> int:
    """Return how many continuations a step looks at: enough for `width` beams to go on even if the
    best ones all end.
    """
    return max(2, 1 + num_eos) * width
