"""Pictures in the page, in a Chromium: dropped, pasted and picked, sent, kept, shown again."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from tests.openai.browser import browser
from tests.text_model import make_tokenizer, write_folder
from tests.vision_folder import ENGINE, picture, png, seen, write_vision_folder

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from tests.openai.live import Live, serving
from tests.openai.test_page import SETTINGS, User, asked_of, needs_browser
from tests.openai.test_tools import TEMPLATE

PICTURE = base64.b64encode(png(picture(3, (120, 160)))).decode()
LARGE = base64.b64encode(png(picture(5, (2100, 30)), "GIF")).decode()
TEXT = base64.b64encode(b"no picture").decode()
# A transfer of one file, as a drop or a paste brings it.
TRANSFER = """
const bytes = Uint8Array.from(atob("%s"), c => c.charCodeAt(0));
const transfer = new DataTransfer();
transfer.items.add(new File([bytes], "%s", { type: "%s" }));
"""

# How many pictures the browser keeps.
KEPT = asked_of("jpaged-pictures", "jpaged-pictures", "count()")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    llm = LLM(write_vision_folder(tmp_path_factory.mktemp("page-seeing")), **ENGINE)
    params = SamplingParams(max_tokens=2, logprobs=1)
    llm.chat(seen(), params, use_tqdm=False)  # compiled before anybody waits
    with serving(llm, max_output_tokens=12) as live:
        yield live
        live.assert_nothing_left()


@pytest.fixture
def user(seeing: Live, tmp_path: Path) -> Iterator[User]:
    with browser(tmp_path / "profile") as page:
        yield User(page, seeing.port)
        problems = [p for p in page.problems if not re.search(r"status of 4\d\d", p)]
        assert not problems, problems


def drop(user: User, file: str = PICTURE, name: str = "a.png", kind: str = "image/png") -> None:
    event = 'new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true })'
    act = f'document.querySelector(".thread").dispatchEvent({event})'
    user.page.run("(() => {" + TRANSFER % (file, name, kind) + act + "})()")


def paste(user: User) -> None:
    event = (
        'new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true })'
    )
    act = f'document.querySelector(".composer textarea").dispatchEvent({event})'
    user.page.run("(() => {" + TRANSFER % (PICTURE, "b.png", "image/png") + act + "})()")


def pick(user: User, file: str, name: str, kind: str) -> None:
    act = (
        'const field = document.querySelector(".composer input[type=file]");'
        "field.files = transfer.files;"
        'field.dispatchEvent(new Event("change"));'
    )
    user.page.run("(() => {" + TRANSFER % (file, name, kind) + act + "})()")


def thumbnails(user: User, count: int) -> None:
    user.page.until(f"document.querySelectorAll('.thumbnail img').length === {count}")


def sent(user: User) -> list[Any]:
    """The bodies of the page's requests from now on are kept, here and in the page."""
    return user.page.run("window.bodies.map(body => JSON.parse(body))")


def watch(user: User) -> None:
    user.page.run(
        "window.bodies = []; const real = window.fetch; window.fetch = (path, options) => {"
        "if (path === 'v1/chat/completions') window.bodies.push(options.body);"
        "return real(path, options); }"
    )


@needs_browser
def test_pictures_are_sent_and_kept(user: User) -> None:
    page = user.page
    watch(user)
    drop(user)
    thumbnails(user, 1)
    paste(user)
    thumbnails(user, 2)
    pick(user, LARGE, "large.gif", "image/gif")
    thumbnails(user, 3)
    user.click("Remove b.png")
    thumbnails(user, 2)
    user.say("what?")
    thumbnails(user, 0)
    user.idle()
    [body] = sent(user)
    small, large, text = body["messages"][-1]["content"]
    assert small["image_url"]["url"] == f"data:image/png;base64,{PICTURE}"
    assert large["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "what?"}
    shown = "[...document.querySelectorAll('.message.user .pictures img')]"
    widths = page.until(f"{shown}.every(i => i.complete) && {shown}.map(i => i.naturalWidth)")
    assert widths == [160, 29]  # 30 of 2,100 x 30, made smaller
    assert page.run(f"{shown}[1].naturalHeight") == 2048

    # An edited message and an answer that is drawn again have them too.
    user.click("Try again")
    user.idle()
    user.click("Edit and send again")
    page.run("document.querySelector('.edit').value = 'and now?'")
    user.click("Send", last=False)
    user.idle()
    contents = [b["messages"][-1]["content"] for b in sent(user)]
    assert len(contents) == 3
    assert all([p["type"] for p in c] == ["image_url"] * 2 + ["text"] for c in contents)
    assert contents[2][2]["text"] == "and now?"

    # They are there again after the page has been loaded anew.
    page.until("document.querySelectorAll('.message.user .pictures img').length === 2")
    assert "and now?" in user.save()
    page.reload()
    page.until("document.querySelector('.state')?.textContent.startsWith('up')")
    assert page.until(f"{shown}.length === 2 && {shown}.every(i => i.complete)")
    watch(user)
    user.say("again")
    [body] = sent(user)
    assert [type(m["content"]).__name__ for m in body["messages"]] == ["list", "str", "str"]

    # Forgotten with the conversation.
    assert page.wait(KEPT) == 2
    user.click("Delete the conversation")
    user.click("Delete")
    page.until("document.querySelectorAll('.message').length === 0")
    assert page.wait(KEPT) == 0


@needs_browser
def test_what_is_no_picture(user: User) -> None:
    drop(user, TEXT, "a.txt", "text/plain")
    assert "only pictures" in user.problem
    drop(user, TEXT, "a.png", "image/png")
    user.page.until("document.querySelector('.problem').textContent.includes('no picture that')")
    assert user.page.run("document.querySelectorAll('.thumbnail').length") == 0
    user.click("New text")
    drop(user)
    assert "a text has no pictures" in user.problem


@needs_browser
def test_a_model_that_sees_nothing(tmp_path: Path) -> None:
    llm = LLM(write_folder(tmp_path / "tiny"), tokenizer=make_tokenizer(TEMPLATE), **SETTINGS)
    with serving(llm) as live, browser(tmp_path / "profile") as page:
        user = User(page, live.port)
        label = page.until("document.querySelector('.composer .icon-button[disabled]')?.title")
        assert "--images" in label
        drop(user)
        assert "--images" in user.problem
        assert page.run("document.querySelectorAll('.thumbnail').length") == 0
        assert not page.problems
