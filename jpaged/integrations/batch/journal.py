"""The output file of a run: appended to as answers finish, resumed where it ends, whole after any
kill.
"""

import collections
import fcntl
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

from jpaged.integrations.batch import rows
from jpaged.integrations.batch.answers import encode_line, row_failed
from jpaged.integrations.batch.lines import BatchRequest
from jpaged.integrations.batch.manifest import check_same, manifest_path, read_manifest, write_json
from jpaged.integrations.batch.source import BatchError
from jpaged.openai.protocol import Conversation

Existing = Literal[
    "resume", "overwrite", "refuse"
]  # what to do with an output that is there already


class Writer:
    """Answers to a file, as JSONL or as text that a person reads; in input order through a buffer
    if asked.

    found: keeps account of the rows of a file that can be resumed.
    """

    def __init__(
        self,
        file: IO[bytes],
        *,
        readable: bool = False,
        ordered: bool,
        found: rows.Found | None = None,
    ):
        self._file, self._readable, self._ordered, self._found = file, readable, ordered, found
        self._waiting: dict[
            int, tuple[bytes, bool]
        ] = {}  # finished lines, behind one that still runs
        self._places: collections.deque[int] = (
            collections.deque()
        )  # line numbers, in input order, not written yet

    @property
    def held(self) -> int:
        """Lines that were begun and not written yet; only an ordered writer counts them."""
        return len(self._places)

    def begin(self, number: int) -> None:
        if self._ordered:
            self._places.append(number)

    def write(self, request: BatchRequest, line: Mapping[str, Any]) -> None:
        data, failed = (
            to_read(request, line) if self._readable else encode_line(line),
            row_failed(line),
        )
        if not self._ordered:
            self._put(request.number, data, failed)
            return
        self._waiting[request.number] = data, failed
        while self._places and self._places[0] in self._waiting:
            number = self._places.popleft()
            self._put(number, *self._waiting.pop(number))

    def flush(self, everything: bool = False) -> None:
        """To the file; `everything` also lets go what waits behind a line that will not come (the
        run was cut off).
        """
        if everything:
            for number in sorted(self._waiting):
                self._put(number, *self._waiting.pop(number))
        self._file.flush()

    def _put(self, number: int, data: bytes, failed: bool) -> None:
        self._file.write(data)
        if self._found is not None:
            self._found.note(number, failed=failed)


class Journal:
    """An output file and its manifest.

    Locked from `open` on: a second run on the same file is refused. Nothing is changed before
    `begin`.
    """

    def __init__(self, path: str, manifest: Mapping[str, Any], source: str | None):
        """source: path of the input, where it is a file of lines, which may have grown when it is
        resumed.
        """
        self.path, self._manifest, self._source = path, dict(manifest), source
        self.found = rows.Found(path=path)
        self._file: IO[bytes] | None = None

    def open(self, existing: Existing, *, retry_failed: bool = False) -> None:
        """Open for appending, and find what is there already. Raises BatchError.

        existing: what to do with rows that are there. retry_failed: lines whose row is an error
        count as not done.
        """
        try:
            self._file = open(self.path, "ab")  # noqa: SIM115
        except OSError as e:
            raise BatchError(f"cannot write {self.path}: {e.strerror}") from None
        if not self.is_regular:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"{self.path} is being written by another run") from None
        except OSError as e:  # some network file systems have no locks
            print(f"serve_batch: {self.path} cannot be locked: {e.strerror}", file=sys.stderr)
        if not os.path.exists(self.path) or not os.path.samefile(self.path, self._file.fileno()):
            raise BatchError(f"{self.path} was replaced by another run just now: try again")
        size = os.fstat(self._file.fileno()).st_size
        if not size or existing == "overwrite":
            return
        if existing == "refuse":
            raise BatchError(
                f"{self.path} exists: --resume goes on with it, --overwrite starts again"
            )
        check_same(read_manifest(self.path), self._manifest, self.path, self._source)
        self.found = rows.scan(self.path)
        if retry_failed:
            self.found = self.found.without_failed()

    @property
    def is_regular(self) -> bool:
        """Whether it is a file on a disk, not a device or a pipe."""
        assert self._file is not None
        return stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    def begin(self) -> IO[bytes]:
        """The file to append to, from its last whole row on; the manifest is written."""
        assert self._file is not None
        if self.is_regular:
            self._file.truncate(self.found.size)
            write_json(manifest_path(self.path), self._manifest)
        return self._file

    def finish(
        self, *, complete: bool, lines: int, ordered: bool, source: Mapping[str, Any]
    ) -> None:
        """Put the file into its final form: on the disk, one row a line where several were written,
        in order if asked.

        complete: the input has ended and every line of it is answered; lines: how many; source: the
        input's identity. Else the rows stay as they are.
        """
        assert self._file is not None
        self._file.flush()
        if not self.is_regular:
            return
        os.fsync(self._file.fileno())
        if complete:
            if self.found.superseded or (ordered and not self.found.ascending):
                rows.compact(self.path, ordered=ordered)
            end = {"complete": True, "lines": lines}
            write_json(manifest_path(self.path), {**self._manifest, "input": dict(source), **end})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def to_read(request: BatchRequest, line: Mapping[str, Any]) -> bytes:
    """A prompt and its answer for a person's eyes."""
    prompt = _asked(request).rstrip()
    if len(prompt) > 1000:
        prompt = f"{prompt[:500]}\n... ({len(prompt) - 1000} characters) ...\n{prompt[-500:]}"
    body = (line.get("response") or {}).get("body") or line
    name = f"line {request.number}" + ("" if request.id is None else f" ({request.id})")
    parts = [f"=== {name}\n", f"{prompt}\n" if prompt else ""]
    if error := body.get("error") or line.get("error"):
        parts.append(f"--- error\n{error.get('error', error)['message']}\n")
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


def _asked(request: BatchRequest) -> str:
    match request.body:
        case None:
            return ""
        case Conversation():
            return "\n".join(f"{m.role}: {m.content}" for m in request.body.messages)
    prompt = request.body.given_prompt(None)
    return f"token ids {prompt}" if isinstance(prompt, list) else prompt


def shard_path(output: str, shard: tuple[int, int]) -> str:
    """Where shard i of N writes: answers.jsonl -> answers.i-of-N.jsonl."""
    path = Path(output)
    return str(path.with_name(f"{path.stem}.{shard[0]}-of-{shard[1]}{path.suffix}"))
