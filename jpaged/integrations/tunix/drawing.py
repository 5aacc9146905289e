"""Drawing is what the rollout engine and the sampler of tunix share: it makes token ids of prompts,
SamplingParams of tunix's controls, and completions as its trainer takes them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jpaged.errors import ConfigError
from jpaged.request.outputs import CompletionOutput
from jpaged.sampling_params import SamplingParams

try:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter  # pyright: ignore[reportMissingImports]
except ImportError as e:
    raise ImportError(
        "jpaged.integrations.tunix needs google-tunix: pip install 'jpaged[clients]'"
    ) from e


class Drawn(NamedTuple):
    """A completion. text: without its end. tokens int32 [T], logprobs float32 [T]: with EOS where
    it is kept.
    """

    text: str
    tokens: np.ndarray
    logprobs: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """How tunix's prompts, controls and completions are read. tokenizer: tunix's adapter of one.
    keep_eos: whether EOS stays in the tokens.

    A pad token that the model draws ends a completion, since tunix's trainer would take it for
    padding.
    """

    tokenizer: TokenizerAdapter
    keep_eos: bool

    @classmethod
    def of(cls, tokenizer: Any, *, keep_eos: bool) -> "Drawing":
        """Return that of a tokenizer: Hugging Face, sentencepiece or tunix's adapter. Raises
        ConfigError unless its pad and EOS ids differ.
        """
        adapted = (
            tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        )
        if adapted.pad_id() == adapted.eos_id():
            raise ConfigError(
                f"the tokenizer's pad and EOS ids are both {adapted.pad_id()}: tunix masks by the "
                "pad id, so that EOS would never be learned; set pad_token"
            )
        return cls(tokenizer=adapted, keep_eos=keep_eos)

    def token_ids(self, prompt: str) -> list[int]:
        """Return token ids as tunix's sampler does: BOS comes first, once."""
        bos = self.tokenizer.bos_id()
        ids = ([bos] if bos else []) + self.tokenizer.encode(prompt)
        return [int(x) for x in self.tokenizer.dedup_bos_ids(ids)]

    def sampling_params(
        self,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float | None,
        top_k: int | None,
        eos_tokens: Sequence[int] | None,
        seed: int | None = None,
    ) -> SamplingParams:
        """Return SamplingParams of tunix's controls, which are greedy where its sampler is: with
        temperature 0, or top_p None. Logprobs are those that its trainer recomputes. eos_tokens:
        None takes the tokenizer's EOS. Raises RequestError.
        """
        greedy = temperature == 0 or top_p is None
        ends = list(eos_tokens) if eos_tokens else [self.tokenizer.eos_id()]
        return SamplingParams(
            temperature=0.0 if greedy else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=0 if top_k is None else max(top_k, 0),
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=[*map(int, ends), self.tokenizer.pad_id()],
            logprobs_mode="raw" if greedy else "tempered",
            seed=seed,
        )

    def drawn(self, completion: CompletionOutput) -> Drawn:
        """Return a completion without its end, or with EOS where that is kept."""
        ids, has_stopped = completion.token_ids, completion.finish_reason == "stop"
        said = ids[:-1] if has_stopped else ids
        is_kept = self.keep_eos and bool(ids) and ids[-1] != self.tokenizer.pad_id()
        count = len(ids) if is_kept else len(said)
        text = self.tokenizer.decode(said)
        return Drawn(text, np.array(ids[:count], np.int32), completion.token_logprobs[:count])
