"""SamplingParams: how one request wants its tokens drawn and what it wants back. Names and meanings
are vLLM's.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jpaged.checks import (
    MAX_LOGIT_BIAS,
    REPETITION_PENALTIES,
    TEMPERATURES,
    check_real,
    check_seed,
    check_whole,
)
from jpaged.config import EngineConfig
from jpaged.errors import RequestError
from jpaged.structured.spec import check as check_structured

LOGPROBS_MODES = ("raw", "tempered", "processed")
PRIORITIES = 2**63 - 1  # the highest, and below 0 the lowest


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Controls of one request; checked by `validate` when it is admitted, so that a bad one harms
    no neighbour.

    n: completions a prompt. temperature: 0 is greedy, which takes the lowest id of equal logits,
    ignores top_p, top_k and min_p, and counts as 1 in log-probabilities; any other counts as one
    from 1e-30 to 1e30, all that float32 can divide by. top_p: 1 is off. top_k: 0 or -1 is off; 1
    keeps one token, the lowest id of the largest logits. min_p: 0 is off. top_p, min_p and a larger
    top_k keep all logits that equal the last one kept. seed: equal prompts with equal seeds give
    equal samples; None draws from the call's seed. max_tokens: None means up to max_model_len.
    min_tokens: EOS, stop ids and stop strings wait this long. stop: strings that end the text (left
    out of it). stop_token_ids: ids that end it. ignore_eos: EOS does not. logprobs,
    prompt_logprobs: how many top alternatives to return a token (0: the token's own only).
    logprobs_mode: "raw" is the model's distribution before any control, "tempered"
    log_softmax(logits / temperature) and nothing else, "processed" after all controls.
    presence_penalty, frequency_penalty: subtracted for tokens of the output. repetition_penalty:
    divides positive logits of tokens seen in prompt or output, and multiplies the others
    (arXiv:1909.05858); 1e-6 to 1e6. logit_bias: added to the logits of these ids, -1e30 to 1e30;
    beyond about 1e8 nothing is left of the logit, and equal biases tie. bad_words: texts that are
    not written, as they stand or after a space: their last token is not drawn after the others.
    allowed_token_ids: the only ids that are drawn, EOS only if it is one. sampling_mask: return
    which tokens each one was drawn from, for a trainer that draws from these alone; top_k says how
    many at most, and of equal logits at its end only the lowest ids are kept then. structured: the
    form of the answer, one of {"json_schema": dict, JSON text or pydantic model}, {"json_object":
    True}, {"regex": str}, {"choice": list of str}, {"grammar": Lark or GBNF}; see
    docs/structured.md.
    priority: a request of a lower value runs sooner, and is preempted later, than others of the
    same party (all that share an engine, or of a server one key); it changes no token.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "tempered", "processed"] = "raw"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    sampling_mask: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured: Mapping[str, Any] | None = None
    priority: int = 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def divisor(self) -> float:
        """The temperature that logits are divided by: one that float32 can divide by, or 0."""
        least, most = TEMPERATURES
        return min(max(self.temperature, least), most) if self.temperature > 0 else 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the request needs its token counts on the device."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def sampler(self) -> Literal["plain", "filtered", "full"]:
        """The least of the steps that can serve the request; see engine.shapes.Sampler."""
        has_lists = self.logprobs is not None or self.sampling_mask
        if self.has_penalties or self.logit_bias or self.min_tokens or has_lists:
            return "full"
        filters = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        return "filtered" if filters else "plain"

    def validate(self, config: EngineConfig, vocab_size: int) -> None:
        """Raise RequestError naming the first value that cannot work."""
        check_whole("n", self.n, 1)
        if self.n > config.max_n:
            raise RequestError(f"n={self.n} is above max_n={config.max_n} of EngineConfig")
        check_real("temperature", self.temperature, 0.0)
        check_real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError(
                "top_p=0.0: must be above 0 (1.0 is off); use temperature=0 for greedy"
            )
        check_real("min_p", self.min_p, 0.0, 1.0)
        check_whole("top_k", self.top_k, -1)
        check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_real("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        if self.seed is not None:
            check_seed(self.seed)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        check_whole("min_tokens", self.min_tokens, 0)
        check_whole("priority", self.priority, -PRIORITIES, PRIORITIES)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, 0)
                if value > config.max_logprobs:
                    raise RequestError(
                        f"{name}={value} is above max_logprobs={config.max_logprobs} of "
                        "EngineConfig"
                    )
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise RequestError(
                f"logprobs_mode={self.logprobs_mode!r}: must be one of {', '.join(LOGPROBS_MODES)}"
            )
        flags = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
        for name in (*flags, "sampling_mask"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r}: must be True or False")
        if self.sampling_mask:
            self._check_mask(config)
        if self.stop is not None and not isinstance(self.stop, str | Sequence):
            raise RequestError(f"stop={self.stop!r}: must be a string or a list of strings")
        if [s for s in self.stop_strings if not isinstance(s, str) or not s]:
            raise RequestError(f"stop={self.stop!r}: every stop string must be a non-empty string")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise RequestError(f"stop_token_ids={ids!r}: must be a list of token ids")
        for token in ids:
            check_whole("stop_token_ids", token, 0, vocab_size - 1)
        words = () if self.bad_words is None else self.bad_words
        is_list = isinstance(words, Sequence) and not isinstance(words, str)
        if not is_list or [w for w in words if not isinstance(w, str) or not w.strip()]:
            raise RequestError(f"bad_words={words!r}: must be a list of texts that are not blank")
        allowed = self.allowed_token_ids
        if allowed is not None:
            if isinstance(allowed, str) or not isinstance(allowed, Sequence) or not allowed:
                raise RequestError(f"allowed_token_ids={allowed!r}: must be a list of token ids")
            for token in allowed:
                check_whole("allowed_token_ids", token, 0, vocab_size - 1)
        if self.structured is not None:
            check_structured(self.structured)
        biases = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, Mapping):
            raise RequestError(f"logit_bias={biases!r}: must map token ids to numbers")
        if (count := len(biases)) > (most := config.max_logit_bias):
            raise RequestError(
                f"logit_bias has {count} entries, above max_logit_bias={most} of EngineConfig"
            )
        for token, bias in biases.items():
            check_whole("logit_bias key", token, 0, vocab_size - 1)
            check_real(f"logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)

    def _check_mask(self, config: EngineConfig) -> None:
        """RequestError where no mask can be told of what a draw kept."""
        most = config.max_sampling_mask
        if self.temperature == 0:
            raise RequestError("sampling_mask=True with temperature=0: a greedy token is not drawn")
        if self.top_k < 1:
            raise RequestError(
                f"sampling_mask=True with top_k={self.top_k}: top_k bounds the mask, from 1 to "
                f"max_sampling_mask={most} of EngineConfig"
            )
        if self.top_k > most:
            raise RequestError(
                f"sampling_mask=True with top_k={self.top_k}: above max_sampling_mask={most} of "
                "EngineConfig"
            )
