r"""The model "jpaged" of lm-eval (EleutherAI's evaluation harness), with the semantics of its "hf"
model.

    python -m jpaged.integrations.lm_eval --model jpaged --tasks TASKS \
        --model_args pretrained=DIR,dtype=bfloat16

takes the arguments of `lm_eval`. Importing this module registers the model for
lm_eval.simple_evaluate as well.
"""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jpaged.checkpoint import load_params
from jpaged.errors import ConfigError, RequestError
from jpaged.llm import LLM
from jpaged.models.params import Params
from jpaged.runtime.weights import as_params
from jpaged.sampling_params import SamplingParams
from jpaged.types import ModelLike, PyTree

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
    )
except ImportError as e:
    raise ImportError(
        "jpaged.integrations.lm_eval needs lm-eval: pip install 'jpaged[clients]'"
    ) from e

HARNESS_DEVICE = "cuda:0"  # what its command line passes by default
SCORED_AT_ONCE = 1024  # sequences; bounds the memory for results per token
# Keys that a task's generation_kwargs may have beside until, do_sample and the number of tokens.
CONTROLS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
# (cache key, context, continuation).
TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("jpaged")
class JPagedLM(TemplateLM):
    """A checkpoint folder, weights in memory or an LLM as a model of lm-eval.

    pretrained: a folder of Hugging Face or Orbax; Params; with `params`, what describes them; or an
    LLM that is made, whose weights and pool serve and which stays the caller's. params: weights in
    memory in any form that LLM takes, such as those of a trainer; nothing is copied. dtype: "auto"
    keeps the weights'. max_length: the most tokens that the model reads; None takes the config's
    limit. tokenizer: a transformers tokenizer; None takes the folder's. add_bos_token: None leaves
    it to the tokenizer. prefix_token_id: the token before an empty context; None takes BOS, or EOS
    if there is none. max_gen_toks: the limit for tasks that set none. batch_size: rows at once;
    "auto" is jpaged's default, at most max_batch_size. device: must be the platform that jax uses.
    All other arguments are EngineConfig's fields; an LLM has its own, and takes none. Raises
    ConfigError.
    """

    def __init__(
        self,
        pretrained: ModelLike | Params | LLM,
        *,
        params: PyTree = None,
        dtype: str = "auto",
        max_length: int | None = None,
        tokenizer: Any = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        **engine_config: Any,
    ):
        super().__init__()
        _check_device(device)
        is_auto = isinstance(batch_size, str) and batch_size.partition(":")[0] == "auto"
        rows = max_batch_size if is_auto else int(batch_size)
        if rows is not None:
            engine_config["max_num_seqs"] = rows
        if dtype != "auto":
            engine_config["dtype"] = dtype
        if isinstance(pretrained, LLM):
            settings = {"params": params, "tokenizer": tokenizer}
            passed = [name for name, value in settings.items() if value is not None]
            if passed := [*passed, *engine_config]:
                raise ConfigError(f"{min(passed)!r}: an LLM that is made has its settings already")
            self._llm, source = pretrained, None
            self._model_config = pretrained.model_config
            longest = pretrained.engine_config.max_model_len
            assert longest is not None
            self.max_length = _length(max_length, longest - 1)
        else:
            weights = _params_of(pretrained, params)
            self._model_config, source = weights.config, weights.source
            longest = weights.config.max_position_embeddings
            self.max_length = _length(max_length, longest)
            # A scored sequence has one token more than the model reads.
            self._llm = LLM(
                dataclasses.replace(weights.config, max_position_embeddings=longest + 1),
                params=weights,
                tokenizer=tokenizer,
                max_model_len=self.max_length + 1,
                **engine_config,
            )
        self.tokenizer = self._llm.tokenizer
        if self.tokenizer is None:
            raise ConfigError("no tokenizer: pass tokenizer=, or a folder that holds one")
        self._source = str(source or type(self.tokenizer).__name__)
        self.add_bos_token, self._prefix_token_id, self.max_gen_toks = (
            add_bos_token,
            prefix_token_id,
            int(max_gen_toks),
        )

    def update_params(self, params: Any, *, donate: bool = False) -> None:
        """Evaluate these weights from now on. They may have any form that LLM.update_params takes,
        or be a checkpoint folder. Nothing is compiled again, and the tokenizer stays. donate:
        delete the old arrays. Raises ConfigError for weights of another architecture.

        lm-eval's own cache of answers (use_cache) does not distinguish weights: leave it off.
        """
        if isinstance(params, str | Path):
            params = load_params(params)
        if isinstance(params, Params) and params.config == self._model_config:
            params = Params(dict(params), self._llm.model_config)
        self._llm.update_params(params, donate=donate)

    @property
    def eot_token_id(self) -> int:
        """Return the tokenizer's EOS id."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token that is put before an empty context, and before a text all of whose
        tokens are scored.
        """
        bos = self.tokenizer.bos_token_id
        return next(x for x in (self._prefix_token_id, bos, self.eot_token_id) if x is not None)

    @property
    def tokenizer_name(self) -> str:
        """Return the name by which lm-eval's cache of requests knows the tokenizer."""
        return self._source.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text, rendered with the tokenizer's chat template."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return token ids. No BOS is added to a text that begins with it. left_truncate_len: keep
        the last so many.
        """
        if kwargs:
            raise TypeError(f"tok_encode has no argument {next(iter(kwargs))!r}")
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(
            string, self.tokenizer.decode(self.prefix_token_id)
        ):
            special = False
        ids = self.tokenizer.encode(
            string, **({} if special is None else {"add_special_tokens": special})
        )
        return list(ids[-left_truncate_len:] if left_truncate_len else ids)

    def tok_decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def _loglikelihood_tokens(
        self, requests: list[TokenRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-probability of the continuation, whether it is greedy) per request. Requests
        that are too long lose tokens on the left.
        """
        if kwargs:
            raise TypeError(f"_loglikelihood_tokens has no argument {next(iter(kwargs))!r}")
        for i, (_, context, continuation) in enumerate(requests):
            if not context or not 1 <= len(continuation) <= self.max_length:
                lengths = f"{len(context)} and {len(continuation)} tokens"
                raise RequestError(
                    f"request {i}: context and continuation of {lengths}; both need at "
                    "least one, and a continuation "
                    f"at most max_length={self.max_length}"
                )
        whole = [
            tuple((context + continuation)[-(self.max_length + 1) :])
            for _, context, continuation in requests
        ]
        # Different choices often have the same tokens, which are scored once.
        scores = _scored(self._llm, list(dict.fromkeys(whole)), disable_tqdm)
        results = []
        for (key, _, continuation), sequence in zip(requests, whole, strict=True):
            logprobs, greedy = (x[-len(continuation) :] for x in scores[sequence])
            answer = (float(logprobs.sum()), bool(greedy.all()))
            results.append(answer)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of whole texts. Windows of max_length tokens cover a text such
        that each token counts once.
        """
        totals = [0.0] * len(requests)
        windows: list[TokenRequest] = []
        owners = []
        for i, (text,) in enumerate(request.args for request in requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [make_disjoint_window(pair) for pair in rolling]
            windows += [(None, context, continuation) for context, continuation in pairs]
            owners += [i] * len(pairs)
        for owner, (score, _) in zip(
            owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True
        ):
            totals[owner] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return completions that end before the first stop string. Contexts lose tokens on the
        left to leave room for max_gen_toks.
        """
        prompts, controls, stops = [], [], []
        default = self._llm.default_sampling_params()
        for context, gen_kwargs in (request.args for request in requests):
            settings = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
            until = handle_stop_sequences(
                settings.pop("until"), eos=self.tok_decode([self.eot_token_id], False)
            )
            until, count = [stop for stop in until if stop], settings.pop("max_gen_toks")
            if not 1 <= count < self.max_length:
                raise RequestError(
                    f"max_gen_toks={count}: must be at least 1 and below "
                    f"max_length={self.max_length}"
                )
            prompts.append(self.tok_encode(context, left_truncate_len=self.max_length - count))
            controls.append(_sampling_params(default, settings, until, count))
            stops.append(until)
        outs = self._llm.generate(prompts, controls, use_tqdm=not disable_tqdm)
        texts = []
        for request, out, until in zip(requests, outs, stops, strict=True):
            text = postprocess_generated_text(str(out.outputs[0].text), until, think_end_token=None)
            texts.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def _params_of(pretrained: ModelLike | Params, params: PyTree) -> Params:
    """Return the weights of a folder, or those in memory."""
    if params is not None:
        return as_params(params, pretrained)
    if isinstance(pretrained, str | os.PathLike):
        return load_params(pretrained)
    return as_params(pretrained)


def _length(asked: int | None, longest: int) -> int:
    """Return max_length; ConfigError unless the model reads so many tokens."""
    length = longest if asked is None else int(asked)
    if not 1 <= length <= longest:
        raise ConfigError(f"max_length={asked}: must be between 1 and the model's {longest}")
    return length


def _check_device(device: str | None) -> None:
    platform = jax.default_backend()
    kind = str(device).partition(":")[0]
    if device not in (None, HARNESS_DEVICE) and kind not in (platform, "jax"):
        raise ConfigError(
            f"device={device!r}: jax runs on {platform!r} here; JAX_PLATFORMS chooses"
        )


def _scored(
    llm: LLM, sequences: list[tuple[int, ...]], disable_tqdm: bool
) -> dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]:
    """Return (log-probabilities, whether greedy) of every token but the first of each sequence."""
    scores = {}
    for i in tqdm(range(0, len(sequences), SCORED_AT_ONCE), desc="Scoring", disable=disable_tqdm):
        some = sequences[i : i + SCORED_AT_ONCE]
        logprobs, greedy = llm.score([list(sequence) for sequence in some], return_greedy=True)
        scores |= dict(zip(some, zip(logprobs, greedy, strict=True), strict=True))
    return scores


def _sampling_params(
    default: SamplingParams, settings: dict[str, Any], until: list[str], count: int
) -> SamplingParams:
    """Return the SamplingParams of normalized generation_kwargs. What they leave open comes from
    generation_config, as in the "hf" model.
    """
    sample = settings.pop("do_sample")
    if unknown := sorted(set(settings) - set(CONTROLS)):
        raise RequestError(
            f"generation_kwargs {unknown[0]}={settings[unknown[0]]!r}: supported are "
            f"{', '.join(CONTROLS)}"
        )
    settings["temperature"] = settings.get("temperature", 0.0) if sample else 0.0
    return dataclasses.replace(default, max_tokens=count, stop=until, **settings)


def main() -> None:
    """Run lm_eval's command line with this model registered."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()


if __name__ == "__main__":
    main()
