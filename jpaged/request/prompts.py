"""The forms a prompt may take, and the checks that need no engine."""

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.checks import check_seed, is_scalar
from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.keys import Key, fold_in, key_from_seed
from jpaged.errors import RequestError
from jpaged.request.chat import Chat
from jpaged.request.length import check_length, too_long
from jpaged.sampling_params import SamplingParams


def as_list(prompts: Any) -> list[Any]:
    """One prompt or a list of them -> a list of prompts, each still in its own form.

    A prompt is a str, a list of ints, a 1-D numpy or jax array, {"prompt": str} or
    {"prompt_token_ids": ids}; a dict may have a "cache_salt" (str) and an "adapter" (its name)
    too.
    """
    if _is_array(prompts):
        if prompts.ndim == 1 and prompts.dtype.kind in "iu":
            return [prompts]
        raise RequestError(
            f"prompts is a {prompts.ndim}-D array of {prompts.dtype}: pass unpadded lists "
            "of token ids"
        )
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        wanted = "a str, token ids, a dict, or a list of these"
        raise RequestError(f"prompts of type {type(prompts).__name__}: pass {wanted}")
    if prompts and all(is_scalar(x) for x in prompts):
        return [list(prompts)]  # one prompt of token ids
    return list(prompts)


def tokenize(
    prompt: Any, tokenizer: Any, vocab_size: int, most: int | None = None
) -> tuple[str | None, list[int]]:
    """(text, token ids) of one prompt; `tokenizer` is a function that gives one or raises
    RequestError. most: CapacityError for as many tokens, before they are all made; None: any
    number.
    """
    if isinstance(prompt, Adapted):
        prompt = prompt.prompt
    if isinstance(prompt, Mapping):
        keys = set(prompt) - {"cache_salt", "adapter"}
        if keys == {"prompt"} and isinstance(prompt["prompt"], str):
            prompt = prompt["prompt"]
        elif "prompt_token_ids" in keys and keys <= {"prompt", "prompt_token_ids"}:
            text, ids = prompt.get("prompt"), prompt["prompt_token_ids"]
            if not isinstance(text, str | None) or isinstance(ids, str | Mapping):
                raise RequestError(
                    "prompt: 'prompt' must be a str and 'prompt_token_ids' token ids"
                )
            return text, tokenize(ids, tokenizer, vocab_size, most)[1]
        else:
            raise RequestError(
                f"prompt with keys {sorted(map(str, keys))}: pass 'prompt' (str) or "
                "'prompt_token_ids'"
            )
    if isinstance(prompt, str):
        try:
            encode = tokenizer("a str prompt").encode
            if most is not None:
                check_length(prompt, most, encode)
            ids = [int(t) for t in encode(prompt)]
        except (TypeError, UnicodeError) as e:  # half of a surrogate pair, as JSON may hold
            raise RequestError(f"prompt {prompt!r} cannot be tokenized: {e}") from e
        if not ids:
            raise RequestError(f"prompt {prompt!r} is empty: at least one token is needed")
        return prompt, _in_vocabulary(ids, vocab_size)
    if _is_array(prompt):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise RequestError(
                f"prompt is a {prompt.ndim}-D array of {prompt.dtype}: pass unpadded 1-D token ids"
            )
        return None, _in_vocabulary(jax.device_get(prompt).tolist(), vocab_size)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        wanted = "a str, a list of token ids, a 1-D array or a dict"
        raise RequestError(f"prompt of type {type(prompt).__name__}: pass {wanted}")
    if most is not None and len(prompt) >= most:
        raise too_long(len(prompt), most)
    if bad := [t for t in prompt if not is_scalar(t)]:
        raise RequestError(f"prompt token id {bad[0]!r}: must be an integer")
    return None, _in_vocabulary([int(t) for t in prompt], vocab_size)


def cache_salt(prompt: Any) -> str | None:
    """The salt of a prompt: its cached prefix is shared with prompts of the same salt only."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt or not salt.isprintable()):
        raise RequestError(f"cache_salt={salt!r}: must be a non-empty str of printable characters")
    return salt


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A prompt in any form with the adapter that came with the call."""

    prompt: Any
    adapter: AdapterVersion | None


def cached_under(prompt: Any, named: Mapping[str, AdapterVersion]) -> dict[str, Any]:
    """The fields of a Sequence that its cached prefix depends on beside tokens: salt, and the
    adapter that the prompt names or comes with. named: those that there are.
    """
    adapter, name = None, None
    if isinstance(prompt, Adapted):
        prompt, adapter = prompt.prompt, prompt.adapter
    if isinstance(prompt, Chat):
        name = prompt.adapter
    elif isinstance(prompt, Mapping):
        name = prompt.get("adapter")
    if name is not None:
        if not isinstance(name, str) or name not in named:
            known = f"there are {', '.join(sorted(named))}" if named else "there is none"
            raise RequestError(f"adapter {name!r} is unknown: {known}; add_adapter adds one")
        adapter = named[name]
    return {"salt": cache_salt(prompt), "adapter": adapter}


def salted_by(salt: str, prompt: Any) -> dict[str, Any]:
    """A prompt (text, ids, or a dict of either) whose cached prefix is shared under `salt` alone;
    a salt that it has counts beside it. salt: all that are given here are of one length, so that
    no salt of a prompt stands for another.
    """
    if not isinstance(prompt, Mapping):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    inner = cache_salt(prompt)
    return {**prompt, "cache_salt": salt if inner is None else f"{salt}:{inner}"}


def answered_by(adapter: str, prompt: Any) -> dict[str, Any]:
    """A prompt (text, ids, or a dict of either) that names its adapter."""
    if not isinstance(prompt, Mapping):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    return {**prompt, "adapter": adapter}


def match_adapters(lora: Any, count: int) -> list[Any]:
    """One adapter a prompt, from one for all or a list (with None for the model itself) as long as
    the prompts.
    """
    if not isinstance(lora, list | tuple):
        return [lora] * count
    if len(lora) != count:
        raise RequestError(
            f"{len(lora)} adapters in lora for {count} prompts: pass one for all or one each"
        )
    return list(lora)


def match_sampling_params(sampling_params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams a prompt, from None (the defaults), one for all, or a list as long as the
    prompts.
    """
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if not isinstance(sampling_params, Sequence) or not all(
        isinstance(p, SamplingParams) for p in sampling_params
    ):
        kind = type(sampling_params).__name__
        raise RequestError(f"sampling_params of type {kind}: pass SamplingParams or a list of them")
    if len(sampling_params) != count:
        raise RequestError(
            f"{len(sampling_params)} sampling_params for {count} prompts: pass one for "
            "all or one each"
        )
    return list(sampling_params)


def as_key(seed: Any) -> Key:
    """Key data of a seed: an int, or a jax key of any implementation."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if getattr(seed, "ndim", 0) == 1 and len(seed) >= 2:
        first, second, *rest = (int(w) for w in jax.device_get(seed))
        # Other implementations have wider keys.
        return functools.reduce(fold_in, rest, (first, second))
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise RequestError(f"seed={seed!r}: pass an int or a jax key")
    check_seed(seed)
    return key_from_seed(int(seed))


class CallKeys:
    """The keys of a face's calls. seed: what calls without a seed draw from, each anew. count:
    those calls so far. Any thread may ask.
    """

    def __init__(self, seed: Any):
        self._key = as_key(seed)
        self._lock = threading.Lock()
        self.count = 0

    def next(self) -> Key:
        """A key that no call has had."""
        with self._lock:
            self.count += 1
            return fold_in(self._key, self.count)

    def of(self, seed: Any) -> Key:
        """The key of a call with this seed; None: the next one."""
        return self.next() if seed is None else as_key(seed)


def _in_vocabulary(ids: list[int], vocab_size: int) -> list[int]:
    if not ids:
        raise RequestError("prompt [] is empty: at least one token is needed")
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(t for t in ids if not 0 <= t < vocab_size)
        raise RequestError(f"prompt token id {bad} is outside the vocabulary of {vocab_size}")
    return ids


def _is_array(x: Any) -> bool:
    return hasattr(x, "ndim") and hasattr(x, "dtype") and x.ndim > 0
