"""The log of a server: its lines as text or JSON, and the access log, a line for each request."""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import IO, Any, Literal

from jpaged.openai.server.record import RequestRecord

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
ACCESS = "jpaged.access"
LOGGERS = ("jpaged", "uvicorn.error")  # whose lines the handler takes; access lines pass by these


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message, error, and what is in the
    record's `fields`.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if (more := getattr(record, "fields", None)) is not None:
            fields |= more
        else:
            fields["message"] = record.getMessage()
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """Formats a record as a line: time, level, message."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{stamp(record.created)} {record.levelname:<7} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def stamp(seconds: float) -> str:
    """Return a time of day in UTC, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03}Z"


@contextlib.contextmanager
def written(
    format: LogFormat, level: LogLevel, *, access: bool, stream: IO[str] | None = None
) -> Iterator[None]:
    """Have the log of the process written to stderr, or to a stream, inside the block, from this
    level on. access: the access log too, whatever the level.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    loggers = [logging.getLogger(name) for name in (*LOGGERS, ACCESS)]
    before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers[:-1]:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    loggers[-1].setLevel(logging.INFO if access else logging.CRITICAL)
    try:
        yield
    finally:
        for logger, handlers, propagate, old in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(old)


def log_access(record: RequestRecord) -> None:
    """Write the line of a request that has ended."""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": round(record.seconds, 6),
    }
    if record.error is not None:
        fields["error"] = record.error
    if record.operation is not None:
        fields |= {
            "model": record.model,
            "stream": record.streams,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "finish_reasons": record.finish_reasons,
        }
        if record.first_token_s is not None:
            fields["first_token_s"] = round(record.first_token_s, 6)
    named = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
    logging.getLogger(ACCESS).info("%s", named, extra={"fields": fields})


def _plain(value: object) -> str:
    """Return a value for a line of text."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
