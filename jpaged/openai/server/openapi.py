"""Describes the API for GET /openapi.json, by the pydantic models that read the bodies and the
typed dictionaries that answers are.
"""

from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter

from jpaged.fleet.facts import version
from jpaged.openai import responses
from jpaged.openai.server import pooling
from jpaged.openai.server.bodies import (
    Detokenize,
    ServedChat,
    ServedCompletion,
    Tokenize,
    TokenizeChat,
)
from jpaged.openai.server.control import UpdateWeights
from jpaged.openai.server.message_bodies import CountedMessages, MessagesBody
from jpaged.openai.server.response_bodies import KeptResponseBody, ResponseBody
from jpaged.openai.server.settings import ServerSettings
from jpaged.openai.server.token_bodies import TokensBody
from jpaged.session import OnPause

REF = "#/components/schemas/{model}"
Schema = dict[str, Any]
INTEGER: Schema = {"type": "integer"}
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
MESSAGE_ERROR: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": TEXT, "message": TEXT},
        },
    },
}
MESSAGE: Schema = {
    "type": "object",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "usage"],
    "properties": {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": {"type": "array", "minItems": 1, "items": OBJECT},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": OBJECT,
    },
}
RESPONSE: Schema = {
    "type": "object",
    "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
    "properties": {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": INTEGER,
        "status": {"enum": ["completed", "incomplete"]},
        "model": TEXT,
        "output": {"type": "array", "minItems": 1, "items": OBJECT},
        "usage": OBJECT,
    },
}
MODEL: Schema = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {"id": TEXT, "object": {"const": "model"}, "created": INTEGER, "owned_by": TEXT},
}
MODELS: Schema = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": MODEL}},
}
TOKENS: Schema = {
    "type": "object",
    "required": ["tokens", "count", "max_model_len"],
    "properties": {
        "tokens": {"type": "array", "items": INTEGER},
        "count": INTEGER,
        "max_model_len": INTEGER,
    },
}
DETOKENIZED: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {"prompt": TEXT, "token_strs": {"type": "array", "items": TEXT}},
}
POOLED: Schema = {
    "type": "object",
    "anyOf": [{"required": ["data"]}, {"required": ["results"]}],
}
COUNT: Schema = {
    "type": "object",
    "required": ["input_tokens"],
    "properties": {"input_tokens": INTEGER},
}
ALIVE: Schema = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"const": "ok"}},
}
VERSION: Schema = {
    "type": "object",
    "required": ["version"],
    "properties": {"version": TEXT},
}


DRAWN: Schema = {
    "type": "object",
    "required": ["request_id", "choices"],
    "properties": {
        "request_id": TEXT,
        "choices": {"type": "array", "minItems": 1, "items": OBJECT},
    },
}
PAUSED: Schema = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"enum": ["paused", "resumed"]}},
}
IS_PAUSED: Schema = {
    "type": "object",
    "required": ["is_paused"],
    "properties": {"is_paused": {"type": "boolean"}},
}
WEIGHTS: Schema = {
    "type": "object",
    "required": ["weight_version"],
    "properties": {"weight_version": INTEGER, "seconds": {"type": "number"}},
}


class Description:
    """Collects the schemas of all bodies and answers, each under its name."""

    def __init__(self, names: list[str]):
        self._names = names
        self.schemas: dict[str, Schema] = {"Error": ERROR, "MessageError": MESSAGE_ERROR}

    def body(self, kind: type[BaseModel]) -> Schema:
        """Return a reference to the schema of a body."""
        schema = kind.model_json_schema(ref_template=REF)
        self._take(schema)
        name = kind.__name__
        schema = _as_read(schema)
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [*self._names, None]}
        self.schemas[name] = schema
        return {"$ref": REF.format(model=name)}

    def answer(self, name: str, kind: Any) -> Schema:
        """Return a reference to the schema of an answer: a typed dictionary, or a schema."""
        schema = kind
        if not isinstance(kind, dict):
            schema = TypeAdapter(kind).json_schema(ref_template=REF)
            self._take(schema)
        self.schemas[name] = schema
        return {"$ref": REF.format(model=name)}

    def _take(self, schema: Schema) -> None:
        for name, inner in schema.pop("$defs", {}).items():
            read = _as_read(inner) if "properties" in inner else inner
            assert self.schemas.setdefault(name, read) == read, f"two schemas are named {name}"


def _as_read(schema: Schema) -> Schema:
    """Return the schema of a body as the server reads it: null is "not given", unknown fields are
    left out.
    """
    needed = schema.get("required", [])
    fields = {
        name: field if name in needed or _takes_null(field) else _or_null(field)
        for name, field in schema["properties"].items()
    }
    return {**schema, "properties": fields, "additionalProperties": True}


def _takes_null(field: Schema) -> bool:
    has_types = bool(field.keys() & {"type", "anyOf", "$ref", "enum", "const"})
    return {"type": "null"} in field.get("anyOf", []) or not has_types


def _or_null(field: Schema) -> Schema:
    return {"anyOf": [field, {"type": "null"}]}


def describe(settings: ServerSettings, names: list[str]) -> Schema:
    """Return the OpenAPI document of a server. names: of the models that it serves."""
    made = Description(names)
    keeps = settings.keep_responses_s is not None
    response = made.answer("Response", RESPONSE)
    posts: dict[str, tuple[str, list[type[BaseModel]], Schema, bool]] = {
        "/v1/chat/completions": (
            "Answer a conversation.",
            [ServedChat],
            made.answer("ChatCompletion", responses.ChatCompletion),
            True,
        ),
        "/v1/completions": (
            "Go on with texts.",
            [ServedCompletion],
            made.answer("Completion", responses.Completion),
            True,
        ),
        "/v1/responses": (
            "Answer a conversation, in OpenAI's newer form.",
            [KeptResponseBody if keeps else ResponseBody],
            response,
            True,
        ),
        "/v1/responses/input_tokens": (
            "Count the tokens of a response's prompt.",
            [ResponseBody],
            made.answer("ResponseTokens", COUNT),
            False,
        ),
        "/v1/messages": (
            "Answer a conversation, in Anthropic's form.",
            [MessagesBody],
            made.answer("AnswerMessage", MESSAGE),
            True,
        ),
        "/v1/messages/count_tokens": (
            "Count the tokens of a message's prompt.",
            [CountedMessages],
            made.answer("MessageTokens", COUNT),
            False,
        ),
        "/tokenize": (
            "Return the tokens of a text or of a conversation.",
            [Tokenize, TokenizeChat],
            made.answer("Tokens", TOKENS),
            False,
        ),
        "/detokenize": (
            "Return the text of tokens.",
            [Detokenize],
            made.answer("Detokenized", DETOKENIZED),
            False,
        ),
    }
    posts |= {
        "/inference/v1/generate": (
            "Go on with token ids, in vLLM's form of tokens in and tokens out.",
            [TokensBody],
            made.answer("DrawnTokens", DRAWN),
            True,
        ),
        "/pause": ("Have no step run until /resume.", [], made.answer("Paused", PAUSED), False),
        "/resume": ("Go on after /pause.", [], made.answer("Resumed", PAUSED), False),
        "/update_weights": (
            "Serve the weights of a folder from now on.",
            [UpdateWeights],
            made.answer("NewWeights", WEIGHTS),
            False,
        ),
    }
    listed = made.answer("Pooled", POOLED)
    for path, kind in pooling.ROUTES.items():
        posts[path] = ("Return embeddings, scores, ranks or labels.", [kind], listed, False)
    gets: dict[str, tuple[str, Schema, bool]] = {
        "/v1/models": ("List what is served.", made.answer("Models", MODELS), False),
        "/v1/models/{name}": (
            "Describe one model or adapter.",
            made.answer("Model", MODEL),
            False,
        ),
        "/health": ("Tell whether the engine lives.", made.answer("Alive", ALIVE), True),
        "/ready": ("Tell whether a request would be taken.", made.answer("Ready", ALIVE), True),
        "/version": ("Return the version.", made.answer("Version", VERSION), False),
        "/status": ("Return what is served, and what runs.", OBJECT, False),
        "/is_paused": ("Tell whether it is paused.", made.answer("IsPaused", IS_PAUSED), False),
        "/weight_info": (
            "Return the version of the weights.",
            made.answer("WeightInfo", WEIGHTS),
            False,
        ),
    }
    paths: dict[str, Schema] = {}
    for path, (summary, kinds, answer, streams) in posts.items():
        bodies = [made.body(kind) for kind in kinds]
        content: Schema = {"application/json": {"schema": answer}}
        if streams:
            content["text/event-stream; charset=utf-8"] = {}
        operation = _operation(path, summary, content, not settings.api_keys)
        if bodies:
            schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
            body = {"required": True, "content": {"application/json": {"schema": schema}}}
            operation = {"requestBody": body, **operation}
        if path == "/pause":
            modes = {"enum": list(get_args(OnPause))}
            operation["parameters"] = [{"name": "mode", "in": "query", "schema": modes}]
        paths[path] = {"post": operation}
    for path, (summary, answer, is_open) in gets.items():
        content = {"application/json": {"schema": answer}}
        operation = _operation(path, summary, content, is_open or not settings.api_keys)
        paths[path] = {"get": {**operation, **_named(path)}}
    text = {"text/plain; version=0.0.4; charset=utf-8": {"schema": TEXT}}
    told = "Return metrics in Prometheus' text format."
    paths["/metrics"] = {"get": _operation("/metrics", told, text, not settings.api_keys)}
    if keeps:
        path, is_open = "/v1/responses/{name}", not settings.api_keys
        shown = {"application/json": {"schema": response}}
        gone = {"application/json": {"schema": OBJECT}}
        paths[path] = {
            "get": {**_operation(path, "Return a kept response.", shown, is_open), **_named(path)},
            "delete": {**_operation(path, "Forget one.", gone, is_open), **_named(path)},
        }
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "jpaged", "version": version()},
        "paths": paths,
        "components": {"schemas": made.schemas},
    }
    if settings.api_keys:
        bearer = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"key": bearer}
    return document


def _operation(path: str, summary: str, content: Schema, is_open: bool) -> Schema:
    kind = "MessageError" if path.startswith("/v1/messages") else "Error"
    error = {"application/json": {"schema": {"$ref": REF.format(model=kind)}}}
    operation: Schema = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "The request is wrong.", "content": error},
            "5XX": {"description": "The server cannot answer it.", "content": error},
        },
    }
    return operation if is_open else {**operation, "security": [{"key": []}]}


def _named(path: str) -> Schema:
    """Return the parameters of a path with a name in it."""
    if "{name}" not in path:
        return {}
    return {"parameters": [{"name": "name", "in": "path", "required": True, "schema": TEXT}]}
