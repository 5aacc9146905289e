"""Chat templates in the manner of each family: what the engine is given is what transformers
renders, and what a template refuses is refused by its own words.
"""

from typing import Any

import pytest

from jpaged import RequestError
from jpaged.request.inputs import Chat, Inputs
from tests.text_model import make_tokenizer
from tests.tiny import config

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
# A date of the template's own or the caller's; an array of turns counted by a namespace.
LLAMA3 = """{% if not date_string is defined %}{% set date_string = strftime_now('%Y')[:2] %}
{% endif %}{% set ns = namespace(turns=0) %}<end>today {{ date_string }}
{% for m in messages %}{% set ns.turns = ns.turns + 1 %}<{{ m['role'] }}>{{ m['content'] | trim }}
{% endfor %}{{ ns.turns }}{% if add_generation_prompt %}<assistant>{% endif %}"""
# The system prompt goes before the last turn; an answer ends in the end of the sequence.
MISTRAL = """{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}{% for m in turns %}
{% if m['role'] == 'user' %}[INST]{% if loop.last and system is defined %}{{ system + ' ' }}
{% endif %}{{ m['content'] }}[/INST]{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}
{% endfor %}"""
# How long to think, in the system's own part; what is thought in an answer is left out.
GPT_OSS = """{%- macro header(role) -%}<{{ role }}>{%- endmacro -%}{{ header('system') }}effort
{{ reasoning_effort | default('medium') }}{% if messages[0].role == 'system' %}
{{ header('developer') }}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{% for m in messages %}{{ header(m.role) }}{% if m.role == 'assistant' %}final {% endif %}
{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""
# A switch for thinking that the system prompt may hold too.
SMOLLM3 = """{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{% set own = messages[0].content if messages[0].role == 'system' else '' %}
{% if '/no_think' in own %}{% set enable_thinking = false %}{% endif %}<system>
{{ 'think' if enable_thinking else 'answer' }} {{ own.replace('/no_think', '') | trim }}
{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""
# Documents and a switch for thinking are arguments.
GRANITE = """{% if documents %}{% for d in documents %}<doc {{ d['id'] }}>
{{ d['text'] }}{% endfor %}{% endif %}{% if thinking %}<think>{% endif %}
{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token if m.role == 'assistant' }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
# Of Phi and OLMo: each turn as it is.
PHI = """{% for m in messages %}{% if m['role'] in ['system', 'user'] %}<{{ m['role'] }}>
{{ m['content'] }}<end>{% elif m['role'] == 'assistant' %}<assistant>{{ m['content'] }}<end>
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% else %}{{ eos_token }}
{% endif %}"""
SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hello world"}
ANSWER = {"role": "assistant", "content": "hello"}


def render(chat: Chat, tokenizer: Any) -> list[int]:
    return Inputs(config(), 4096, tokenizer, None).render(chat)


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (GEMMA2, [USER, ANSWER, USER], {}),
        (GEMMA3, [SYSTEM, USER], {}),
        (GEMMA3, [USER], {}),
        (QWEN3, [USER], {}),
        (QWEN3, [SYSTEM, USER], {"enable_thinking": False}),
        (QWEN3, [SYSTEM, USER, ANSWER, USER], {"enable_thinking": True}),
        (LLAMA3, [SYSTEM, USER, ANSWER, USER], {}),
        (LLAMA3, [USER], {"date_string": "26 Jul 2024"}),
        (MISTRAL, [SYSTEM, USER, ANSWER, USER], {}),
        (GPT_OSS, [SYSTEM, USER, ANSWER, USER], {}),
        (GPT_OSS, [USER], {"reasoning_effort": "high"}),
        (SMOLLM3, [{"role": "system", "content": "be brief /no_think"}, USER], {}),
        (SMOLLM3, [USER], {"enable_thinking": False}),
        (GRANITE, [SYSTEM, USER, ANSWER, USER], {"thinking": True}),
        (GRANITE, [USER], {"documents": [{"id": 1, "text": "a stack"}]}),
        (PHI, [SYSTEM, USER, ANSWER, USER], {}),
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
    if template is not MISTRAL:  # it has no such prompt
        others = Chat(messages=messages, template_kwargs=options, add_generation_prompt=False)
        assert render(others, tokenizer) != found


@pytest.mark.parametrize(
    ("template", "switch", "default", "other"),
    [
        (QWEN3, "enable_thinking", True, False),
        (SMOLLM3, "enable_thinking", True, False),
        (GPT_OSS, "reasoning_effort", "medium", "low"),
        (GRANITE, "thinking", False, True),
    ],
)
def test_a_switch_changes_the_prompt(template: str, switch: str, default: Any, other: Any) -> None:
    tokenizer = make_tokenizer(template)
    plain, same, changed = (
        render(Chat(messages=[USER], template_kwargs=options), tokenizer)
        for options in (None, {switch: default}, {switch: other})
    )
    assert plain == same != changed


@pytest.mark.parametrize(
    ("messages", "said"),
    [([SYSTEM, USER], "System role not supported"), ([USER, USER], "roles must alternate")],
)
def test_what_a_template_refuses(messages: list[dict[str, str]], said: str) -> None:
    with pytest.raises(RequestError, match=f"the template refused the messages: {said}"):
        render(Chat(messages=messages), make_tokenizer(GEMMA2))
