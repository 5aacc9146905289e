"""Chat templates in the manner of each family: what the engine is given is what transformers
renders, and what a template refuses is refused by its own words.
"""

from typing import Any

import pytest

from jpaged import RequestError
from jpaged.request.chat import Chat, render
from tests.text_model import make_tokenizer

# The system prompt is refused; turns have to alternate.
GEMMA2 = """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}
{% endif %}{% for m in messages %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}
{% endif %}<{{ 'model' if m.role == 'assistant' else m.role }}>{{ m.content | trim }}
{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"""
# It joins the first turn.
GEMMA3 = """{% set first = '' %}{% if messages[0].role == 'system' %}
{% set first = messages[0].content + ' ' %}{% set messages = messages[1:] %}{% endif %}
{% for m in messages %}<{{ m.role }}>{{ (first if loop.first else '') + m.content }}{% endfor %}
{% if add_generation_prompt %}<model>{% endif %}"""
# There is a default one, and a switch for thinking.
QWEN3 = """{% if messages[0].role != 'system' %}<system>be short{% endif %}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}
<assistant>{% if enable_thinking is defined and not enable_thinking %}none{% endif %}{% endif %}"""
SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hello world"}
ANSWER = {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (GEMMA2, [USER, ANSWER, USER], {}),
        (GEMMA3, [SYSTEM, USER], {}),
        (GEMMA3, [USER], {}),
        (QWEN3, [USER], {}),
        (QWEN3, [SYSTEM, USER], {"enable_thinking": False}),
        (QWEN3, [SYSTEM, USER, ANSWER, USER], {"enable_thinking": True}),
    ],
)
def test_as_transformers_renders(
    template: str, messages: list[dict[str, str]], options: dict[str, Any]
) -> None:
    tokenizer = make_tokenizer(template)
    found = render(Chat(messages=messages, template_kwargs=options), tokenizer)
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    assert found == tokenizer(text, add_special_tokens=False)["input_ids"] and found
    others = render(Chat(messages=messages, add_generation_prompt=False), tokenizer)
    assert others != found


def test_a_switch_changes_the_prompt() -> None:
    tokenizer = make_tokenizer(QWEN3)
    on, off = (
        render(Chat(messages=[USER], template_kwargs={"enable_thinking": x}), tokenizer)
        for x in (True, False)
    )
    assert on != off and on == render(Chat(messages=[USER]), tokenizer)


@pytest.mark.parametrize(
    ("messages", "said"),
    [([SYSTEM, USER], "System role not supported"), ([USER, USER], "roles must alternate")],
)
def test_what_a_template_refuses(messages: list[dict[str, str]], said: str) -> None:
    with pytest.raises(RequestError, match=f"the template refused the messages: {said}"):
        render(Chat(messages=messages), make_tokenizer(GEMMA2))
