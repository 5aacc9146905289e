"""Talk with a model in this terminal: answers come as they are generated, and a turn costs its own
tokens alone, since the conversation so far is in the prefix cache.

    jpaged chat Qwen/Qwen3-0.6B --system "You answer in one sentence."
    jpaged chat path/to/folder --temperature 0 --quantization int8
    jpaged chat Qwen/Qwen3-VL-4B-Instruct --images     # /image photo.jpg, and then a question
    echo "def main():" | jpaged chat          # a line of stdin is a turn

Ctrl-C stops an answer, whose text so far stays in the conversation; at the prompt it clears the
line. A message of several lines has a backslash at the end of each but the last. Ctrl-D or /exit
leaves; /help lists the commands.
"""

import argparse
import base64
import dataclasses
import io
import json
import mimetypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, TextIO

from jpaged import adapter_flag, gpu_share
from jpaged.errors import JpagedError, RequestError
from jpaged.flags import Parser, add_engine_groups, engine_settings
from jpaged.images.limits import IMAGE, VIDEO, Kind
from jpaged.images.videos import Video
from jpaged.openai.images import why_no_images
from jpaged.openai.parts import Format, Reader
from jpaged.request.images import Sources
from jpaged.request.inputs import Chat as Conversation
from jpaged.request.inputs import with_adapter
from jpaged.sampling_params import SamplingParams
from jpaged.streams import shown

COMMON = (
    *("model", "--system", "--temperature", "--top-p", "--max-tokens", "--seed", "--adapter"),
    *("--reasoning", "--max-model-len", "--dtype", "--quantization", "--tensor-parallel-size"),
)
Message = dict[str, Any]
ROWS = 8  # rows of an engine that answers one person; the least that a CPU's steps have
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
TAIL = 16  # tokens of the prompt whose text tells whether it has opened the reasoning
# The controls of /set, which are fields of SamplingParams, and their types.
CONTROLS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "seed": int,
}
HELP = """\
/image PATH       put an image before the next message; alone it names what waits,
                  and /image none takes all of it back
/video PATH       put a video before the next message
/system TEXT      begin again under a system prompt; without a text, under none
/clear            forget the conversation, and keep the system prompt
/retry            draw the last answer again
/undo             take back the last message and its answer
/set NAME VALUE   change a control (none: the model's default); /set alone shows them
/save FILE        write the conversation as JSON messages
/exit             leave (also Ctrl-D)"""


COMMANDS = ("clear", "exit", "help", "image", "retry", "save", "set", "system", "undo", "video")
OF_PATHS = ("/image", "/save", "/video")  # whose argument is a path


class CommandError(ValueError):
    """A command of the chat that cannot work; the message says why."""


class Chat:
    """A conversation with a model, and what is typed into it. out: where answers are written.

    draw: yields the pieces of an answer to messages. read_file: returns the image or the video of
    a path, or raises what is wrong with it; None: there are none. is_terminal: whether a person
    looks, who is shown the time and the reasoning in another colour.
    """

    def __init__(
        self,
        draw: Callable[[list[Message], SamplingParams], Iterator["Piece"]],
        params: SamplingParams,
        *,
        read_file: Callable[[Kind, str], "ReadFile"] | None = None,
        system: str | None = None,
        out: TextIO | None = None,
        is_terminal: bool = False,
    ):
        self._draw, self.params, self._defaults = draw, params, params
        self._read_file = read_file
        self.files: list[ReadFile] = []  # of the next message
        self.system, self._is_terminal = system, is_terminal
        self._out = sys.stdout if out is None else out
        self.turns: list[Message] = []
        self.is_ended = False

    @property
    def messages(self) -> list[Message]:
        """The conversation with its system prompt. Images and videos are parts with data: URLs."""
        head: list[Message] = (
            [] if self.system is None else [{"role": "system", "content": self.system}]
        )
        return head + self.turns

    def take(self, line: str) -> None:
        """Do what a line says: a command, or a message to answer. An error is written, and changes
        nothing.
        """
        try:
            if line.startswith("/"):
                self._command(*line[1:].split(maxsplit=1))
            elif line.strip():
                self._say(line)
        except (CommandError, JpagedError, OSError) as e:
            self._write(f"{e}\n")

    def _say(self, text: str) -> None:
        """Answer a message and what waits for it. If it cannot be answered, it is no part of the
        conversation, and that waits on.
        """
        content: str | list[Message] = text
        if self.files:
            content = [*(file.part for file in self.files), {"type": "text", "text": text}]
        self.turns.append({"role": "user", "content": content})
        try:
            self._answer()
        except BaseException:
            self.turns.pop()
            raise
        self.files = []

    def _answer(self) -> None:
        """Draw and write an answer to the conversation. Ctrl-C ends it, and keeps what there is."""
        began, first, count = time.perf_counter(), None, 0
        parts: list[str] = []
        kind = "content"
        stopped = False
        try:
            with closing(self._draw(self.messages, self.params)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    first = first or time.perf_counter()
                    count += piece.tokens
                    if piece.kind != kind:
                        self._between(kind, piece.kind)
                        kind = piece.kind
                    self._write(shown(piece.text))
                    if kind == "content":
                        parts.append(piece.text)
        except KeyboardInterrupt:
            stopped = True
        if kind != "content":
            self._between(kind, "content")
        self.turns.append({"role": "assistant", "content": "".join(parts)})
        self._write("\n")
        if self._is_terminal:
            seconds = time.perf_counter() - began
            wait = (first or time.perf_counter()) - began
            rate = count / max(seconds - wait, 1e-9) if count > 1 else 0.0
            end = "stopped, " if stopped else ""
            figures = f"{end}{count} tokens, first after {wait:.2f} s, {rate:.1f} tokens/s"
            self._write(f"{DIM}[{figures}]{PLAIN}\n")

    def _between(self, before: str, after: str) -> None:
        """Write what separates the reasoning from the answer."""
        if after == "reasoning":
            self._write(DIM if self._is_terminal else "<think>\n")
        elif before == "reasoning":
            self._write(f"{PLAIN}\n" if self._is_terminal else "\n</think>\n")

    def _command(self, name: str = "", argument: str = "") -> None:
        argument = argument.strip()
        match name:
            case "help":
                self._write(f"{HELP}\n")
            case "exit" | "quit":
                self.is_ended = True
            case "system":
                self.system, self.turns, self.files = argument or None, [], []
            case "clear":
                self.turns, self.files = [], []
            case "image":
                self._attach(IMAGE, argument)
            case "video":
                self._attach(VIDEO, argument)
            case "undo":
                self._undo()
            case "retry":
                self._retry()
            case "set":
                self._set(*argument.split(maxsplit=1))
            case "save":
                if not argument:
                    raise CommandError("/save needs the name of a file")
                text = json.dumps(self.messages, ensure_ascii=False, indent=2)
                Path(argument).write_text(f"{text}\n", encoding="utf-8")
                self._write(f"{len(self.messages)} messages in {argument}\n")
            case _:
                raise CommandError(f"/{name} is no command: /help lists them")

    def _attach(self, kind: Kind, path: str) -> None:
        if path == "none":
            self.files = []
        elif path:
            if self._read_file is None:
                raise CommandError(f"this model takes no {kind.name}s")
            self.files.append(self._read_file(kind, path))
        names = [f"{file.name} ({file.tokens} tokens)" for file in self.files]
        self._write(f"the next message has {', '.join(names) or f'no {kind.name}'}\n")

    def _undo(self) -> None:
        if not self.turns:
            raise CommandError("there is nothing to take back")
        while self.turns and self.turns.pop()["role"] != "user":
            pass

    def _retry(self) -> None:
        if not self.turns:
            raise CommandError("there is no answer to draw again")
        answer = self.turns.pop()
        try:
            self._answer()
        except BaseException:
            self.turns.append(answer)
            raise

    def _set(self, name: str = "", value: str = "") -> None:
        if not name:
            for control in CONTROLS:
                self._write(f"{control} {getattr(self.params, control)}\n")
            return
        if name not in CONTROLS:
            raise CommandError(f"{name!r} is no control; there are {', '.join(CONTROLS)}")
        try:
            new = getattr(self._defaults, name) if value == "none" else CONTROLS[name](value)
        except ValueError:
            raise CommandError(f"{name} {value!r}: must be a number, or none") from None
        params = dataclasses.replace(self.params, **{name: new})
        check(params)
        self.params = params

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


@dataclasses.dataclass(frozen=True)
class ReadFile:
    """An image or a video for a message. part: of a message's content. tokens: that it takes."""

    name: str
    part: Message
    tokens: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of an answer: text of one kind. tokens: that it took, counted once."""

    kind: Literal["content", "reasoning"]
    text: str
    tokens: int = 0


def check(params: SamplingParams) -> None:
    """Raise RequestError for controls that no engine takes."""
    from jpaged.config import EngineConfig

    params.validate(EngineConfig(), vocab_size=1)


class Model:
    """Draws answers with an LLM. adapter: that answers, or None. reasoning: whether what the model
    thinks is told apart from what it says.
    """

    def __init__(self, llm: Any, *, adapter: str | None = None, reasoning: bool = True):
        self._llm, self._adapter = llm, adapter
        self._format = Format.of(llm.tokenizer, thinks=reasoning)
        self._has_template = bool(getattr(llm.tokenizer, "chat_template", None))

    def read_file(self, kind: Kind, path: str) -> ReadFile:
        """Return the image or the video of a path, whose file is read now. Raises RequestError
        where the model takes none or not this one.
        """
        inputs, file = self._llm.session.inputs, Path(path).expanduser()
        if inputs.images is None:
            said = why_no_images(self._llm.model_config, self._llm.engine_config)
            raise RequestError(said or "images: this model takes none")
        sources = Sources(images=[file]) if kind is IMAGE else Sources(videos=[Video.of(file)])
        reader = inputs.image_reader(sources)
        read = reader.read(sources)
        guessed, _ = mimetypes.guess_type(file.name)
        url = f"data:{guessed or ''};base64,{base64.b64encode(file.read_bytes()).decode()}"
        part_kind = f"{kind.name}_url"
        part = {"type": part_kind, part_kind: {"url": url}}
        return ReadFile(file.name, part, sum(map(reader.rows, [*read.images, *read.pieces])))

    def draw(self, messages: list[Message], params: SamplingParams) -> Iterator[Piece]:
        """Yield the pieces of an answer to a conversation. Raises RequestError; closing the
        iterator stops the answer.
        """
        if not self._has_template:
            raise RequestError("this model has no chat template: jpaged batch completes plain text")
        ids, images = self._llm.session.inputs.conversation(Conversation(messages=messages))
        reader = self._format.reader(self._llm.tokenizer.decode(ids[-TAIL:]), tools=False)
        prompt: Any = {"prompt_token_ids": ids, "embeddings": images}
        if self._adapter is not None:
            prompt = with_adapter(self._adapter, prompt)
        with closing(self._llm.stream(prompt, params)) as chunks:
            for chunk in chunks:
                yield from _pieces(reader, chunk)


def _pieces(reader: Reader, chunk: Any) -> Iterator[Piece]:
    deltas = reader.push(chunk.text_delta) if chunk.text_delta else []
    if chunk.finish_reason:
        deltas = deltas + reader.finish()
    count = len(chunk.token_ids_delta)
    for delta in deltas:
        if text := delta.get("reasoning_content"):
            yield Piece("reasoning", text, count)
        elif text := delta.get("content"):
            yield Piece("content", text, count)
        else:
            continue
        count = 0
    if count:
        yield Piece("content", "", count)


def make_parser(prog: str = "jpaged chat") -> Parser:
    """Return the parser of `jpaged chat`."""
    parser = Parser(prog=prog, description=__doc__, common=COMMON)
    what = "checkpoint folder, OWNER/NAME of the Hub, or jpaged-demo-hybrid (default: jpaged-demo)"
    parser.add_argument("model", help=what, nargs="?")
    add = parser.add_argument_group("conversation").add_argument
    add("--system", help="system prompt (default: none)", metavar="TEXT")
    add("--temperature", help="0 is greedy (default: the model's, else 1)", type=float, metavar="X")
    add("--top-p", help="nucleus sampling (default: the model's, else 1)", type=float, metavar="X")
    longest = "tokens of an answer (default: the rest of the context)"
    add("--max-tokens", help=longest, type=int, metavar="N")
    add("--seed", help="seed of the first answer (default: another each time)", type=int)
    lora = "folder of a PEFT adapter that answers (default: none)"
    add("--adapter", help=lora, metavar="FOLDER")
    apart = "tell what the model thinks apart from what it says (default: on)"
    add("--reasoning", help=apart, action=argparse.BooleanOptionalAction, default=True)
    add_engine_groups(parser, max_num_seqs=ROWS)
    return parser


def load(args: argparse.Namespace) -> tuple[Model, SamplingParams]:
    """Return the model that answers, and the controls that it begins with."""
    from jpaged.llm import LLM

    model = args.model
    if model is None:
        from jpaged.demo import MODEL_PATH

        model = str(MODEL_PATH)
    seed = time.time_ns() % (1 << 31) if args.seed is None else args.seed
    engine = engine_settings(args)
    if args.adapter is not None:
        engine.setdefault("max_loras", 1)
    llm = LLM(model, seed=seed, **engine)
    if args.adapter is not None:
        adapter_flag.loaded(llm, [f"adapter={args.adapter}"])
    controls = {
        n: getattr(args, n) for n in ("temperature", "top_p") if getattr(args, n) is not None
    }
    params = dataclasses.replace(
        llm.default_sampling_params(), max_tokens=args.max_tokens, **controls
    )
    check(params)
    adapter = None if args.adapter is None else "adapter"
    return Model(llm, adapter=adapter, reasoning=args.reasoning), params


def lines(prompt: str) -> Iterator[str]:
    """Yield what is typed, a message at a time, until the end of the input. Ctrl-C clears it."""
    parts: list[str] = []
    while True:
        try:
            line = input("" if not prompt else "... " if parts else prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            if not prompt:
                raise
            print()
            parts = []
            continue
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield "\n".join(parts)
            parts = []


def completions(line: str) -> list[str]:
    """Return what a line that is being typed may become: a command, or one with a path."""
    command, space, path = line.partition(" ")
    if not space:
        names = [f"/{name}" for name in COMMANDS] if line.startswith("/") else []
        return [name for name in names if name.startswith(line)]
    if command not in OF_PATHS:
        return []
    folder, slash, start = path.rpartition("/")
    try:
        files = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
    except (OSError, RuntimeError):  # there is no such folder, or no such home
        return []
    return [
        f"{command} {folder}{slash}{file.name}{'/' if file.is_dir() else ''}"
        for file in files
        if file.name.startswith(start) and (start or not file.name.startswith("."))
    ]


def complete_lines() -> None:
    """Have the Tab key complete what is typed."""
    import readline

    def complete(text: str, state: int) -> str | None:
        matches = completions(text)
        return matches[state] if state < len(matches) else None

    readline.set_completer(complete)
    readline.set_completer_delims("\n")  # a path may have any other character
    is_editline = getattr(readline, "backend", "readline") == "editline"
    readline.parse_and_bind("bind ^I rl_complete" if is_editline else "tab: complete")


def main(argv: list[str] | None = None, prog: str = "jpaged chat") -> int:
    """Chat until the input ends. Return the exit status: 0, 1 after one sentence on stderr, or 130
    if Ctrl-C came before the first prompt.
    """
    args = make_parser(prog).parse_args(argv)
    gpu_share.take_most()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a line that is no text ends no conversation
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        model, params = load(args)
        chat = Chat(
            model.draw,
            params,
            read_file=model.read_file,
            system=args.system,
            is_terminal=is_terminal,
        )
        if is_terminal:
            complete_lines()
            print("Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands.")
        for line in lines("> " if is_terminal else ""):
            chat.take(line)
            if chat.is_ended:
                break
    except JpagedError as e:
        print(f"{prog}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if is_terminal:
        print()
    return 0
