"""Repeats a prompt before its completions: its text, and the log-probabilities of its tokens."""

from typing import Any

from jpaged.errors import RequestError
from jpaged.openai import responses
from jpaged.openai.responses import AnswerForm, CompletionLogprobs
from jpaged.request.detokenizer import decode
from jpaged.request.outputs import RequestOutput


def text_of(llm: Any, prompt: Any, *, last: int | None = None) -> str:
    """Return the text of a prompt, or of its last `last` tokens."""
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt") or prompt.get("prompt_token_ids")
    return prompt if isinstance(prompt, str) else _decoded(llm, prompt[-(last or 0) :])


def _decoded(llm: Any, ids: list[int]) -> str:
    """Return the text of token ids. Raises RequestError."""
    if llm.tokenizer is None:
        raise RequestError("echo: this model has no tokenizer")
    if bad := [t for t in ids if not 0 <= t < llm.model_config.vocab_size]:
        raise RequestError(f"prompt: token id {bad[0]} is outside the vocabulary")
    return decode(llm.tokenizer, ids, False)


def put_prompt(
    llm: Any,
    choice: Any,
    output: RequestOutput,
    form: AnswerForm,
    text: str,
    *,
    only_prompt: bool,
) -> None:
    """Put the prompt before the text of a choice, or in place of it."""
    choice["text"] = text if only_prompt else text + (choice["text"] or "")
    if only_prompt:
        choice["finish_reason"] = "length"
    if form.top is None:
        return
    tokens = [decode(llm.tokenizer, output.prompt_token_ids[:1], False)]
    logprobs: list[float | None] = [None]
    tops: list[dict[str, float] | None] = [None]
    scored = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
    for token, entries in scored:
        assert entries is not None
        # The likeliest comes last: of two tokens with the same text, it is the one that is kept.
        ranked = sorted(entries.items(), key=lambda item: item[1].logprob)
        tokens.append(form.token(token, entries[token]))
        logprobs.append(responses.finite(entries[token].logprob))
        tops.append({form.token(t, e): responses.finite(e.logprob) for t, e in ranked})
    answer: CompletionLogprobs = choice["logprobs"]
    if not only_prompt:
        tokens, logprobs = tokens + answer["tokens"], logprobs + answer["token_logprobs"]
        tops = tops + answer["top_logprobs"]
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    choice["logprobs"] = {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets[:-1],
    }
