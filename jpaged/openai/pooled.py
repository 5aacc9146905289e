"""Requests for what is made of hidden states, as strict bodies, and their answers: OpenAI's
/v1/embeddings, vLLM's /score and /classify, Jina's and Cohere's /rerank.

A body says what it needs (`task`), gives the token ids of its texts, and turns the vectors or
logits of these into the answer. What runs the model is a server or a batch.
"""

import base64
import dataclasses
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, FailFast, Field

from jpaged.checkpoint.kept_tokenizer import whole
from jpaged.checks import JsonObject
from jpaged.errors import RequestError
from jpaged.models.config import ModelConfig
from jpaged.openai.fields import Integer, Tokens, Truncation, as_many
from jpaged.openai.protocol import Body
from jpaged.request.inputs import Inputs, with_adapter
from jpaged.request.pooled import embedding_options

Task = Literal["embed", "classify"]
MOST_TEXTS = 2048  # of one request, as OpenAI has it
HARMLESS = frozenset({"user", "request_id"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedding:
    """What `embed` is asked beside its prompts."""

    dimensions: int | None = None
    normalize: bool | None = None


class PooledRequest(Body):
    """The fields of every request. model: None is the one that is served. truncate_prompt_tokens:
    how many tokens of each text are kept, its last ones, or -1: as many as the model takes.
    """

    harmless: ClassVar[frozenset[str]] = HARMLESS
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "priority": (0,),
        "truncation_side": ("left",),
        "mm_processor_kwargs": ({},),
    }

    model: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    def task(self, model: ModelConfig) -> Task:
        """Return what the model must make. Raises RequestError for one that does not have it."""
        raise NotImplementedError

    @property
    def asked(self) -> Embedding:
        """What is asked of `embed`."""
        return Embedding()

    def token_lists(self, inputs: Inputs) -> list[list[int]]:
        """Return the token ids of what the model reads. inputs: of the model. Raises
        RequestError.
        """
        raise NotImplementedError

    def prompts(self, lists: Sequence[list[int]], adapter: str | None) -> list[Any]:
        """Return these token lists as prompts, which an adapter of this name reads."""
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        prompts: list[Any] = [{"prompt_token_ids": ids, **salt} for ids in lists]
        return prompts if adapter is None else [with_adapter(adapter, x) for x in prompts]

    def answer(
        self, task: Task, made: np.ndarray, lists: Sequence[Sequence[int]], name: str
    ) -> JsonObject:
        """Return the answer. made: f32 [N, ...], what the task gave of these token lists. name: of
        the model.
        """
        raise NotImplementedError

    def fitted(self, inputs: Inputs, text: str | list[int], pair: str | None = None) -> list[int]:
        """Return the token ids of a text, and of another after it, cut where the body says so."""
        most = inputs.max_model_len
        if pair is None:
            ids = list(inputs.prompt(text, must_fit=False).ids)
        else:
            tokenizer = whole(inputs.need_tokenizer("pairs of texts"))
            ids = list(tokenizer.encode(text, pair))
        if (kept := self.truncate_prompt_tokens) is not None:
            ids = ids[-(most if kept == -1 else min(kept, most)) :]
        if len(ids) > most:
            raise RequestError(
                f"a text of {len(ids)} tokens is longer than max_model_len={most} "
                "(truncate_prompt_tokens=-1 cuts it)"
            )
        return ids


Texts = Annotated[
    list[str | Tokens],
    FailFast(),
    BeforeValidator(as_many, json_schema_input_type=str | Tokens | list[str | Tokens]),
    Field(min_length=1, max_length=MOST_TEXTS),
]
Strings = Annotated[
    list[str],
    FailFast(),
    BeforeValidator(as_many, json_schema_input_type=str | list[str]),
    Field(min_length=1, max_length=MOST_TEXTS),
]


class EmbeddingRequest(PooledRequest):
    """The body of POST /v1/embeddings. normalize: None is as the model's files say."""

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    normalize: bool | None = None

    def task(self, model: ModelConfig) -> Task:
        embedding_options(model.pooling, model.hidden_size, None, self.normalize, self.dimensions)
        return "embed"

    @property
    def asked(self) -> Embedding:
        return Embedding(dimensions=self.dimensions, normalize=self.normalize)

    def token_lists(self, inputs: Inputs) -> list[list[int]]:
        return [self.fitted(inputs, text) for text in self.input]

    def answer(
        self, task: Task, made: np.ndarray, lists: Sequence[Sequence[int]], name: str
    ) -> JsonObject:
        data = [
            {"object": "embedding", "index": i, "embedding": self._written(vector)}
            for i, vector in enumerate(made)
        ]
        return _listed("embd", name, data, lists)

    def _written(self, vector: np.ndarray) -> list[float] | str:
        if self.encoding_format == "float":
            return vector.tolist()
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()


class ClassifyRequest(PooledRequest):
    """The body of POST /classify. use_activation: probabilities; else the logits themselves. Labels
    are called by their numbers, as LABEL_0.
    """

    input: Texts
    use_activation: bool = True

    def task(self, model: ModelConfig) -> Task:
        if not model.num_labels:
            raise RequestError("classify: this model has no head of labels")
        return "classify"

    def token_lists(self, inputs: Inputs) -> list[list[int]]:
        return [self.fitted(inputs, text) for text in self.input]

    def answer(
        self, task: Task, made: np.ndarray, lists: Sequence[Sequence[int]], name: str
    ) -> JsonObject:
        shown = _activated(made) if self.use_activation else made
        data = [
            {
                "index": i,
                "label": f"LABEL_{int(row.argmax())}",
                "probs": row.tolist(),
                "num_classes": len(row),
            }
            for i, row in enumerate(shown)
        ]
        return _listed("classify", name, data, lists)


class PairsRequest(PooledRequest):
    """A request that compares texts: a classifier of one label reads each pair and gives a number;
    of any other model, it is the cosine of their vectors. use_activation: the sigmoid of that
    number; else the number itself.
    """

    use_activation: bool = True

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of texts."""
        raise NotImplementedError

    def task(self, model: ModelConfig) -> Task:
        labels = model.num_labels
        if not labels:
            return "embed"
        if labels > 1:
            raise RequestError(
                f"this model has {labels} labels: scores of pairs need one label, or a model of "
                "embeddings"
            )
        return "classify"

    def token_lists(self, inputs: Inputs) -> list[list[int]]:
        pairs = self.pairs()
        if self.task(inputs.model) == "classify":
            return [self.fitted(inputs, first, second) for first, second in pairs]
        return [self.fitted(inputs, text) for text in _texts_of(pairs)]

    def scores(self, task: Task, made: np.ndarray) -> list[float]:
        """Return a number for each pair."""
        if task == "classify":
            return (_activated(made) if self.use_activation else made)[:, 0].tolist()
        pairs = self.pairs()
        texts = {text: i for i, text in enumerate(_texts_of(pairs))}
        cosines = [np.dot(made[texts[first]], made[texts[second]]) for first, second in pairs]
        return [float(cosine) for cosine in cosines]

    @property
    def asked(self) -> Embedding:
        return Embedding(normalize=True)


class ScoreRequest(PairsRequest):
    """The body of POST /score: one text and many, or as many and as many. text_1 and text_2 are
    older names of queries and documents.
    """

    queries: Strings | None = None
    documents: Strings | None = None
    text_1: Strings | None = None
    text_2: Strings | None = None

    def pairs(self) -> list[tuple[str, str]]:
        sides: list[list[str]] = []
        for new, old in (("queries", "text_1"), ("documents", "text_2")):
            values = [v for v in (getattr(self, new), getattr(self, old)) if v is not None]
            if len(values) != 1:
                said = "both" if values else "neither"
                raise RequestError(f"a request has {new} or {old}: this one has {said}")
            sides += values
        first, second = sides
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise RequestError(
                f"{len(first)} queries and {len(second)} documents: must be as many, or one query"
            )
        return list(zip(first, second, strict=True))

    def answer(
        self, task: Task, made: np.ndarray, lists: Sequence[Sequence[int]], name: str
    ) -> JsonObject:
        data = [
            {"index": i, "object": "score", "score": score}
            for i, score in enumerate(self.scores(task, made))
        ]
        return _listed("score", name, data, lists)


class RerankRequest(PairsRequest):
    """The body of POST /rerank: documents in the order of their scores, the first top_n of them."""

    query: str
    documents: Annotated[list[str], FailFast(), Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: Annotated[Integer, Field(ge=0)] | None = None
    return_documents: bool = True

    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, document) for document in self.documents]

    def answer(
        self, task: Task, made: np.ndarray, lists: Sequence[Sequence[int]], name: str
    ) -> JsonObject:
        scores = self.scores(task, made)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])  # equal ones in their order
        results: list[JsonObject] = []
        for i in order[: self.top_n or len(order)]:
            result: JsonObject = {"index": i, "relevance_score": scores[i]}
            if self.return_documents:
                result["document"] = {"text": self.documents[i]}
            results.append(result)
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": name,
            "usage": _usage(lists),
            "results": results,
        }


POOLED_URLS: dict[str, type[PooledRequest]] = {
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
}


def _texts_of(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the texts of pairs, each once."""
    return list(dict.fromkeys(text for pair in pairs for text in pair))


def _activated(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid of one label, the softmax of several."""
    if logits.shape[1] == 1:
        return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _usage(lists: Sequence[Sequence[int]]) -> JsonObject:
    count = sum(map(len, lists))
    return {"prompt_tokens": count, "total_tokens": count}


def _listed(
    kind: str, name: str, data: list[JsonObject], lists: Sequence[Sequence[int]]
) -> JsonObject:
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": data,
        "usage": _usage(lists),
    }
