"""Journal: the output of a run. It is a file to which answers are appended as they finish, which a
later run resumes and which is intact after any kill; or a stream.
"""

import collections
import fcntl
import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TextIO

from jpaged.integrations.batch import rows
from jpaged.integrations.batch.answers import encode_line, row_failed
from jpaged.integrations.batch.lines import BatchRequest
from jpaged.integrations.batch.manifest import check_same, manifest_path, read_manifest, write_json
from jpaged.integrations.batch.source import BatchError
from jpaged.openai.fields import content_text
from jpaged.openai.protocol import Conversation
from jpaged.streams import shown

Existing = Literal["resume", "overwrite", "refuse"]  # what to do with an existing output


class Stream(Protocol):
    """What takes the answers of a run that no file takes."""

    def write(self, data: bytes, /) -> object: ...
    def flush(self) -> object: ...
    def isatty(self) -> bool: ...


class Journal:
    """The output of a run and, for a file, its manifest.

    path: a file; or the stream: None prints text for a person, "-" writes JSONL. ordered: write in
    the order of the input, through a buffer. A file is locked from `open` on, so a second run on it
    is refused. Nothing is changed before `begin`. found: what the file's rows hold; empty for a
    stream.
    """

    def __init__(self, path: str | None, manifest: Mapping[str, Any], *, ordered: bool):
        self.path, self._manifest, self._ordered = path, dict(manifest), ordered
        self.found = rows.Found(path or "-")
        self._file: IO[bytes] | None = None
        self.is_regular = False  # a file on a disk, not a device, a pipe or a stream
        self._waiting: dict[
            int, tuple[bytes, bool]
        ] = {}  # finished, behind one that is still running
        self._places: collections.deque[int] = (
            collections.deque()
        )  # lines that have begun and are not written yet

    def open(self, existing: Existing, source: str | None, *, retry_failed: bool = False) -> None:
        """Open a file for appending, and read what it holds already. Raises BatchError.

        existing: what to do with rows that it holds. source: path of the input if it is a file of
        lines, which may have grown since. retry_failed: run lines again whose row is an error.
        """
        if self.path is None or self.path == "-":
            return
        try:
            self._file = open(self.path, "ab")  # noqa: SIM115
        except OSError as e:
            raise BatchError(f"cannot write {self.path}: {e.strerror}") from None
        self.is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        if not self.is_regular:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"{self.path} is being written by another run") from None
        except OSError as e:  # some network file systems have no locks
            print(f"warning: {self.path} cannot be locked: {e.strerror}", file=sys.stderr)
        if not os.path.exists(self.path) or not os.path.samefile(self.path, self._file.fileno()):
            raise BatchError(f"{self.path} was replaced by another run just now: try again")
        if not os.fstat(self._file.fileno()).st_size or existing == "overwrite":
            return
        if existing == "refuse":
            said = "--resume continues it, --overwrite starts again"
            raise BatchError(f"{self.path} exists: {said}")
        check_same(read_manifest(self.path), self._manifest, self.path, source)
        self.found = rows.scan(self.path)
        if retry_failed:
            self.found.retry_failed()

    def begin(self, stream: Stream) -> None:
        """Write the manifest and append to the file after its last whole row; or write to the
        stream.
        """
        self._to: Stream = stream if self._file is None else self._file
        if self.is_regular:
            assert self._file is not None
            self._file.truncate(self.found.size)
            write_json(manifest_path(self.found.path), self._manifest)

    @property
    def held(self) -> int:
        """Return how many lines have begun and are not written yet; only an ordered run counts
        them.
        """
        return len(self._places)

    def expect(self, number: int) -> None:
        """Note that a line has begun."""
        if self._ordered:
            self._places.append(number)

    def write(self, request: BatchRequest, line: Mapping[str, Any]) -> None:
        data = to_read(request, line) if self.path is None else encode_line(line)
        if self.path is None and self._to.isatty():
            data = shown(data.decode()).encode()
        self._waiting[request.number] = data, row_failed(line)
        if not self._ordered:
            self._put(request.number)
        while self._places and self._places[0] in self._waiting:
            self._put(self._places.popleft())

    def flush(self, everything: bool = False) -> None:
        """Write what is buffered. everything: also lines behind one that will not finish, because
        the run was cut off.
        """
        if everything:
            for number in sorted(self._waiting):
                self._put(number)
        self._to.flush()

    def _put(self, number: int) -> None:
        data, failed = self._waiting.pop(number)
        self._to.write(data)
        if self.is_regular:
            self.found.note(number, failed=failed, length=len(data))

    def finish(self, *, complete: bool, lines: int, source: Mapping[str, Any]) -> None:
        """Bring a file into its final form: synced to disk, one row a line if a line had several,
        and in order if asked.

        complete: whether the input has ended and all of its lines are answered; otherwise the rows
        stay as they are. lines: how many lines there are. source: the input's identity.
        """
        if not self.is_regular:
            return
        assert self._file is not None
        os.fsync(self._file.fileno())
        if complete:
            earlier = self.found
            if earlier.superseded or (self._ordered and not earlier.ascending):
                rows.rewrite([earlier], earlier.path, ordered=self._ordered)
            end = {"complete": True, "lines": lines}
            write_json(
                manifest_path(earlier.path), {**self._manifest, "input": dict(source), **end}
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _TextOnly:
    """A Stream over a text stream without bytes below it, such as stdout in a notebook."""

    def __init__(self, text: TextIO):
        self._text = text
        self.flush, self.isatty = text.flush, text.isatty

    def write(self, data: bytes, /) -> None:
        self._text.write(data.decode())  # whole lines come, so no character is cut


def bytes_of(text: TextIO) -> Stream:
    """Return what takes the bytes of a text stream."""
    return getattr(text, "buffer", None) or _TextOnly(text)


def to_read(request: BatchRequest, line: Mapping[str, Any]) -> bytes:
    """Return a prompt and its answer as text for a person."""
    prompt = _asked(request).rstrip()
    if len(prompt) > 1000:
        prompt = f"{prompt[:500]}\n... ({len(prompt) - 1000} characters) ...\n{prompt[-500:]}"
    body = (line.get("response") or {}).get("body") or line
    name = f"line {request.number}" + ("" if request.id is None else f" ({request.id})")
    parts = [f"=== {name}\n", f"{prompt}\n" if prompt else ""]
    if error := body.get("error") or line.get("error"):
        parts.append(f"--- error\n{error.get('error', error)['message']}\n")
        choices = []
    elif request.pooled is not None:
        parts.append(f"--- answer\n{_short_answer(body)}\n")
        choices = []
    else:
        choices = body.get("choices", [body])
    for choice in choices:
        usage, ending = body["usage"], choice["finish_reason"]
        if len(choices) == 1:
            ending += f", {usage['completion_tokens']} tokens"
        if cached := usage["prompt_tokens_details"]["cached_tokens"]:
            ending += f", {cached} prompt tokens from the cache"
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        text = f"token ids {choice['token_ids']}" if text is None else text
        parts.append(f"--- answer ({ending})\n{text.rstrip()}\n")
    return ("".join(parts) + "\n").encode(errors="replace")


def _short_answer(body: Mapping[str, Any]) -> str:
    """Return the beginning of an answer with vectors, scores or ranks."""
    text = json.dumps(body.get("data", body.get("results")))
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _asked(request: BatchRequest) -> str:
    match request.body:
        case None:
            return ""
        case Conversation():
            return "\n".join(f"{m.role}: {content_text(m.content)}" for m in request.body.messages)
    prompt = request.body.given_prompt(None)
    return f"token ids {prompt}" if isinstance(prompt, list) else prompt


def shard_path(output: str, shard: tuple[int, int]) -> str:
    """Return where shard i of N writes: answers.jsonl -> answers.i-of-N.jsonl."""
    path = Path(output)
    return str(path.with_name(f"{path.stem}.{shard[0]}-of-{shard[1]}{path.suffix}"))
