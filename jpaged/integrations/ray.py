"""Completes a column of prompts in a Ray dataset: a class for `Dataset.map_batches`.

    ds.map_batches(
        JPagedPredictor, fn_constructor_kwargs={"model": "DIR", "sampling": {"temperature": 0.7,
        "max_tokens": 64}, "id_column": "id"}, compute=ray.data.ActorPoolStrategy(size=4),
        batch_size=256, num_gpus=1, max_concurrency=2,
    )

It needs Ray: pip install 'jpaged[ray]'. docs/cluster.md has a complete example.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

from jpaged.config import EngineFields
from jpaged.errors import ConfigError, RequestError
from jpaged.integrations.batch.lines import BarePrompt
from jpaged.integrations.seeds import stable_seed
from jpaged.llm import LLM
from jpaged.openai.protocol import SAMPLING, Conversation, SamplingFields
from jpaged.request.inputs import Chat, with_adapter
from jpaged.request.outputs import Logprob, RequestOutput
from jpaged.sampling_params import SamplingParams

try:
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    from ray.data.block import BlockAccessor  # pyright: ignore[reportMissingImports]
except ImportError as e:
    raise ImportError(
        "jpaged.integrations.ray needs Ray with its datasets: pip install 'jpaged[ray]'"
    ) from e

TOP = pa.list_(
    pa.struct(
        {"token_id": pa.int64(), "logprob": pa.float32(), "rank": pa.int64(), "token": pa.string()}
    )
)
# The columns that are added to every row. With n > 1 in `sampling`, those of completions are lists.
OF_COMPLETION = {
    "generated_text": pa.string(),
    "generated_token_ids": pa.list_(pa.int64()),
    "finish_reason": pa.string(),
}
OF_REQUEST = {
    "prompt_tokens": pa.int64(),
    "completion_tokens": pa.int64(),
    "cached_tokens": pa.int64(),
    "error": pa.string(),
    "error_type": pa.string(),
}
# These decide which columns there are, so a single row cannot set them.
SHAPING = "n", "logprobs", "prompt_logprobs"


class JPagedPredictor:
    """Completes one column of every batch. Each actor keeps an LLM of its own between batches.

    model: a checkpoint folder that every node can read. sampling: SamplingParams, or a mapping of
    their fields, which override the model's generation_config (max_tokens is then 256 for prompts
    and None for conversations). prompt_column: in each row a str, token ids, or a conversation (a
    list of {"role", "content"}). id_column: the name of a row, from which its seed is made; a row
    that is run again, anywhere, gets the same text. Without it, the seed is made from the prompt
    and the number of equal prompts before it in the batch: a retried batch repeats itself, but
    equal prompts of two batches draw the same. sampling_column: a mapping for each row, which
    overrides `sampling`; null fields are ignored. A `priority` in either orders the rows of an
    actor. adapters: name -> the folder (or tree) of an adapter, see docs/lora.md. adapter_column:
    the name of each row's adapter; null is the model itself. chat_template_kwargs: variables of the
    chat template. output_prefix: put before the names of the added columns. All other arguments are
    EngineConfig's fields.

    Added columns: generated_text, generated_token_ids, finish_reason (lists if n > 1),
    prompt_tokens, completion_tokens, cached_tokens, error and error_type (null for a row without an
    error), and logprobs and prompt_logprobs if `sampling` asks for them. A row that cannot run is
    kept, with its error. Faults of the dataset or the arguments raise ConfigError.
    """

    def __init__(
        self,
        model: Any,
        *,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        prompt_column: str = "prompt",
        id_column: str | None = None,
        sampling_column: str | None = None,
        adapters: Mapping[str, Any] | None = None,
        adapter_column: str | None = None,
        seed: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        output_prefix: str = "",
        **engine_config: Unpack[EngineFields],
    ):
        self._llm = LLM(model, seed=seed, **engine_config)
        for name, source in (adapters or {}).items():
            self._llm.add_adapter(name, source)
        self._prompt_column, self._id_column = prompt_column, id_column
        self._sampling_column, self._adapter_column = sampling_column, adapter_column
        self._seed, self._template, self._prefix = seed, chat_template_kwargs, output_prefix
        # The default of max_tokens: for a conversation (True), and for a prompt.
        self._longest: dict[bool, int | None] | None = None
        if isinstance(sampling, SamplingParams):
            self._params = sampling
        else:
            fields = dict(sampling or {})
            known = [f.name for f in dataclasses.fields(SamplingParams)]
            if unknown := sorted(set(fields) - set(known)):
                raise ConfigError(
                    f"sampling has {unknown[0]!r}: SamplingParams has {', '.join(known)}"
                )
            self._params = dataclasses.replace(self._llm.default_sampling_params(), **fields)
            if "max_tokens" not in fields:
                self._longest = {True: Conversation.longest, False: BarePrompt.longest}
        self._params.validate(self._llm.engine_config, self._llm.model_config.vocab_size)
        # finished, and not yet taken by their batch
        self._done: dict[str, RequestOutput] = {}

    async def __call__(self, batch: Any) -> Any:
        """Return a pyarrow Table with the columns of a batch (in any of Ray's formats) and the
        added ones.

        This is a coroutine, so that Ray runs several batches of an actor at once. All of them step
        the same engine, which then stays full while one batch ends.
        """
        table = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()
        answers: list[str | RequestOutput | Exception] = [*self._admit(table)]
        pending = {answer for answer in answers if isinstance(answer, str)}
        try:
            while pending:
                pending -= self._step(pending)
                await asyncio.sleep(0)
        except BaseException:
            for answer in answers:
                if isinstance(answer, str):
                    self._llm.abort(answer)
                    self._done.pop(answer, None)
            raise
        outputs = [
            self._done.pop(answer) if isinstance(answer, str) else answer for answer in answers
        ]
        for name, (kind, values) in self._columns(outputs).items():
            table = table.append_column(self._prefix + name, pa.array(values, kind))
        return table

    def _step(self, pending: set[str]) -> set[str]:
        """Take one step of the engine. Return which of `pending` have finished, in this step or in
        one that another batch took.
        """
        if self._llm.has_unfinished():
            self._done |= {output.request_id: output for output in self._llm.step()}
        return pending & self._done.keys()

    def _admit(self, table: Any) -> list[str | Exception]:
        """Return the request id of each row that can run, and the error of each that cannot."""
        names = table.column_names
        needed = (self._prompt_column, self._id_column, self._sampling_column)
        needed += (self._adapter_column,)
        for name in needed:
            if name is not None and name not in names:
                raise ConfigError(
                    f"column {name!r} is not in the dataset, which has {', '.join(names)}"
                )
        if taken := sorted(set(names) & {self._prefix + name for name in self._columns([])}):
            raise ConfigError(
                f"column {taken[0]!r} is in the dataset already: rename it, or pass output_prefix"
            )
        rows = [[None] * len(table) if name is None else table[name].to_pylist() for name in needed]
        seen = collections.Counter[str]()
        answers = []
        for prompt, row_id, sampling, adapter in zip(*rows, strict=True):
            try:
                answers.append(self._add(_prompt(prompt), row_id, sampling, adapter, seen))
            except Exception as e:  # an error of one row must not end the batch
                answers.append(e)
        return answers

    def _add(
        self,
        prompt: Any,
        row_id: Any,
        sampling: Any,
        adapter: str | None,
        seen: collections.Counter[str],
    ) -> str:
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
        fields = _row_sampling(sampling)
        if self._longest is not None:
            fields.setdefault("max_tokens", self._longest[is_chat])
        params = dataclasses.replace(self._params, **fields)
        if params.seed is None:
            if self._id_column is not None and not isinstance(row_id, str | int):
                raise RequestError(
                    f"{self._id_column}={row_id!r}: an id must be a string or an integer"
                )
            if self._id_column is None:
                seen[repr(prompt)] += 1
                name = f"prompt {prompt!r} {seen[repr(prompt)]}"
            else:
                name = f"id {row_id}"
            params = dataclasses.replace(params, seed=stable_seed(self._seed, name))
        if is_chat:
            prompt = Chat(messages=prompt, template_kwargs=self._template, adapter=adapter)
        elif adapter is not None:
            prompt = with_adapter(adapter, prompt)
        return self._llm.add_request(prompt, params)

    def _columns(self, outputs: list[Any]) -> dict[str, tuple[Any, list[Any]]]:
        """Return name -> (type, values) of the added columns. An Exception among the outputs stands
        for a row that never ran.
        """
        errors = [o if isinstance(o, Exception) else o.error for o in outputs]
        good = [None if isinstance(o, Exception) else o for o in outputs]
        made = [[] if o is None or o.error is not None else o.outputs for o in good]

        def each(get: Any) -> list[Any]:  # one value a row, or the list of its completions'
            values = [[get(c) for c in completions] or None for completions in made]
            return values if self._params.n > 1 else [v and v[0] for v in values]

        values: dict[str, list[Any]] = {
            "generated_text": each(lambda c: c.text),
            "generated_token_ids": each(lambda c: c.token_ids),
            "finish_reason": each(lambda c: c.finish_reason),
            "prompt_tokens": [None if o is None else len(o.prompt_token_ids) for o in good],
            "completion_tokens": [
                sum(len(c.token_ids) for c in completions) for completions in made
            ],
            "cached_tokens": [None if o is None else o.num_cached_tokens for o in good],
            "error": [None if e is None else str(e) for e in errors],
            "error_type": [None if e is None else type(e).__name__ for e in errors],
        }
        types = {
            name: pa.list_(kind) if self._params.n > 1 else kind
            for name, kind in OF_COMPLETION.items()
        }
        types |= OF_REQUEST
        if self._params.logprobs is not None:
            types["logprobs"] = pa.list_(pa.list_(TOP)) if self._params.n > 1 else pa.list_(TOP)
            values["logprobs"] = each(lambda c: [_top(entries) for entries in c.logprobs])
        if self._params.prompt_logprobs is not None:
            types["prompt_logprobs"] = pa.list_(TOP)
            values["prompt_logprobs"] = [
                None
                if o is None or o.error is not None
                else [e and _top(e) for e in o.prompt_logprobs]
                for o in good
            ]
        return {name: (types[name], values[name]) for name in types}


def _prompt(value: Any) -> Any:
    """Return a prompt without the null fields that Arrow added to give all messages the same
    type.
    """
    if isinstance(value, list) and any(isinstance(message, Mapping) for message in value):
        return [
            {k: v for k, v in m.items() if v is not None} if isinstance(m, Mapping) else m
            for m in value
        ]
    return value


def _row_sampling(value: Any) -> dict[str, Any]:
    """Return a row's own fields of SamplingParams, checked in the same way as those of a batch
    file's line.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(
            f"sampling of type {type(value).__name__}: pass a mapping of SamplingParams' fields"
        )
    fields = {name: field for name, field in value.items() if field is not None}
    for name, field in fields.items():
        if name not in _ROW_FIELDS:
            allowed = ", ".join(_ROW_FIELDS)
            raise RequestError(
                f"{name}={field!r}: a row cannot set this field; it can set {allowed}"
            )
    return SamplingFields.read(fields).sampling()


_ROW_FIELDS = [name for name in SAMPLING if name not in SHAPING]


def _top(entries: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "logprob": e.logprob, "rank": e.rank, "token": e.decoded_token}
        for token, e in entries.items()
    ]
