"""Splits the text of a chat's answer, as it is generated, into reasoning, content and tool calls.

Every family of models marks these parts in its own way. Text that is not a well-formed call stays
content, so that no text is lost. Every character is examined a bounded number of times.
"""

import dataclasses
import json
import re
import secrets
from typing import Any, Literal, NotRequired, TypedDict

Style = Literal["hermes", "llama", "harmony", "none"]
STYLES: tuple[Style, ...] = ("hermes", "llama", "harmony", "none")

PIECE = 4096  # characters that are parsed at once
LONGEST_HEAD = 1024  # characters of a call before its arguments, at most
HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class Delta(TypedDict):
    """A piece of a message, in the form that a stream sends."""

    reasoning_content: NotRequired[str]
    content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


def style_of(chat_template: str) -> Style:
    """Return the way in which a model writes tool calls, by the markers in its chat template."""
    if "<|channel|>" in chat_template:
        return "harmony"
    if "<tool_call>" in chat_template:
        return "hermes"
    if "python_tag" in chat_template or (
        '"parameters"' in chat_template and "tools" in chat_template
    ):
        return "llama"
    return "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How a model marks the parts of its answers. style: how it writes tool calls. thinks: whether
    reasoning is separated from content.
    """

    style: Style
    thinks: bool

    @classmethod
    def of(cls, tokenizer: Any, style: Style | None = None, *, thinks: bool = True) -> "Format":
        """Return the format that the model's chat template implies. style overrides the template's
        way of writing calls.
        """
        template = getattr(tokenizer, "chat_template", None) or ""
        text = template if isinstance(template, str) else json.dumps(template)
        return cls(style=style or style_of(text), thinks=thinks and "</think>" in text)

    def is_thinking(self, prompt_end: str) -> bool:
        """Return whether a prompt with this end has already opened the reasoning."""
        return self.thinks and prompt_end.rstrip().endswith("<think>")

    def reader(self, prompt_end: str, *, tools: bool) -> "Reader":
        """Return a reader for one answer. prompt_end: the last text of the prompt, which may have
        opened the reasoning. tools: whether to look for calls.
        """
        is_thinking = self.is_thinking(prompt_end)
        if self.style == "harmony":
            return Harmony()
        answer = JsonCalls() if self.style == "llama" and tools else None
        tools = tools and self.style == "hermes"
        if not tools and not self.thinks:
            return answer or Plain()
        return Tagged(thinks=self.thinks, is_thinking=is_thinking, tools=tools, answer=answer)


class Scanner:
    """Finds the end of a JSON object, one character at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end(self, text: str) -> int | None:
        """Return the index in `text` after which the object ends, or None if it goes on."""
        for at, c in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = c == "\\"
                self._in_string = c != '"'
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


class Call:
    """One tool call, written as {"name": ..., "arguments": {...}}. If the name comes first, the
    arguments are passed on as they are generated; otherwise they are passed on when the call ends.
    """

    def __init__(self, index: int):
        self.index = index
        self.is_known = False  # whether any of it was passed on
        self.raw = ""  # the text that was not passed on
        self._arguments: Scanner | None = None
        self._whole = Scanner()
        self._scanned = 0  # characters of raw
        self._is_long = False  # too long for a head (name and key)
        # The text after it, once it has ended or has turned out not to be a call.
        self.rest: str | None = None

    def push(self, text: str) -> list[Delta]:
        self.raw += text
        if self._arguments is None:
            # The head is searched for in the first characters only, however many arrive at once.
            head = None if self._is_long else HEAD.match(self.raw, 0, 2 * LONGEST_HEAD)
            self._is_long = len(self.raw) > 2 * LONGEST_HEAD
            name = None if head is None else _name(head[1])
            if head is None or name is None:
                return self._to_the_end()
            self._arguments = Scanner()
            # The brace that the head opened is closed after the arguments.
            self.raw = self.raw[head.end() :]
            self.is_known = True
            return [self._begun(name), *self.push("")]
        return self._pass_on()

    def _pass_on(self) -> list[Delta]:
        assert self._arguments is not None
        if self._is_closing:
            return self._close()
        end = self._arguments.end(self.raw)
        piece, self.raw = self.raw[:end], "" if end is None else self.raw[end:]
        deltas: list[Delta] = [self._more(piece)] if piece else []
        if end is not None:
            self._is_closing = True
            deltas += self._close()
        return deltas

    _is_closing = False

    def _close(self) -> list[Delta]:
        """Drop the closing brace that follows the arguments."""
        left = self.raw.lstrip()
        if left:
            self.rest = left.removeprefix("}")
            self.raw = ""
        return []

    def _to_the_end(self) -> list[Delta]:
        end = self._whole.end(self.raw[self._scanned :])
        if end is None:
            self._scanned = len(self.raw)
            return []
        end += self._scanned
        call = _object(self.raw[:end])
        if call is None:
            self.rest, self.raw = self.raw[end:], self.raw[:end]
            return []
        self.rest, self.raw, self.is_known = self.raw[end:], "", True
        name, arguments = call
        return [self._begun(name), self._more(arguments)]

    def _begun(self, name: str) -> Delta:
        function = {"name": name, "arguments": ""}
        call_id = f"call_{secrets.token_hex(12)}"
        head = {"index": self.index, "id": call_id, "type": "function", "function": function}
        return {"tool_calls": [head]}

    def _more(self, arguments: str) -> Delta:
        return {"tool_calls": [{"index": self.index, "function": {"arguments": arguments}}]}


def _object(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call, or None if the text is not a call."""
    try:
        call = json.loads(text, strict=False)
        call = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, str | dict) or not _is_text(call["name"]):
            return None
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return call["name"], arguments.encode(errors="backslashreplace").decode()


def _name(literal: str) -> str | None:
    """Return the name that a JSON string literal holds, or None if it holds none."""
    try:
        name = json.loads(literal, strict=False)
    except ValueError:  # an escape that JSON does not have
        return None
    return name if _is_text(name) else None


def _is_text(value: str) -> bool:
    """Return whether UTF-8 can encode a string. JSON's escapes may produce half of a surrogate
    pair, which no client could send back.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class Reader:
    """Splits one answer into parts. calls: how many tool calls there were so far. A subclass knows
    how one family marks the parts.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._text = ""  # received, and not passed on yet
        self._space = ""  # white space at the end of a part, passed on when more text follows
        self._is_new = False  # whether nothing of this part was passed on: leading space is dropped

    def push(self, text: str) -> list[Delta]:
        """Return the pieces that are certain once this text has arrived."""
        deltas: list[Delta] = []
        # Removing a part costs time in proportion to the buffer, so a long text is fed in pieces.
        for at in range(0, len(text), PIECE):
            self._text += text[at : at + PIECE]
            deltas += self._read(is_last=False)
        return deltas

    def finish(self) -> list[Delta]:
        """Return the pieces that are left at the end of the answer."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> list[Delta]:
        raise NotImplementedError

    def _part(self, kind: Literal["content", "reasoning_content"], text: str) -> list[Delta]:
        """Return a piece of text without the white space at its end, which waits for more text."""
        whole = self._space + text
        if self._is_new:
            whole = whole.lstrip()
        kept = whole.rstrip()
        self._space = whole[len(kept) :]
        if not kept:
            return []
        self._is_new = False
        return [{"content": kept} if kind == "content" else {"reasoning_content": kept}]

    def _next_part(self) -> None:
        self._space, self._is_new = "", True

    def _until(self, *markers: str, is_last: bool) -> tuple[str, str | None]:
        """Return the text before the first of the markers, and that marker (None if there is none),
        and remove both from the buffer. An end that may be the beginning of a marker stays in the
        buffer.
        """
        places = [(at, m) for m in markers if (at := self._text.find(m)) >= 0]
        if places:
            at, marker = min(places)
            before, self._text = self._text[:at], self._text[at + len(marker) :]
            return before, marker
        keep = 0 if is_last else max(_begun(self._text, m) for m in markers)
        end = len(self._text) - keep
        before, self._text = self._text[:end], self._text[end:]
        return before, None


def _begun(text: str, marker: str) -> int:
    """Return how many characters at the end of a text are the beginning of a marker."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


class Plain(Reader):
    """All of the answer is content."""

    def _read(self, *, is_last: bool) -> list[Delta]:
        text, self._text = self._text, ""
        return [{"content": text}] if text else []


class Tagged(Reader):
    """<think>reasoning</think>content<tool_call>{...}</tool_call>, the format of Qwen, Hermes and
    others.

    thinks: whether to look for reasoning; is_thinking: whether the prompt has opened it. tools:
    whether to look for calls. answer: the reader of the text after the reasoning, for families that
    write calls in another way.
    """

    def __init__(
        self, *, thinks: bool, is_thinking: bool, tools: bool, answer: Reader | None = None
    ):
        super().__init__()
        self._thinks, self._tools, self._answer = thinks, tools, answer
        self._state: Literal["start", "think", "text", "call", "after"] = "start"
        if is_thinking:
            self._state = "think"
            self._next_part()
        self._call: Call | None = None

    def _read(self, *, is_last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        read = {
            "start": self._read_start,
            "think": self._read_think,
            "text": self._read_text,
            "call": self._read_call,
            "after": self._read_after,
        }
        while True:
            state, length = self._state, len(self._text)
            deltas += read[state](is_last)
            if self._state == state and (len(self._text) == length or not self._text):
                return deltas + self._left(is_last)

    def _left(self, is_last: bool) -> list[Delta]:
        """Return what is left at the end: white space there belongs to the content, and a call that
        was cut off before its arguments is not a call.
        """
        if not is_last:
            return []
        if self._answer is not None:
            deltas = self._answer.finish()
            self.calls = self._answer.calls
            return deltas
        call, self._call = self._call, None
        if call is not None and call.is_known:  # it was cut off within its arguments
            self.calls += 1
            return []
        if call is not None:
            self._state = "text"
            return self._part("content", f"<tool_call>{call.raw}")
        space, self._space = self._space, ""
        return [{"content": space}] if space and self._state == "text" else []

    def _read_start(self, is_last: bool) -> list[Delta]:
        if not self._thinks:
            self._state = "text"
            return []
        left = self._text.lstrip()
        if left.startswith("<think>"):
            self._text, self._state = left[len("<think>") :], "think"
            self._next_part()
        elif is_last or not "<think>".startswith(left):
            self._state = "text"
        return []

    def _read_think(self, is_last: bool) -> list[Delta]:
        text, marker = self._until("</think>", is_last=is_last)
        deltas = self._part("reasoning_content", text)
        if marker is not None:
            self._state = "text"
            self._next_part()
        return deltas

    def _read_text(self, is_last: bool) -> list[Delta]:
        if self._answer is not None:
            text, self._text = self._text, ""
            if self._is_new:
                text = text.lstrip()
                self._is_new = not text
            deltas = self._answer.push(text)
            self.calls = self._answer.calls
            return deltas
        if not self._tools:
            text, self._text = self._text, ""
            return self._part("content", text)
        text, marker = self._until("<tool_call>", is_last=is_last)
        deltas = self._part("content", text)
        if marker is not None:
            self._state, self._call = "call", Call(self.calls)
            self._space = ""
        return deltas

    def _read_call(self, is_last: bool) -> list[Delta]:
        assert self._call is not None
        text, self._text = self._text, ""
        deltas = self._call.push(text)
        if self._call.rest is None:
            return deltas
        call, self._call = self._call, None
        if not call.is_known:  # not a call: the text stays content
            self._state, self._text = "text", (call.rest or "") + self._text
            return deltas + self._part("content", f"<tool_call>{call.raw}")
        self.calls += 1
        self._text, self._state = (call.rest or "") + self._text, "after"
        return deltas

    def _read_after(self, is_last: bool) -> list[Delta]:
        _, marker = self._until("</tool_call>", is_last=is_last)
        if marker is not None:
            self._state = "text"
            self._next_part()
        return []


class JsonCalls(Reader):
    """A message that is {"name": ..., "parameters": {...}} from its first character, or several of
    these with semicolons between them: the format of Llama 3.
    """

    BLANK = " \n\t;"  # before a call

    def __init__(self) -> None:
        super().__init__()
        self._call: Call | None = None
        self._is_text = False
        self._blank = 0  # length of the buffer as long as it is all blank

    def push(self, text: str) -> list[Delta]:
        is_open = self._call is None and not self._is_text
        if is_open and self._blank == len(self._text) and not text.strip(self.BLANK):
            self._text += text  # not parsed until another character arrives
            self._blank = len(self._text)
            return []
        self._blank = 0
        return super().push(text)

    def _read(self, *, is_last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._text or is_last:
            if self._is_text:
                text, self._text = self._text, ""
                if text:
                    deltas.append({"content": text})
                return deltas
            if self._call is None:
                left = self._text.lstrip(self.BLANK).removeprefix("<|python_tag|>")
                if left.startswith("{"):
                    self._text, self._call = left, Call(self.calls)
                elif is_last or not "<|python_tag|>".startswith(left):
                    self._is_text = True
                    self._text = self._text if not self.calls else left
                    if is_last and not self._text:
                        return deltas
                else:
                    return deltas
                continue
            text, self._text = self._text, ""
            deltas += self._call.push(text)
            call = self._call
            if call.rest is not None and call.is_known:
                self.calls += 1
                self._text, self._call = call.rest, None
            elif call.rest is not None or (is_last and not call.is_known):
                self._text, self._call, self._is_text = call.raw + (call.rest or ""), None, True
            if is_last and not self._text:
                self.calls += self._call is not None
                return deltas
        return deltas


class Harmony(Reader):
    """<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>..., the
    format of GPT-OSS. The analysis is reasoning; a message to=functions.NAME is a call.
    """

    ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
    RECIPIENT = re.compile(r"to=functions\.([\w.-]{1,128})")

    def __init__(self) -> None:
        super().__init__()
        self._kind: Literal["head", "content", "reasoning_content", "call"] = "head"
        self._head = ""

    def _read(self, *, is_last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while True:
            if self._kind == "head":
                text, marker = self._until("<|message|>", is_last=is_last)
                self._head = (self._head + text)[-LONGEST_HEAD:]
                if marker is None:
                    return deltas
                deltas += self._open()
                continue
            text, marker = self._until(*self.ENDS, is_last=is_last)
            if self._kind == "call":
                deltas += [self._arguments(text)] if text else []
            else:
                deltas += self._part(self._kind, text)
            if marker is None:
                return deltas
            if self._kind == "call":
                self.calls += 1
            self._kind, self._head = "head", marker if marker == "<|channel|>" else ""
            self._next_part()

    def _open(self) -> list[Delta]:
        """A head is complete: begin the part that it announces."""
        name = self.RECIPIENT.search(self._head)
        channel = self._head.rpartition("<|channel|>")[2].strip()
        if name is not None:
            self._kind = "call"
            function = {"name": name[1], "arguments": ""}
            call_id = f"call_{secrets.token_hex(12)}"
            head = {"index": self.calls, "id": call_id, "type": "function", "function": function}
            return [{"tool_calls": [head]}]
        self._kind = "reasoning_content" if channel.startswith("analysis") else "content"
        return []

    def _arguments(self, text: str) -> Delta:
        return {"tool_calls": [{"index": self.calls, "function": {"arguments": text}}]}

    def finish(self) -> list[Delta]:
        deltas = super().finish()
        if self._kind == "call":
            self.calls += 1
        return deltas


def folded(deltas: list[Delta]) -> dict[str, Any]:
    """Return the message that a list of pieces adds up to."""
    message: dict[str, Any] = {"content": None}
    calls: list[Any] = []
    for delta in deltas:
        for kind in ("content", "reasoning_content"):
            if piece := delta.get(kind):
                message[kind] = (message.get(kind) or "") + piece
        for piece in delta.get("tool_calls", []):
            if "id" in piece:
                calls.append({k: v for k, v in piece.items() if k != "index"})
                calls[-1]["function"] = dict(piece["function"])
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return message
