"""The terminal chat: its commands, what Ctrl-C does, and a conversation with the embedded model."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged.cli import chat
from jpaged.cli.chat import Chat, Piece
from jpaged.config import EngineConfig
from jpaged.errors import RequestError
from jpaged.images.limits import IMAGE, Kind
from jpaged.sampling_params import SamplingParams
from jpaged.streams import shown
from tests import vision_folder

ROOT = Path(__file__).parents[2]
SIZES = ["--max-model-len", "256", "--max-num-batched-tokens", "64", "--token-buckets", "64"]


class Echo:
    """Answers with the last message in capitals, a word a piece; at `stop` Ctrl-C comes."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[dict[str, str]], SamplingParams]] = []
        self.closed = 0

    def draw(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[Piece]:
        self.asked.append(([dict(m) for m in messages], params))
        text = messages[-1]["content"]
        if text == "refuse":
            raise RequestError("no room for this prompt")
        try:
            if text.startswith("think"):
                yield Piece("reasoning", "hm", 1)
            for word in text.split():
                if word == "stop":
                    raise KeyboardInterrupt
                yield Piece("content", word.upper() + " ", 1)
        finally:
            self.closed += 1


def talk(*lines: str, **settings: Any) -> tuple[Chat, Echo, str]:
    model, out = Echo(), io.StringIO()
    talking = Chat(model.draw, SamplingParams(max_tokens=9), out=out, **settings)
    for line in lines:
        talking.take(line)
    return talking, model, out.getvalue()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_turns() -> None:
    talking, model, out = talk("hello you", "   ", "again", system="Be short.")
    system = {"role": "system", "content": "Be short."}
    assert talking.messages == [
        system,
        user("hello you"),
        assistant("HELLO YOU "),
        user("again"),
        assistant("AGAIN "),
    ]
    assert [messages for messages, _ in model.asked] == [
        [system, user("hello you")],
        talking.messages[:4],
    ]
    assert out == "HELLO YOU \nAGAIN \n" and model.closed == 2


def test_an_interrupt_keeps_what_there_is() -> None:
    talking, model, out = talk("one two stop three", "next")
    assert talking.turns[1] == assistant("ONE TWO ") and out == "ONE TWO \nNEXT \n"
    assert model.closed == 2 and len(talking.turns) == 4


def test_an_error_is_no_turn() -> None:
    talking, _, out = talk("hello", "refuse")
    assert talking.turns == [user("hello"), assistant("HELLO ")]
    assert out.endswith("no room for this prompt\n")
    talking.turns = [user("refuse"), assistant("old")]
    talking.take("/retry")
    assert talking.turns == [user("refuse"), assistant("old")]


def test_reasoning_is_told_apart_and_no_part_of_the_conversation() -> None:
    talking, _, out = talk("think well")
    assert out == "<think>\nhm\n</think>\nTHINK WELL \n"
    assert talking.turns[1] == assistant("THINK WELL ")
    _, _, seen = talk("think", is_terminal=True)
    assert seen.startswith(f"{chat.DIM}hm{chat.PLAIN}\nTHINK ") and "2 tokens, first after" in seen


def test_commands(tmp_path: Path) -> None:
    talking, model, _ = talk(
        "a", "/retry", "b", "/undo", "/set temperature 0.5", "/set top_k 7", "c"
    )
    assert [m["content"] for m in talking.turns] == ["a", "A ", "c", "C "] and len(model.asked) == 4
    assert (model.asked[-1][1].temperature, model.asked[-1][1].top_k) == (0.5, 7)
    talking.take("/set temperature none")
    assert talking.params.temperature == 1.0 and talking.params.top_k == 7
    talking.take(f"/save {tmp_path / 'chat.json'}")
    assert json.loads((tmp_path / "chat.json").read_text()) == talking.messages
    talking.take("/system Other.")
    assert talking.messages == [{"role": "system", "content": "Other."}]
    talking.take("d")
    talking.take("/clear")
    assert talking.messages == [{"role": "system", "content": "Other."}]
    talking.take("/system")
    assert talking.messages == [] and not talking.is_ended
    talking.take("/exit")
    assert talking.is_ended


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nothing", "/nothing is no command"),
        ("/", "/ is no command"),
        ("/set", "temperature 1.0\n"),
        ("/set heat 1", "'heat' is no control; there are temperature, "),
        ("/set temperature hot", "temperature 'hot': must be a number"),
        ("/set temperature -3", "temperature"),
        ("/undo", "nothing to take back"),
        ("/retry", "no answer to draw again"),
        ("/save", "/save needs the name of a file"),
        ("/save /no/such/folder/x", "No such file"),
        ("/help", "/retry            draw the last answer again"),
    ],
)
def test_commands_that_say_something(line: str, said: str) -> None:
    talking, model, out = talk(line)
    assert said in out and talking.turns == [] and not model.asked
    assert talking.params == SamplingParams(max_tokens=9)


def test_a_model_cannot_steer_the_terminal() -> None:
    assert shown("a\x1b[2J\tb\nc\x9b\x7f\r\u00e9") == "a\ufffd[2J\tb\nc\ufffd\ufffd\ufffd\u00e9"


def test_what_cannot_start_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in (
        (["/no/such/folder"], "no such"),
        (["--temperature", "-1"], "temperature"),
        (["--adapter", "/no/such"], "--adapter"),
    ):
        assert chat.main([*argv, *SIZES]) == 1
        error = capsys.readouterr().err
        assert error.startswith("jpaged chat: ") and said in error and error.count("\n") == 1


def test_lines_of_stdin_are_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the embedded model: the second answer is that to the whole conversation."""
    argv = ["--temperature", "0", "--max-tokens", "6", "--seed", "1", *SIZES]
    saved = tmp_path / "chat.json"
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"Write a function.\nAgain\n/save {saved}\n"))
    assert chat.main(argv) == 0
    out = capsys.readouterr().out
    from jpaged import LLM
    from jpaged.demo import MODEL_PATH

    llm = LLM(str(MODEL_PATH), max_num_seqs=8, max_model_len=256, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=6)
    turns = [user("Write a function.")]
    one = llm.chat(turns, params, use_tqdm=False)[0].outputs[0].text
    turns += [assistant(one or ""), user("Again")]
    two = llm.chat(turns, params, use_tqdm=False)[0].outputs[0].text
    llm.close()
    assert json.loads(saved.read_text()) == [*turns, assistant(two or "")]
    assert out == shown(f"{one}\n{two}\n4 messages in {saved}\n") and two


PATIENCE_S, UNSEEN_S = 240.0, 20.0
# A chat whose answers wait after their first words, so that they end by Ctrl-C alone, however fast
# the machine is.
DRIVER = """
import sys, time
from jpaged.cli import chat

load = chat.load

def waiting(args):
    model, params = load(args)
    draw = model.draw

    def paused(messages, params):
        pieces = draw(messages, params)
        try:
            for piece in pieces:
                yield piece
                if piece.text.strip():
                    break
            yield chat.Piece("content", "<waits>")
            while True:
                time.sleep(0.05)
        finally:
            pieces.close()

    model.draw = paused
    return model, params

chat.load = waiting
sys.exit(chat.main(sys.argv[1:]))
"""


def test_in_a_terminal() -> None:
    """Ctrl-C stops an answer, another clears the line, Ctrl-D leaves with status 0."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, "-c", DRIVER, "--temperature", "0", *SIZES]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    env["INPUTRC"] = os.devnull  # what a person has set for the shell
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    ) as process:
        os.close(theirs)
        seen, is_closed = "", False

        def read(end: float) -> bool:
            """Read what there is; return whether anything came until then."""
            nonlocal seen, is_closed
            ready, _, _ = select.select([ours], [], [], max(end - time.monotonic(), 0))
            if not ready:
                return False
            try:
                piece = os.read(ours, 4096)
            except OSError:  # nobody has the terminal any more
                piece = b""
            seen, is_closed = seen + piece.decode(errors="replace"), not piece
            return True

        def comes(text: str, seconds: float) -> bool:
            end = time.monotonic() + seconds
            while text not in seen:
                if is_closed or not read(end):
                    return False
            return True

        def until(text: str) -> str:
            nonlocal seen
            assert comes(text, PATIENCE_S), f"no {text!r} in {seen!r}"
            before, _, seen = seen.partition(text)
            return before

        def interrupt() -> str:
            """Press Ctrl-C until there is a new prompt. Python's readline looks for a signal where
            its wait for a key is interrupted, so that one between two waits stays unseen.
            """
            for _ in range(10):
                os.kill(process.pid, signal.SIGINT)
                if comes("> ", UNSEEN_S) or is_closed:
                    break
            return until("> ")

        try:
            assert "/help lists the commands" in until("> ")
            os.write(ours, b"def main():\n")
            until("def main():")
            assert until("<waits>").strip()
            assert interrupt().count("[stopped, ") == 1
            os.write(ours, b"half a li")
            until("half a li")
            interrupt()
            os.write(ours, b"\x04")
            assert not comes("<nothing more>", PATIENCE_S) and is_closed, seen
            assert process.wait(PATIENCE_S) == 0, seen
        finally:
            process.kill()
            os.close(ours)


def test_images_wait_for_a_message(tmp_path: Path) -> None:
    def read(kind: Kind, path: str) -> chat.ReadFile:
        if path == "bad":
            raise RequestError(f"bad: it is no {kind.name}")
        return chat.ReadFile(path, {"type": kind.name, kind.name: path}, 5)

    talking, _, _ = talk("/image a.png", "/image bad", "/video b c.mp4", read_file=read)
    talking._draw = lambda *_: (piece for piece in ())
    talking.take("hello")
    parts = [{"type": "image", "image": "a.png"}, {"type": "video", "video": "b c.mp4"}]
    content = [*parts, {"type": "text", "text": "hello"}]
    assert talking.turns[0] == {"role": "user", "content": content} and not talking.files
    talking.take("plain")
    assert talking.turns[2] == user("plain")
    for line in ("/image none", "/clear", "/system x"):
        talking.take("/image a.png")
        assert talking.files
        talking.take(line)
        assert not talking.files
    _, _, out = talk("/image a.png", "/image", "/image bad", read_file=read)
    assert out == "the next message has a.png (5 tokens)\n" * 2 + "bad: it is no image\n"
    assert talk("/image a.png")[2] == "this model takes no images\n"
    assert talk("/video")[2] == "the next message has no video\n"


def test_an_error_leaves_images_waiting() -> None:
    talking, _, _ = talk(read_file=lambda _, path: chat.ReadFile(path, {"type": "image"}, 5))
    talking._draw = lambda *_: Echo().draw([user("refuse")], SamplingParams())
    talking.take("/image a.png")
    talking.take("what?")
    assert not talking.turns and len(talking.files) == 1


def test_what_is_typed_is_completed(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    for name in ("a b.png", "c.png", ".hidden"):
        (tmp_path / name).touch()
    assert chat.completions("/im") == ["/image"] and chat.completions("im") == []
    assert chat.completions("/s") == ["/save", "/set", "/system"]
    begin = f"/image {tmp_path}/"
    assert chat.completions(f"{begin}a") == [f"{begin}a b.png", f"{begin}a folder/"]
    assert chat.completions(begin) == [f"{begin}{x}" for x in ("a b.png", "a folder/", "c.png")]
    assert chat.completions(f"{begin}.") == [f"{begin}.hidden"]
    assert chat.completions(f"{begin}none/") == [] == chat.completions(f"/set {tmp_path}/")
    named = [line.split()[0][1:] for line in chat.HELP.splitlines() if line.startswith("/")]
    assert sorted({*named, "help"}) == sorted(chat.COMMANDS)


def test_images_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two turns, one with an image and one with a video, are the conversation that LLM.chat
    answers; a model that was loaded without its tower says so.
    """
    from tests import video_files

    folder = vision_folder.write_vision_folder(tmp_path / "model")
    (tmp_path / "a.png").write_bytes(vision_folder.png())
    (tmp_path / "bad.png").write_bytes(b"nothing")
    saved = tmp_path / "chat.json"
    typed = [f"/image {tmp_path}/a.png", f"/image {tmp_path}/bad.png", "what?"]
    (tmp_path / "b.mp4").write_bytes(video_files.video(20))
    typed += [f"/video {tmp_path}/a.png", f"/video {tmp_path}/b.mp4", "and?", f"/save {saved}"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(typed) + "\n"))
    load, loaded = chat.load, list[chat.Model]()

    def noted(args: Any) -> Any:
        loaded.append(load(args)[0])
        return loaded[0], SamplingParams(temperature=0, max_tokens=4)

    monkeypatch.setattr(chat, "load", noted)
    argv = [str(folder), "--dtype", "float32", *SIZES]
    assert chat.main([*argv, "--images"]) == 0
    out = capsys.readouterr().out
    assert f"the next message has a.png ({vision_folder.ROWS} tokens)\n" in out
    assert "images[0]" in out and "videos[0]" in out and "the next message has b.mp4 (" in out
    messages = json.loads(saved.read_text())
    assert messages[0] == vision_folder.seen()[0] and len(messages) == 4
    llm = loaded[0]._llm
    params = SamplingParams(temperature=0, max_tokens=4)
    for turn in (1, 3):
        (output,) = llm.chat(messages[:turn], params, use_tqdm=False)
        assert messages[turn]["content"] == output.outputs[0].text
    monkeypatch.setattr(llm.session.inputs, "images", None)
    monkeypatch.setattr(llm, "engine_config", EngineConfig(max_model_len=256))
    with pytest.raises(RequestError, match="was loaded without a vision tower; --images"):
        loaded[0].read_file(IMAGE, "a.png")
    llm.close()
