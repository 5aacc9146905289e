"""The page: nothing from elsewhere; and in a Chromium, what people do with it."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM
from tests.openai.browser import PATH, Browser, browser
from tests.text_model import make_tokenizer, write_folder
from tests.tiny import ENGINE

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.server.page import FOLDER, Page
from tests.openai.live import Live, serving
from tests.openai.test_tools import TEMPLATE, WEATHER, write

SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
)
SETTINGS: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES}
needs_browser = pytest.mark.skipif(PATH is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_folder(tmp_path_factory.mktemp("page") / "tiny")
    llm = LLM(folder, tokenizer=make_tokenizer(TEMPLATE), **SETTINGS)
    with serving(llm) as live:
        yield live
        live.assert_nothing_left()


def asked_of(database: str, store: str, question: str) -> str:
    """Return a script for what the browser answers about what it keeps, once it is written."""
    return f"""
    new Promise(done => {{
      const opening = indexedDB.open("{database}", 1);
      opening.onsuccess = () => {{
        const store = opening.result.transaction("{store}").objectStore("{store}");
        const asking = store.{question};
        asking.onsuccess = () => {{ opening.result.close(); done(asking.result); }};
      }};
    }})
    """


class User:
    """A person at the page, who finds things by what is written on them."""

    def __init__(self, page: Browser, port: int):
        self.page = page
        page.open(f"http://127.0.0.1:{port}/")
        page.size(1280, 800)
        page.until("document.querySelector('.state')?.textContent.startsWith('up')")

    def click(self, label: str, last: bool = True) -> None:
        """Click the (last) button with this label or text."""
        done = self.page.run(
            "(() => { const all = [...document.querySelectorAll('button, summary')].filter(b => "
            f"(b.getAttribute('aria-label') ?? b.textContent).trim() === {json.dumps(label)} "
            "&& b.offsetParent !== null && !b.disabled);"
            f"all.at({-1 if last else 0})?.click(); return all.length; }})()"
        )
        assert done, f"no button {label!r}"

    def set(self, label: str, value: str) -> None:
        """Write a value into the field with this label, open its settings if need be."""
        done = self.page.run(
            "(() => { const label = [...document.querySelectorAll('.settings label')].find(l => "
            f"l.textContent === {json.dumps(label)}); if (!label) return false;"
            "label.closest('details')?.setAttribute('open', '');"
            "const field = document.getElementById(label.htmlFor);"
            f"field.value = {json.dumps(value)}; field.dispatchEvent(new Event('input'));"
            "return field.value === " + json.dumps(value) + "; })()"
        )
        assert done, f"no field {label!r} that takes {value!r}"

    def say(self, text: str) -> None:
        """Write a message, send it by Enter, and wait for the answer."""
        self.page.run("document.querySelector('.composer textarea').focus()")
        self.page.write(text)
        self.page.press("Enter")
        self.idle()

    def idle(self) -> None:
        """Wait until nothing runs, and what has ended is shown."""
        self.page.until(
            "document.querySelector('.send').getAttribute('aria-label') === 'Send' &&"
            "!document.querySelector('.message.running')"
        )

    def save(self) -> str:
        """Have the page keep what has changed, as when it is left, and return what is kept."""
        self.page.run("dispatchEvent(new Event('pagehide'))")
        return json.dumps(self.page.wait(asked_of("jpaged", "conversations", "getAll()")))

    def texts(self, selector: str) -> list[str]:
        return self.page.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
        )

    @property
    def answers(self) -> list[str]:
        return self.texts(".message.assistant > .content")

    @property
    def problem(self) -> str:
        return self.page.until("document.querySelector('.problem').textContent")


@pytest.fixture
def user(live: Live, tmp_path: Path) -> Iterator[User]:
    with browser(tmp_path / "profile") as page:
        yield User(page, live.port)
        problems = [p for p in page.problems if not re.search(r"status of 4\d\d", p)]
        assert not problems, problems


def test_it_loads_nothing_from_elsewhere(live: Live) -> None:
    status, text, headers = live.request("/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert text.encode() == Page().index
    names = set(re.findall(r"(?:src|href)=\"page/([\w.]+)\"", text))
    assert {"main.js", "style.css", "icon.svg"} == names
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert "require-trusted-types-for 'script'" in policy and "trusted-types 'none'" in policy
    elsewhere = r"[\"'(`]https?://(?!www\.w3\.org/2000/svg)|[\"'(`]//\w|@import|url\(|<iframe"
    seen = set[str]()
    for file in FOLDER.iterdir():
        status, text, headers = live.request(f"/page/{file.name}")
        if file.name == "index.html":
            assert status == 404
            continue
        assert status == 200 and text == file.read_text()
        assert headers["x-content-type-options"] == "nosniff"
        assert not re.findall(elsewhere, text), file.name
        # Nothing of an answer becomes markup or code.
        banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert not re.findall(banned, text), file.name
        seen |= set(re.findall(r"from \"\./([\w.]+)\"", text))
    assert seen and all((FOLDER / name).exists() for name in seen)


def test_only_its_files_are_served(live: Live) -> None:
    for name in ("absent.js", "..%2fpage.py", "%2e%2e/page.py", ""):
        assert live.request(f"/page/{name}")[0] == 404


def test_a_wheel_has_its_files() -> None:
    """The patterns of package data take every file of the page."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    for suffix in {file.suffix for file in FOLDER.iterdir()}:
        assert f'"*{suffix}"' in project.read_text()


@needs_browser
def test_a_key_is_asked_for(tmp_path: Path) -> None:
    llm = LLM(write_folder(tmp_path / "tiny"), **SETTINGS)
    with serving(llm, api_keys=("let-me",)) as live, browser(tmp_path / "profile") as page:
        page.open(f"http://127.0.0.1:{live.port}/")
        wants = "this server wants an API key"
        page.until(f"document.querySelector('.state')?.textContent === '{wants}'")
        page.run("document.querySelector('.key input').focus()")
        page.write("let-me")
        page.run("document.querySelector('.key input').blur()")
        page.until("document.querySelector('.state').textContent.startsWith('up')")
        assert page.run("document.querySelector('h1').textContent") == "tiny"


@needs_browser
def test_a_conversation(user: User, live: Live) -> None:
    """It is answered, tried again, edited, branched, stopped, and there after a reload."""
    page = user.page
    user.click("Settings")
    user.set("Most tokens", "12")
    user.set("Seed", "5")
    user.set("System prompt", "be odd")
    user.say("hey")
    body = {
        "messages": [{"role": "system", "content": "be odd"}, {"role": "user", "content": "hey"}],
        **{"seed": 5, "max_tokens": 12},
    }
    wanted = live.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    tokens = page.until("document.querySelector('.message.assistant .info').textContent")
    assert re.match(r"\d+ tokens · .*seed 5", tokens)
    user.click("Copy the text")
    user.set("Seed", "")
    user.click("Try again")
    user.idle()
    assert user.texts(".branches > span") == ["2 / 2"]
    user.click("The branch before")
    assert wanted.split() == user.answers[0].split()
    user.click("Edit and send again", last=False)
    page.until("document.querySelector('.message.user .edit') !== null")
    page.run("document.querySelector('.edit').value = 'a <b>bold</b> word'")
    page.run("document.querySelector('.edit').focus()")
    page.press("Enter")
    user.idle()
    assert user.texts(".message.user > .content") == ["a <b>bold</b> word"]
    assert page.run("document.querySelectorAll('.message.user b').length") == 0
    assert "2 / 2" in user.texts(".branches > span")
    assert "a <b>bold</b> word" in user.save()
    before = user.answers
    page.reload()
    page.until("document.querySelectorAll('.message').length === 2")
    assert user.answers == before
    assert user.texts(".conversations .open") == ["hey"]
    user.click("Delete the conversation")
    user.click("Delete")
    assert user.texts(".message") == []
    live.assert_nothing_left()


@needs_browser
def test_stop_by_key(user: User, live: Live) -> None:
    seed = next(seed for seed in range(99) if is_long(live, seed))
    user.click("Settings")
    user.set("Seed", str(seed))
    with slow_steps(live):
        user.page.run("document.querySelector('.composer textarea').focus()")
        user.page.write("hey")
        user.page.press("Enter")
        user.page.until("document.querySelector('.message.assistant > .content').textContent")
        user.page.press("Escape")
        user.idle()
    assert "stopped" in user.texts(".info")[0]
    live.assert_nothing_left()


def is_long(live: Live, seed: int) -> bool:
    """Return whether the answer to "hey" with this seed has more than 30 tokens."""
    body = {"messages": [{"role": "user", "content": "hey"}], "seed": seed}
    return live.post("/v1/chat/completions", body)["usage"]["completion_tokens"] > 30


@contextlib.contextmanager
def slow_steps(live: Live) -> Iterator[None]:
    """Have every step take a while inside the block."""
    engine = live.llm._llm.session.engine
    step = engine.step

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return step(*args, **kwargs)

    engine.step = slow
    try:
        yield
    finally:
        engine.step = step


@needs_browser
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_tokens(user: User, live: Live, kind: str) -> None:
    """Tokens have the probabilities of the API, and a click goes on from another one."""
    page = user.page
    if kind == "text":
        user.click("New text")
    user.click("Tokens and their probabilities")
    user.click("Settings")
    for label, value in {"Most tokens": "10", "Seed": "5", "Temperature": "1"}.items():
        user.set(label, value)
    user.set("Alternatives of a token", "3")
    user.say("hey you")
    body = {"seed": 5, "max_tokens": 10, "temperature": 1.0, "return_token_ids": True}
    if kind == "chat":
        messages = [{"role": "user", "content": "hey you"}]
        body |= {"messages": messages, "logprobs": True, "top_logprobs": 3}
        [choice] = live.post("/v1/chat/completions", body)["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    else:
        [choice] = live.post("/v1/completions", body | {"prompt": "hey you", "logprobs": 3})[
            "choices"
        ]
        logprobs = choice["logprobs"]["token_logprobs"]
    page.until("document.querySelectorAll('.token').length >= 4")
    shades = page.run(
        "[...document.querySelectorAll('.token')].map(t => +t.style.getPropertyValue('--surprise'))"
    )
    assert shades == pytest.approx([1 - 2.718281828**p for p in logprobs], abs=2e-3)
    # By the keyboard to the third token, whose alternatives are shown then.
    page.run("document.querySelector('.token-list').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    rows = user.texts(".alternative .what")
    assert len(rows) in (3, 4)  # the token itself may be none of the three
    page.press("Enter")
    assert page.run("document.activeElement.classList.contains('alternative')")
    chosen = page.run(
        "[...document.querySelectorAll('.alternative')].findIndex(a => "
        "a.classList.contains('chosen'))"
    )
    other = next(i for i, text in enumerate(rows) if i != chosen and len(text) == 1)
    first_two = user.texts(".token")[:2]
    page.run(f"document.querySelectorAll('.alternative')[{other}].click()")
    user.idle()
    page.until("document.querySelector('.branches') !== null")
    now = user.texts(".token")
    assert now[:2] == first_two and now[2] == rows[other].replace("·", " ")
    assert user.texts(".branches > span") == ["2 / 2"]
    assert page.run("document.querySelectorAll('.token.branched').length") == 1
    user.click("Tokens and their probabilities")
    plain = "".join(text for text in now[:3] if len(text) == 1)
    assert user.answers[0].lstrip().startswith(plain.strip())
    live.assert_nothing_left()


@needs_browser
def test_two_answers_side_by_side(user: User, live: Live) -> None:
    page = user.page
    user.click("Two answers side by side")
    user.set("Most tokens", "6")
    user.set("Temperature", "0")
    user.click("Answer A")
    user.set("Most tokens", "9")
    user.set("Temperature", "0")
    user.say("hey")
    assert len(user.texts(".pair > .message")) == 2
    told = user.texts(".pair .told")
    assert told == ["max tokens 9", "max tokens 6"]
    user.click("Go on from this")
    assert user.texts(".prefer[aria-pressed='true']") == ["Goes on from here"]
    shorter = user.answers[1]
    user.click("Two answers side by side")
    user.say("more")
    assert len(user.texts(".message.assistant")) == 3
    asked = page.run("document.querySelectorAll('.message.user').length")
    assert asked == 2 and user.answers[1] == shorter
    live.assert_nothing_left()


@needs_browser
def test_structured_output_and_wrong_settings(user: User) -> None:
    user.click("Settings")
    user.set("Top p", "2")
    user.say("hey")
    assert "Top p: 2 is not from 0 to 1" in user.problem
    assert user.texts(".message") == []  # nothing was sent, and the text is still there
    typed = user.page.run("document.querySelector('.composer textarea').value")
    assert typed == "hey"
    user.set("Top p", "")
    user.set("Answers are", "json_schema")
    user.set("Schema", "{")
    user.page.run("document.querySelector('.composer textarea').focus()")
    user.page.press("Enter")
    assert "Schema: this is not JSON" in user.problem


@needs_browser
def test_an_error_of_the_server_is_told(user: User, live: Live) -> None:
    user.say("a" * 99)
    [said] = user.texts(".message.assistant > .error")
    assert "max_model_len=64" in said
    live.assert_nothing_left()


HOSTILE = """# Title <img src=x onerror="window.hit=1">

<script>window.hit = 2</script> and [a link](javascript:window.hit=3) and [one](https://a.org/x)

| a | b |
|--|--|
| <svg onload=window.hit=4> | `c` |

- **bold** <a href="javascript:window.hit=5">x</a>

```html
<iframe src="javascript:window.hit=6"></iframe>
```
![image](https://a.org/pixel.png) <style>*{display:none}</style>
"""


@needs_browser
def test_nothing_that_a_model_writes_runs(
    user: User, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(live, monkeypatch, HOSTILE)
    user.click("Settings")
    user.set("Alternatives of a token", "")
    user.say("so?")
    page = user.page
    page.until("document.querySelector('.message.assistant h3') !== null")
    assert page.run("window.hit") is None
    bad = "script, iframe, style, img, svg[onload], [onerror], [onload]"
    assert page.run(f"document.querySelectorAll('.message :is({bad})').length") == 0
    links = page.run(
        "[...document.querySelectorAll('.message a')].map(a => [a.href, a.rel, a.target])"
    )
    rel = "noopener noreferrer nofollow"
    assert links == [
        ["https://a.org/x", rel, "_blank"],
        ["https://a.org/pixel.png", rel, "_blank"],
    ]
    text = user.answers[0]
    assert "<script>window.hit = 2</script>" in text and '<a href="javascript' in text
    assert user.texts(".message pre code") == ['<iframe src="javascript:window.hit=6"></iframe>']
    user.click("Copy the code")
    # Trusted types: even the page's own scripts could not.
    refused = page.run(
        "(() => { try { document.createElement('p').innerHTML = '<b>x</b>'; return false }"
        "catch { return true } })()"
    )
    assert refused
    page.problems.clear()  # that refusal


@needs_browser
def test_reasoning_and_tools(user: User, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<think>\nIt *rains*.\n</think>\n\nLet me see.\n<tool_call>\n"
    text += '{"name": "weather", "arguments": {"a": [1, 2]}}\n</tool_call>'
    prompts = write(live, monkeypatch, text)
    user.click("Settings")
    user.set("Functions, as a JSON list", json.dumps([WEATHER["function"]]))
    user.set("Alternatives of a token", "")
    user.say("so?")
    assert user.texts(".reasoning:not([hidden]) .content") == ["It rains."]
    assert user.page.run("document.querySelectorAll('.reasoning[open]').length") == 0
    assert user.texts(".call-name code") == ["weather"]
    assert json.loads(user.texts(".call pre")[0]) == {"a": [1, 2]}
    write(live, monkeypatch, "It is dry.")
    user.page.run("document.querySelector('.result textarea').value = 'dry'")
    user.click("Give the result")
    user.idle()
    user.page.until("document.querySelectorAll('.message.assistant').length === 2")
    assert user.answers[1] == "It is dry."
    assert user.texts(".message.tool > .content") == ["dry"]
    assert prompts[0].startswith("weather,")


@needs_browser
def test_the_load(user: User, live: Live) -> None:
    page = user.page
    user.click("Load")
    page.until("document.querySelectorAll('.chart path').length >= 12")
    titles = user.texts(".chart-head h3")
    assert "Tokens a second" in titles and "Time to first token" in titles
    assert page.run("document.querySelectorAll('.chart')[0].querySelectorAll('.tick').length") >= 6
    facts = dict(zip(user.texts(".facts dt"), user.texts(".facts dd"), strict=True))
    assert facts["Model"] == "tiny" and facts["Context"] == "64 tokens"
    assert "cpu" in facts["Device"] and facts["Computes in"] == "float32"
    assert re.match(r"\d+\.\d+\.\d+|unknown", facts["jpaged"])
    body = {"prompt": "hey", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with slow_steps(live):
        held = live.begin("/v1/completions", body)
        page.until("document.querySelectorAll('.requests tbody tr').length === 1")
        cells = user.texts(".requests tbody td")
        assert cells[:3] == ["completions", "tiny", "3"]
        held.close()
    page.until("document.querySelectorAll('.requests tbody tr').length === 0")
    live.assert_nothing_left()


def axe() -> str | None:
    """Return axe's script, if it was installed by npm beside the tests."""
    file = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
    return file.read_text() if file.exists() else None


def check_accessible(page: Browser, script: str | None) -> None:
    """What can be checked without axe always is: names of what can be used, and contrast by it."""
    nameless = page.run(
        "[...document.querySelectorAll('button, a, input, textarea, select')]"
        ".filter(e => e.offsetParent !== null && !(e.getAttribute('aria-label') || "
        "e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert nameless == []
    twice = page.run(
        "(() => { const ids = [...document.querySelectorAll('[id]')].map(e => e.id);"
        "return ids.filter((id, i) => ids.indexOf(id) !== i) })()"
    )
    assert twice == []
    if script is None:
        return
    page.run(f"{script}; 1")
    result = page.wait(
        "axe.run().then(r => [r.passes.length, r.violations.map(v => [v.id, v.nodes[0].html])])"
    )
    assert result[0] > 10 and result[1] == []


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_for_everybody(user: User, scheme: str, tmp_path: Path) -> None:
    """On a desk and on a phone: everything has a name, nothing is wider than the screen. Pictures
    are kept by `pytest --basetemp`.
    """
    page, script = user.page, axe()
    page.scheme(scheme)
    check_accessible(page, script)
    user.click("Two answers side by side")
    user.set("Most tokens", "20")
    user.say("hey you there")
    check_accessible(page, script)
    user.click("Tokens and their probabilities")
    page.run("document.querySelector('.token').click()")
    page.until("!document.querySelector('.popup').hidden")
    check_accessible(page, script)
    page.picture(tmp_path / "desk.png")
    user.click("Close the settings")
    page.size(390, 844, scale=2, is_phone=True)
    user.click("Conversations")  # closed: it lies over the page
    wide = "document.documentElement.scrollWidth > innerWidth"
    assert not page.run(wide)
    check_accessible(page, script)
    page.picture(tmp_path / "phone.png")
    user.click("Load")
    page.until("document.querySelectorAll('.chart path').length >= 12")
    assert not page.run(wide)
    check_accessible(page, script)
    page.picture(tmp_path / "phone-load.png")
    for name in ("desk", "phone", "phone-load"):
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000


@needs_browser
def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    """It takes and returns token ids, which the page cannot write: it says so at once."""
    folder = write_folder(tmp_path / "tiny")
    for file in folder.glob("*token*"):
        file.unlink()
    llm = LLM(folder, **SETTINGS)
    with serving(llm) as live, browser(tmp_path / "profile") as page:
        page.open(f"http://127.0.0.1:{live.port}/")
        page.size(1280, 800)
        page.until("document.querySelector('.state')?.textContent.startsWith('no tokenizer: ')")
        page.run("document.querySelector('.composer textarea').focus()")
        page.write("hello")
        page.press("Enter")
        said = page.until("document.querySelector('.message.assistant > .error')?.textContent")
        assert "tokenizer" in said
        page.run(
            "[...document.querySelectorAll('button')].find(b => b.textContent === 'Load').click()"
        )
        page.until("document.querySelectorAll('.chart path').length >= 12")
        problems = [p for p in page.problems if "status of 400" not in p]
        assert not problems, problems
