"""The page: nothing from elsewhere; in a browser it shows the server's load and tries a prompt."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM
from tests.openai.browser import PATH, browser
from tests.text_model import write_folder
from tests.tiny import ENGINE

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.server.page import Page
from tests.openai.live import Live, serving

SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    settings: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES}
    with serving(LLM(write_folder(tmp_path / "tiny"), **settings), api_keys=("let-me",)) as live:
        yield live


def test_it_loads_nothing_from_elsewhere(live: Live):
    status, text, headers = live.request("/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert text.encode() == Page().body
    elsewhere = r"https?:|[\"'(]//|@import|url\(|<link|<img|<iframe| src=| on\w+=\""
    assert not re.findall(elsewhere, text)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "unsafe" not in policy and policy.count("'sha256-") == 2
    # Nothing of an answer becomes markup.
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)


@pytest.mark.skipif(PATH is None, reason="no Chromium is installed")
def test_in_a_browser(live: Live, tmp_path: Path):
    """It asks for the key, comes up with the model's name and figures, answers a prompt by a
    stream, and shows a refusal as one. `pytest --basetemp` keeps its picture.
    """
    with browser(tmp_path / "profile") as page:
        page.open(f"http://127.0.0.1:{live.port}/")
        page.until(
            "document.getElementById('state')?.textContent === 'this server wants an API key'"
        )
        page.run("get('key').value = 'let-me'; get('key').dispatchEvent(new Event('change'))")
        page.until("get('state').textContent === 'up' && get('rate').textContent !== '–'")
        assert page.run("get('model').textContent") == "tiny, 64 tokens of context"
        assert page.run("get('kv').textContent") == "0 % 0 of 128"
        page.run("get('prompt').value = 'a <b>bold</b> word'; get('tokens').value = 30")
        page.run("get('send').click()")
        timing = page.until(
            "get('timing').textContent.includes(' tokens in ') && get('timing').textContent"
        )
        assert re.match(r"\d+ tokens in [\d.]+ s", timing)
        assert page.run("get('answer').textContent.length") > 0
        assert page.run("get('answer').children.length") == 0
        page.run("get('kind').value = 'chat'; get('send').click()")
        page.until(
            "get('send').textContent === 'Generate' && get('timing').textContent.includes(' in ')"
        )
        rows = page.until(
            "get('totals').innerText.match(/Completions\\s+2/) && get('totals').innerText"
        )
        assert re.search(r"Generated tokens\s+\d", rows)
        assert page.run("document.body.scrollWidth <= innerWidth")
        page.picture(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000
        page.run("get('prompt').value = 'a'.repeat(99); get('send').click()")
        page.until("get('answer').className === 'error'")
        assert "max_model_len=64" in page.run("get('answer').textContent")
        refused = [p for p in page.problems if "Content Security Policy" in p or "exception" in p]
        assert not refused
    live.assert_nothing_left()
