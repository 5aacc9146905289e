"""What callers pass, and the values that it becomes: a prompt in any form as a Prompt, a seed as a
key, one SamplingParams or adapter for all prompts as one for each.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsInt, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jpaged.checkpoint.kept_tokenizer import kept_tokenizer
from jpaged.checkpoint.tokenizer import load_generation_config
from jpaged.checks import check_seed, is_scalar
from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.keys import Key, fold_in, key_from_seed
from jpaged.engine.spans import Spans
from jpaged.errors import CapacityError, ConfigError, RequestError
from jpaged.images.videos import why_no_videos
from jpaged.models.config import ModelConfig
from jpaged.request.embeddings import EmbeddingSpan, spans_of
from jpaged.request.images import PromptImages, Sources, plain_ids, split_sources
from jpaged.request.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams
from jpaged.types import Messages, PyTree, Tokenizer

# Held where Inputs uses its tokenizer for the first time: the first call of a tokenizer of
# transformers may change its settings, which must not happen while another thread encodes. One for
# all, since several models may have one tokenizer. Re-entrant: a tokenizer may call jpaged.
_FIRST_USE = threading.RLock()

# Characters for each token of a context that are tokenized before a text is judged by its length.
CHARACTERS_A_TOKEN = 8


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt, checked and tokenized: what a request is made from.

    text: what the ids were tokenized from, where it is known. salt: cached prefixes are shared with
    prompts of the same salt only. adapter: the one on top of the model that answers. begun: the
    output of an earlier request of it, whose samples go on. spans: the embeddings in place of
    tokens; None: there are none.
    """

    text: str | None
    ids: tuple[int, ...]
    salt: str | None = None
    adapter: AdapterVersion | None = None
    begun: RequestOutput | None = None
    spans: Spans | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """One conversation, a list of {"role", "content"}, and how the template is to render it.
    adapter: the name of the one that answers.
    """

    messages: Any
    template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    adapter: str | None = None


# One prompt in any form that Inputs.prompt takes; one or a list of them, mixed.
PromptLike = (
    str | Sequence[int] | np.ndarray | jax.Array | Mapping[str, Any] | Chat | Prompt | RequestOutput
)
PromptsLike = PromptLike | Sequence[PromptLike]
SamplingParamsLike = SamplingParams | Sequence[SamplingParams] | None


def _why_no_tokens(model: ModelConfig) -> str | None:
    """Return why a model has no logits of next tokens, None where it has."""
    serves = "classify, embed, pool and hidden are what it serves"
    if not model.is_causal:
        return f"tokens of this model see those after them; {serves}"
    if model.num_labels is None:
        return None
    head = f"a head of {model.num_labels} labels" if model.num_labels else "no head"
    return f"this model has {head} and no vocabulary; {serves}"


class Inputs:
    """Checks and tokenizes the prompts of one model. Any thread may call.

    tokenizer: None takes that of the source folder, loaded when first needed. adapters: those that
    prompts can name. images: reads those of prompts; None: no prompt may have any. ConfigError for
    the name of a tokenizer in its place.
    """

    def __init__(
        self,
        model: ModelConfig,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        source: Path | None,
        adapters: Mapping[str, AdapterVersion] | None = None,
        images: PromptImages | None = None,
    ):
        self.model, self.max_model_len = model, max_model_len
        if isinstance(tokenizer, str | Path):  # which has an `encode`, too
            raise ConfigError(
                f"tokenizer={str(tokenizer)!r}: pass the tokenizer itself, as "
                "transformers.AutoTokenizer.from_pretrained makes it of a folder or a name"
            )
        self.no_tokens = _why_no_tokens(model)  # are drawn or scored; None where they are
        self._tokenizer, self._source = tokenizer, source
        self._adapters = {} if adapters is None else adapters
        self.images = images
        self._generation_config = {} if source is None else load_generation_config(source)
        self._was_used = False  # the tokenizer

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that was passed, else the source folder's, else None."""
        if self._tokenizer is not None or self._source is None:
            return self._tokenizer
        return kept_tokenizer(self._source)

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a completion: the union of config, generation_config and tokenizer."""
        named = self._generation_config.get("eos_token_id")
        ids = {*self.model.eos_token_ids, getattr(self.tokenizer, "eos_token_id", None)}
        ids.update(named if isinstance(named, list) else [named])
        return frozenset(i for i in ids if i is not None and 0 <= i < self.model.vocab_size)

    def default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the values of the checkpoint's generation_config.json."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: self._generation_config.get(name) for name in names}
        if self._generation_config.get("do_sample") is False:
            values["temperature"] = 0.0
        return SamplingParams(
            **{name: value for name, value in values.items() if value is not None}
        )

    def need_tokenizer(self, what: str) -> Tokenizer:
        """Return the tokenizer; RequestError that names what needs it if there is none."""
        if self.tokenizer is None:
            remedy = "pass tokenizer=, or load the params from a folder that has one"
            raise RequestError(f"{what} needs a tokenizer: {remedy}")
        return self.tokenizer

    @contextlib.contextmanager
    def first_use(self) -> Iterator[None]:
        """Keep other threads from the tokenizer inside the block, until it has been used once."""
        if self._was_used:
            yield
        else:
            with _FIRST_USE:
                yield
                self._was_used = True

    def prompt(
        self, prompt: PromptLike, adapter: AdapterVersion | None = None, *, must_fit: bool = True
    ) -> Prompt:
        """Check a prompt in any form against the vocabulary, and tokenize it.

        adapter: the one that came with the call; a prompt may name another. must_fit: raise
        CapacityError unless the context has room for one more token, before a long text is
        tokenized whole. A Prompt is returned as it is. Raises RequestError.
        """
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, RequestOutput):
            return self._begun(prompt, adapter)
        text = salt = name = embeddings = None
        if isinstance(prompt, Chat):
            name = prompt.adapter
            if must_fit:
                self.check_chat(prompt)
            prompt, embeddings = self.conversation(prompt)
        elif isinstance(prompt, Mapping):
            salt, name = salt_of(prompt), prompt.get("adapter")
            embeddings, images = prompt.get("embeddings"), prompt.get("images")
            videos = prompt.get("videos")
            text, prompt = _content(prompt)
            if images is not None or videos is not None:
                sources = Sources.of(images, videos)
                prompt, embeddings = self.with_sources(prompt, sources, must_fit=must_fit)
        if isinstance(prompt, str):
            text, ids = prompt, self._tokenized(prompt, must_fit)
        else:
            ids = _token_ids(prompt, self.max_model_len if must_fit else None)
        if min(ids) < 0 or max(ids) >= self.model.vocab_size:
            self._check_ids(ids)
        if must_fit and len(ids) >= self.max_model_len:
            raise _too_long(len(ids), self.max_model_len)
        adapter = adapter if name is None else self._named(name)
        spans = None if embeddings is None else spans_of(embeddings, len(ids), self.model)
        return Prompt(text, tuple(ids), salt, adapter, spans=spans)

    def render(self, chat: Chat) -> list[int]:
        """Return the token ids of a conversation as its chat template writes it, with one
        placeholder for each image and video; RequestError when there is no template or it refuses
        the messages.
        """
        messages, _ = split_sources(chat.messages, needs_sources=False)
        with self.first_use():
            chat = dataclasses.replace(chat, messages=messages)
            return _ids_of(_rendered(chat, self.need_tokenizer("chat"), tokenize=True))

    def conversation(
        self, chat: Chat, *, needs_sources: bool = True
    ) -> tuple[list[int], dict[int, EmbeddingSpan] | None]:
        """Return the token ids of a conversation, and its images and videos by their places among
        them; None where it has none. needs_sources: refuse a part of type "image" or "video"
        without one.
        """
        _, sources = split_sources(chat.messages, needs_sources=needs_sources)
        if not sources:
            return self.render(chat), None
        return self.written(self.render_text(chat), sources)

    def written(
        self, text: str, sources: Sources
    ) -> tuple[list[int], dict[int, EmbeddingSpan] | None]:
        """Return the token ids of what a chat template has written, and the images and videos that
        stand for its placeholders by their places; None where it has none. Nothing is put around
        the ids.
        """
        tokenizer = self.need_tokenizer("chat")
        if not sources:
            with self.first_use():
                return plain_ids(tokenizer, text), None
        reader = self.image_reader(sources)
        read = reader.read(sources)
        with self.first_use():
            ids = plain_ids(tokenizer, reader.in_text(text, read, tokenizer))
            return reader.placed(ids, read, tokenizer)

    def with_sources(
        self, prompt: object, sources: Sources, *, must_fit: bool
    ) -> tuple[list[int], dict[int, EmbeddingSpan]]:
        """Return the token ids of a prompt, text or ids, and its images and videos by their
        places.
        """
        reader = self.image_reader(sources)
        read = reader.read(sources)
        if isinstance(prompt, str):
            tokenizer = self.need_tokenizer("a str prompt")
            ids = self._tokenized(reader.in_text(prompt, read, tokenizer), must_fit)
        else:
            ids = _token_ids(prompt, self.max_model_len if must_fit else None)
        with self.first_use():
            return reader.placed(ids, read, self.tokenizer)

    def image_reader(self, sources: Sources) -> PromptImages:
        """Return what reads images and videos; RequestError where the engine takes none, or no
        videos.
        """
        if self.images is None:
            check_combination(Facts(config=EngineConfig(), num_images=max(len(sources), 1)))
            raise AssertionError("the rule refuses it")
        if sources.videos and (why := why_no_videos(self.images.vision)) is not None:
            raise RequestError(f"videos[0]: {self.model.family}: {why}")
        return self.images

    def render_text(self, chat: Chat) -> str:
        """Return the text of a conversation, with the template's placeholders of images. Raises
        what `render` raises.
        """
        messages, _ = split_sources(chat.messages, needs_sources=False)
        with self.first_use():
            chat = dataclasses.replace(chat, messages=messages)
            return _rendered(chat, self.need_tokenizer("chat"), tokenize=False)

    def check_chat(self, chat: Chat) -> None:
        """Raise CapacityError for a long conversation that leaves no room in the context, before it
        is tokenized whole. Raises what `render` raises.
        """
        with self.first_use():
            tokenizer = self.need_tokenizer("chat")
            _check_messages(chat.messages)
            if _num_characters(chat.messages) > CHARACTERS_A_TOKEN * self.max_model_len:
                text = self.render_text(chat)
                check_length(text, self.max_model_len, tokenizer.encode)

    def _begun(self, output: RequestOutput, adapter: AdapterVersion | None) -> Prompt:
        """Return the Prompt of an output whose request goes on."""
        if output.error is not None:
            raise RequestError(f"the output of a request that failed cannot go on: {output.error}")
        is_cut = any(c.finish_reason == "abort" for c in output.outputs)
        is_search = any(c.score is not None for c in output.outputs)
        if not output.outputs or is_search or is_cut != (output.unfinished is not None):
            raise RequestError(
                "the output of a beam search cannot go on: pass that of generate, abort or rollout"
            )
        if output.adapter is not None:
            adapter = self._named(output.adapter)
        elif output.adapter_version and adapter is None:
            raise RequestError(
                "the output of a request with an adapter that came with its call: pass lora= again"
            )
        ids, salt = tuple(output.prompt_token_ids), None
        if output.unfinished is not None:
            salt = output.unfinished.salt
        self._check_ids(itertools.chain(ids, *(c.token_ids for c in output.outputs)))
        spans = None
        if output.embeddings is not None:
            spans = spans_of(output.embeddings, len(ids), self.model)
        return Prompt(output.prompt, ids, salt, adapter, output, spans)

    def _check_ids(self, ids: Iterable[int]) -> None:
        """RequestError for a token that is not of the vocabulary."""
        size = self.model.vocab_size
        if (bad := next((t for t in ids if not 0 <= t < size), None)) is not None:
            raise RequestError(f"prompt token id {bad} is outside the vocabulary of {size}")

    def _tokenized(self, text: str, must_fit: bool) -> list[int]:
        try:
            with self.first_use():
                encode = self.need_tokenizer("a str prompt").encode
                if must_fit:
                    check_length(text, self.max_model_len, encode)
                ids = [int(t) for t in encode(text)]
        except (TypeError, UnicodeError) as e:  # half of a surrogate pair, as JSON may hold
            raise RequestError(f"prompt {text!r} cannot be tokenized: {e}") from e
        if not ids:
            raise RequestError(f"prompt {text!r} is empty: at least one token is needed")
        return ids

    def _named(self, name: object) -> AdapterVersion:
        """Return the adapter of this name; RequestError where there is none."""
        if not isinstance(name, str) or name not in self._adapters:
            names = ", ".join(sorted(self._adapters))
            known = f"there are {names}" if names else "there is none"
            raise RequestError(f"adapter {name!r} is unknown: {known}; add_adapter adds one")
        return self._adapters[name]


def as_list(prompts: PromptsLike) -> list[Any]:
    """Return a list of prompts, from one or a list of them, each still in its form.

    A prompt is a str, a list of ints, a 1-D numpy or jax array, {"prompt": str} or
    {"prompt_token_ids": ids}; a dict may have a "cache_salt" (str) and an "adapter" (its name) too,
    and beside token ids "embeddings" in place of some (see EmbeddingSpan), or "images" and
    "videos", lists with one for each placeholder of the model; or a RequestOutput, whose samples go
    on where they were cut.
    """
    if _is_array(prompts):
        if prompts.ndim == 1 and prompts.dtype.kind in "iu":
            return [prompts]
        is_text = prompts.dtype.kind in "OTU"  # a column of a table, say
        wanted = "a list, as its tolist() makes" if is_text else "unpadded lists of token ids"
        raise RequestError(f"prompts is a {prompts.ndim}-D array of {prompts.dtype}: pass {wanted}")
    if isinstance(prompts, str | Mapping | RequestOutput):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        wanted = "a str, token ids, a dict, or a list of these"
        raise RequestError(f"prompts of type {type(prompts).__name__}: pass {wanted}")
    if prompts and is_scalar(prompts[0]) and all(is_scalar(x) for x in prompts):
        return [list(prompts)]  # one prompt of token ids
    return list(prompts)


def may_have_images(prompt: object) -> bool:
    """Return whether a prompt names images or videos, or is a conversation with parts, which may
    have some.
    """
    if isinstance(prompt, Chat):
        messages = prompt.messages if isinstance(prompt.messages, list | tuple) else ()
        contents = (m.get("content") for m in messages if isinstance(m, Mapping))
        return any(isinstance(content, list | tuple) for content in contents)
    return isinstance(prompt, Mapping) and any(
        prompt.get(name) is not None for name in ("images", "videos")
    )


def as_chats(
    messages: Messages | Sequence[Messages],
    template_kwargs: Mapping[str, object] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    adapter: str | None = None,
) -> list[Chat]:
    """Return a Chat of one conversation, or of each in a list of them, all rendered alike."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _no_messages(messages)
    is_one = messages and isinstance(messages[0], Mapping)
    return [
        Chat(
            messages=conversation,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            adapter=adapter,
        )
        for conversation in ([messages] if is_one else messages)
    ]


def with_salt(salt: str, prompt: PromptLike) -> dict[str, object]:
    """Return a prompt (text, ids, or a dict of either) whose cached prefix is shared under `salt`
    alone; a salt that it has counts beside it. All salts passed here must be of one length, so that
    no salt of a prompt stands for another.
    """
    prompt = _as_dict(prompt)
    inner = salt_of(prompt)
    return {**prompt, "cache_salt": salt if inner is None else f"{salt}:{inner}"}


def with_adapter(adapter: str, prompt: PromptLike) -> dict[str, object]:
    """Return a prompt (text, ids, or a dict of either) that names its adapter."""
    return {**_as_dict(prompt), "adapter": adapter}


def salt_of(prompt: Mapping[str, object]) -> str | None:
    """Return the salt that a prompt names; RequestError where it cannot be one."""
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt or not salt.isprintable()):
        raise RequestError(f"cache_salt={salt!r}: must be a non-empty str of printable characters")
    return salt


def match_adapters(lora: PyTree, count: int) -> list[PyTree]:
    """Return one adapter for each prompt, from one for all or a list (with None for the model
    itself) as long as the prompts.
    """
    if not isinstance(lora, list | tuple):
        return [lora] * count
    if len(lora) != count:
        raise RequestError(
            f"{len(lora)} adapters in lora for {count} prompts: pass one for all or one each"
        )
    return list(lora)


def match_sampling_params(sampling_params: SamplingParamsLike, count: int) -> list[SamplingParams]:
    """Return one SamplingParams for each prompt, from None (the defaults), one for all, or a list
    as long as the prompts.
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


def as_key(seed: int | jax.Array) -> Key:
    """Return the key data of a seed: an int, or a jax key of any implementation."""
    _check_concrete("seed", seed)
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    # The data of a key. Other arrays are none: seeds, say, one for each prompt.
    is_data = getattr(seed, "dtype", None) == np.uint32 and getattr(seed, "ndim", 0) == 1
    if is_data and len(seed) >= 2:  # pyright: ignore[reportArgumentType]
        first, second, *rest = (int(w) for w in jax.device_get(seed))
        # Other implementations have wider keys.
        return functools.reduce(fold_in, rest, (first, second))
    if not is_scalar(seed):
        raise RequestError(f"seed={seed!r}: pass an int or a jax key")
    check_seed(seed)
    return key_from_seed(int(seed))


class CallKeys:
    """The keys of a face's calls. seed: what calls without a seed draw from, each anew. count:
    those calls so far. Any thread may ask.
    """

    def __init__(self, seed: int | jax.Array):
        self._key = as_key(seed)
        self._lock = threading.Lock()
        self.count = 0

    def next(self) -> Key:
        """Return a key that no call has had."""
        with self._lock:
            self.count += 1
            return fold_in(self._key, self.count)

    def of(self, seed: int | jax.Array | None) -> Key:
        """Return the key of a call with this seed; None: the next one."""
        return self.next() if seed is None else as_key(seed)


def check_length(text: str, most: int, encode: Callable[[str], Sequence[int]]) -> None:
    """Raise CapacityError where a long text has `most` tokens or more, at the price of tokenizing
    little more than what would fit.

    Beginnings of the text are tokenized, each twice as long as the one before, until one has twice
    as many tokens as may be: where a text is cut changes its tokens around the cut alone. A text
    of another density comes to its end, and its own number of tokens is judged then.
    """
    size = CHARACTERS_A_TOKEN * most
    while size < len(text):
        if (count := len(encode(text[:size]))) >= 2 * most:
            raise CapacityError(
                f"prompt of more than {count} tokens, in {size} of its {len(text)} characters, "
                f"leaves no room in max_model_len={most}: shorten it or raise max_model_len"
            )
        size *= 2


def _too_long(count: int, most: int) -> CapacityError:
    return CapacityError(
        f"prompt of {count} tokens leaves no room in max_model_len={most}: "
        "shorten it or raise max_model_len"
    )


def _content(prompt: Mapping[str, object]) -> tuple[str | None, Any]:
    """Return the text of a prompt that is a dict, and what is to be tokenized: text or ids."""
    keys = set(prompt) - {"cache_salt", "adapter"}
    if prompt.get("embeddings") is not None and "prompt_token_ids" not in keys:
        raise RequestError("embeddings without 'prompt_token_ids', which have places for them")
    has_sources = prompt.get("images") is not None or prompt.get("videos") is not None
    if prompt.get("embeddings") is not None and has_sources:
        raise RequestError(
            "images or videos beside embeddings: places of embeddings are those of all tokens; "
            "pass all of them as images and videos, or all of them as embeddings"
        )
    keys -= {"embeddings", "images", "videos"}
    text = prompt.get("prompt")
    if keys == {"prompt"} and isinstance(text, str):
        return text, text
    if "prompt_token_ids" in keys and keys <= {"prompt", "prompt_token_ids"}:
        ids = prompt["prompt_token_ids"]
        if not isinstance(text, str | None) or isinstance(ids, str | Mapping):
            raise RequestError("prompt: 'prompt' must be a str and 'prompt_token_ids' token ids")
        return text, ids
    raise RequestError(
        f"prompt with keys {sorted(map(str, keys))}: pass 'prompt' (str) or 'prompt_token_ids'"
    )


def _token_ids(prompt: object, most: int | None) -> list[int]:
    """Return the ids of a prompt that is a sequence or an array of them. most: CapacityError for
    as many, before they are looked at; None: any number.
    """
    if _is_array(prompt):
        _check_concrete("prompt", prompt)
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise RequestError(
                f"prompt is a {prompt.ndim}-D array of {prompt.dtype}: pass unpadded 1-D token ids"
            )
        ids = jax.device_get(prompt).tolist()
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        wanted = "a str, a list of token ids, a 1-D array or a dict"
        raise RequestError(f"prompt of type {type(prompt).__name__}: pass {wanted}")
    else:
        if most is not None and len(prompt) >= most:
            raise _too_long(len(prompt), most)
        ids = list(prompt)
        if set(map(type, ids)) != {int}:  # else each is one, as nearly always
            if bad := [t for t in ids if not is_scalar(t)]:
                raise RequestError(f"prompt token id {bad[0]!r}: must be an integer")
            ids = [int(t) for t in ids]
    if not ids:
        raise RequestError("prompt [] is empty: at least one token is needed")
    return ids


def _as_dict(prompt: PromptLike) -> Mapping[str, object]:
    if isinstance(prompt, Mapping):
        return prompt
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}


def _rendered(chat: Chat, tokenizer: Any, *, tokenize: bool) -> Any:
    """Return the text of a conversation, or its token ids."""
    _check_messages(chat.messages)
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "chat: the tokenizer has no chat template; render the prompt yourself and call generate"
        )
    goes_on = chat.continue_final_message
    try:
        return tokenizer.apply_chat_template(
            chat.messages,
            tokenize=tokenize,
            return_dict=False,
            add_generation_prompt=chat.add_generation_prompt and not goes_on,
            continue_final_message=goes_on,
            **(chat.template_kwargs or {}),
        )
    # jinja and transformers raise many types for messages that a template does not take
    except Exception as e:
        raise RequestError(f"chat: the template refused the messages: {e}") from e


def _check_messages(messages: object) -> None:
    """RequestError unless it is a conversation: a template writes something of a text, too."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Collection):
        raise _no_messages(messages)
    if not all(isinstance(message, Mapping) or hasattr(message, "role") for message in messages):
        raise _no_messages(messages)


def _no_messages(messages: object) -> RequestError:
    inside = {type(m).__name__ for m in messages} if isinstance(messages, list | tuple) else set()
    kind = type(messages).__name__ + (f" of {', '.join(sorted(inside))}" if inside else "")
    return RequestError(
        f"chat: messages of type {kind}: pass a list of {{'role': str, 'content': str}}, or a list "
        "of such lists"
    )


def _num_characters(messages: Messages) -> int:
    """Return about how long a conversation is."""
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    contents += [part.get("text") for part in parts if isinstance(part, Mapping)]
    return sum(len(content) for content in contents if isinstance(content, str))


def _ids_of(ids: Iterable[SupportsInt]) -> list[int]:
    return [int(t) for t in ids]


def _check_concrete(name: str, value: object) -> None:
    """RequestError for what has no value yet, under jit, grad or vmap."""
    if isinstance(value, Tracer):
        raise RequestError(
            f"{name} is a tracer: jpaged is host Python and cannot run under jit, grad or vmap"
        )


def _is_array(x: object) -> TypeGuard[np.ndarray]:
    """Return whether a value is a numpy or jax array, and no scalar."""
    return hasattr(x, "dtype") and getattr(x, "ndim", 0) > 0
