"""Dialog: a trajectory of several turns by exact tokens; dialog_arrays: trajectories as arrays for
a jitted training step.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from jpaged.checks import JsonObject, check_choice, check_whole
from jpaged.errors import RequestError
from jpaged.llm import LLM
from jpaged.openai.parts import Format, folded
from jpaged.request.arrays import mask_arrays, route_arrays
from jpaged.request.detokenizer import decode
from jpaged.request.embeddings import EmbeddingSpan, spans_of
from jpaged.request.images import split_sources
from jpaged.request.inputs import Chat
from jpaged.request.outputs import FinishReason, RequestOutput, WeightSpan
from jpaged.request.renderer import Renderer, bridged, renderer_of
from jpaged.request.served_turns import check_is_prefix, tokens_behind, told
from jpaged.sampling_params import SamplingParams
from jpaged.types import Message, Messages

Rewritten = Literal["error", "keep"]
END_OF_PROMPT = 8  # tokens, which say whether the template has opened the reasoning


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One answer in a dialog. start: the place of its first token in Dialog.token_ids. message:
    what it says, as chat templates take it: "content", "reasoning_content" where the model marks
    it, and "tool_calls", each with "id" and "function" ("name", and "arguments" as JSON text). The
    rest is as in CompletionOutput; routed_experts has the experts of all tokens before it, too.
    """

    start: int
    message: JsonObject
    text: str
    token_ids: list[int]
    token_logprobs: np.ndarray
    finish_reason: FinishReason | None
    weight_versions: list[WeightSpan]
    sampling_mask: np.ndarray | None = None
    kept_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None

    @property
    def tool_calls(self) -> list[JsonObject]:
        """The calls of tools; [] where there are none."""
        return self.message.get("tool_calls", [])


class Dialog:
    """A conversation whose turns an LLM draws, by exact tokens: what was drawn stays as drawn, and
    only new messages are rendered.

        dialog = jpaged.Dialog(llm, messages, tools=schemas)
        turn = dialog.reply(sampling)
        dialog.add({"role": "tool", "content": run(turn.tool_calls[0])})

    Or `prompt` goes to any face that has these weights, in one call for many dialogs, and `take`
    has what came of it. llm: with a tokenizer that has a chat template, whose own marks of
    reasoning and calls are read. tools, chat_template_kwargs: what the template is told. group: for
    dialog_arrays. rewritten: what to do where the template would write earlier messages otherwise
    once others follow (many leave out earlier reasoning): "error" raises RequestError, which names
    the first token that differs; "keep" goes on from the tokens that were served. renderer: writes
    what comes behind a turn in place of the template: "auto" is that of the package `renderers`
    where it is installed and lists the tokenizer's name_or_path, None is the template; or one that
    you make, as create_renderer(tokenizer, Qwen3RendererConfig()) for a folder. What a renderer
    leaves open is the template's.

    token_ids: all tokens so far, of messages and turns. embeddings: the images of messages, by
    their places among them, as the vision tower takes them; each is read once, when its message
    comes, and again as long as messages of the same turn follow. Not for several threads at once.
    """

    def __init__(
        self,
        llm: LLM,
        messages: Messages,
        *,
        tools: Sequence[JsonObject] | None = None,
        chat_template_kwargs: JsonObject | None = None,
        group: int = 0,
        rewritten: Rewritten = "error",
        renderer: Renderer | Literal["auto"] | None = "auto",
    ):
        check_choice("rewritten", rewritten, Rewritten)
        self.llm, self.group = llm, group
        self.turns: list[Turn] = []
        self._rewritten = rewritten
        self._variables = dict(chat_template_kwargs or {})
        if isinstance(renderer, str):
            check_choice("renderer", renderer, Literal["auto"])
            tokenizer = llm.tokenizer
            renderer = None if tokenizer is None else renderer_of(tokenizer, self._variables)
        self._renderer = renderer
        if tools:
            self._variables["tools"] = list(tools)
        self._messages = [dict(message) for message in messages]
        self._drawn = -1  # the place of the last turn's message
        self._inputs = llm.session.inputs
        self._format = Format.of(llm.tokenizer)
        chat = Chat(messages=told(self._messages), template_kwargs=self._variables)
        self.token_ids, images = self._inputs.conversation(chat, needs_sources=False)
        self.embeddings: dict[int, EmbeddingSpan] = images or {}

    @property
    def messages(self) -> list[JsonObject]:
        """The messages so far, those of turns too."""
        return [dict(message) for message in self._messages]

    @property
    def prompt(self) -> list[int] | dict[str, object]:
        """What the next turn is drawn after, token ids, or a dict of them and of "embeddings" where
        messages have images; RequestError behind a turn, before `add`.
        """
        if self._drawn == len(self._messages) - 1:
            raise RequestError("the last message is the model's: add one before the next turn")
        if not self.embeddings:
            return list(self.token_ids)
        return {"prompt_token_ids": list(self.token_ids), "embeddings": dict(self.embeddings)}

    def reply(
        self, sampling_params: SamplingParams | None = None, *, seed: int | None = None
    ) -> Turn:
        """Draw the next turn, and return it. sampling_params None generates up to the end of the
        context. Other threads' dialogs join one batch. Raises what LLM.generate raises.
        """
        asked = sampling_params or SamplingParams(max_tokens=None)
        (output,) = self.llm.generate(self.prompt, asked, seed=seed, use_tqdm=False)
        return self.take(output)

    def take(self, output: RequestOutput, index: int = 0) -> Turn:
        """Take a completion of `prompt` as the next turn, and return it. index: which one.
        RequestError for an output of another prompt, or one that was cut and goes on.
        """
        _ = self.prompt  # which there must be one of
        self._check_prompt(self.token_ids, output)
        check_whole("index", index, 0, len(output.outputs) - 1)
        drawn = output.outputs[index]
        if output.error is not None or drawn.finish_reason == "abort":
            said = output.error or "it was cut, and goes on as a prompt"
            raise RequestError(f"this output is no whole turn: {said}")
        ids, tokenizer = drawn.token_ids, self._inputs.need_tokenizer("Dialog")
        text = drawn.text or ""
        if self._format.style == "harmony":  # special tokens separate the parts of its answers
            text = decode(tokenizer, ids[:-1] if drawn.finish_reason == "stop" else ids, False)
        end = decode(tokenizer, self.token_ids[-END_OF_PROMPT:], False)
        reader = self._format.reader(end, tools="tools" in self._variables)
        turn = Turn(
            start=len(self.token_ids),
            message={"role": "assistant", **folded(reader.push(text) + reader.finish())},
            text=text,
            token_ids=list(ids),
            token_logprobs=drawn.token_logprobs,
            finish_reason=drawn.finish_reason,
            weight_versions=drawn.weight_versions,
            sampling_mask=drawn.sampling_mask,
            kept_logprobs=drawn.kept_logprobs,
            routed_experts=_joined(output.prompt_routed_experts, drawn.routed_experts),
        )
        self.turns.append(turn)
        self._drawn = len(self._messages)
        self._messages.append(turn.message)
        self.token_ids = [*self.token_ids, *ids]
        return turn

    def add(self, messages: Message | Messages) -> None:
        """Put a message, or several, behind what there is: of tools, of a user. RequestError where
        the template refuses them or cannot continue what was served; the dialog is as before then.
        """
        added = [messages] if isinstance(messages, Mapping) else messages
        all_of_them = [*self._messages, *map(dict, added)]
        if self.turns:
            last, served = self.turns[-1], self.turns[-1].start + len(self.turns[-1].token_ids)
            behind = self._bridged(last, all_of_them[self._drawn + 1 :])
            images = None
            if behind is None:
                behind, images = self._rendered(last, all_of_them)
            self.token_ids = [*self.token_ids[:served], *behind]
            before = {place: x for place, x in self.embeddings.items() if place < served}
            after = {served + place: x for place, x in (images or {}).items()}
            self.embeddings = before | after
        else:
            chat = Chat(messages=told(all_of_them), template_kwargs=self._variables)
            self.token_ids, images = self._inputs.conversation(chat, needs_sources=False)
            self.embeddings = images or {}
        self._messages = all_of_them

    def _bridged(self, last: Turn, messages: Messages) -> list[int] | None:
        """Return what the renderer writes behind the last turn, None where the template is to, as
        of images, whose rows a renderer does not count.
        """
        if self._renderer is None or split_sources(messages, needs_sources=False)[1]:
            return None
        before, tools = self.token_ids[: last.start], self._variables.get("tools")
        return bridged(self._renderer, before, last.token_ids, told(messages), tools)

    def _rendered(
        self, last: Turn, messages: Messages
    ) -> tuple[list[int], dict[int, EmbeddingSpan] | None]:
        """Return what the template writes behind the last turn, of all messages, and the images in
        that.
        """
        if self._rewritten == "error":
            check_is_prefix(self._inputs, messages, self._drawn + 1, self._variables)
        last_id = last.token_ids[-1] if last.token_ids else None
        return tokens_behind(self._inputs, messages, self._drawn, last_id, self._variables)

    def _check_prompt(self, ours: list[int], output: RequestOutput) -> None:
        theirs = output.prompt_token_ids
        pairs = enumerate(itertools.zip_longest(ours, theirs))
        place = next((i for i, (a, b) in pairs if a != b), None)
        if place is not None:
            a, b = (ids[place] if place < len(ids) else None for ids in (ours, theirs))
            raise RequestError(
                f"this output is of another prompt: token {place} is {a} in the dialog, {b} there"
            )
        model = self._inputs.model
        seen, had = (
            {span.start: span.digest for span in spans_of(x or {}, len(ours), model) or ()}
            for x in (self.embeddings, output.embeddings)
        )
        if seen != had:
            place = min(place for place in seen | had if seen.get(place) != had.get(place))
            raise RequestError(f"this output is of another prompt: the image at {place} differs")


def dialog_arrays(
    dialogs: Sequence[Dialog],
    *,
    max_len: int | None = None,
    pad_id: int = 0,
    overflow: Literal["error", "truncate", "drop"] = "error",
) -> dict[str, np.ndarray]:
    """Return dialogs as padded arrays, one row each (B), for a jitted training step.

    tokens int32 [B, L], right-padded with pad_id, of prompts, turns and what came between them;
    mask bool [B, L] of those that are there, lens int32 [B]. loss_mask bool [B, L]: tokens that
    were drawn. logprobs float32, weight_versions int32 and turn_ids int32 [B, L] are of these, at
    the place of the token itself; turn_ids count from 0. Elsewhere they are 0, 0 and -1. group_ids
    int32 [B]; index int32 [B], the place in `dialogs`; finished bool [B], True where the last turn
    is there whole and ended by itself ("stop"). max_len: L; None is the longest there is. overflow:
    what to do with a longer one: raise RequestError, cut it on the right, or leave it out.

    Of turns with sampling_mask also sampling_mask int32 [B, L, K] and kept_logprobs float32 [B, L],
    at the place of the token itself, as of to_arrays. RequestError where only some have one. Of an
    engine with routed_experts also routed_experts int16 [B, L, layers, A] of all tokens, as the
    last turn has them, -1 of what came behind it.
    """
    check_choice("overflow", overflow, Literal["error", "truncate", "drop"])
    rows = list(enumerate(dialogs))
    width = max([len(one.token_ids) for one in dialogs], default=0)
    if max_len is not None:
        check_whole("max_len", max_len, 0)
        width = int(max_len)
    for i, one in rows:
        if overflow == "error" and len(one.token_ids) > width:
            raise RequestError(
                f"dialog {i} has {len(one.token_ids)} tokens, over max_len={width}: raise it or "
                "pass another overflow"
            )
    if overflow == "drop":
        rows = [(i, one) for i, one in rows if len(one.token_ids) <= width]
    shape = (len(rows), width)
    arrays = {
        "tokens": np.full(shape, pad_id, np.int32),
        "mask": np.zeros(shape, bool),
        "lens": np.array([min(len(one.token_ids), width) for _, one in rows], np.int32),
        "loss_mask": np.zeros(shape, bool),
        "logprobs": np.zeros(shape, np.float32),
        "weight_versions": np.zeros(shape, np.int32),
        "turn_ids": np.full(shape, -1, np.int32),
        "group_ids": np.array([one.group for _, one in rows], np.int32),
        "index": np.array([i for i, _ in rows], np.int32),
        "finished": np.zeros(len(rows), bool),
    }
    kept = []
    for row, (_, one) in enumerate(rows):
        count = arrays["lens"][row]
        arrays["tokens"][row, :count] = one.token_ids[:count]
        arrays["mask"][row, :count] = True
        for number, turn in enumerate(one.turns):
            stop = turn.start + len(turn.token_ids)
            places = slice(turn.start, stop)  # numpy cuts it at the width
            room = max(min(stop, width) - turn.start, 0)
            kept.append((row, places, turn.sampling_mask, turn.kept_logprobs))
            arrays["loss_mask"][row, places] = True
            arrays["turn_ids"][row, places] = number
            arrays["logprobs"][row, places] = turn.token_logprobs[:room]
            for version, first, end in turn.weight_versions:
                arrays["weight_versions"][row, turn.start + first : turn.start + end] = version
            arrays["finished"][row] = stop <= width and turn.finish_reason == "stop"
    routes = [one.turns[-1].routed_experts if one.turns else None for _, one in rows]
    is_there = [np.arange(width) < (0 if x is None else len(x)) for x in routes]
    pairs = [(places, (x,)) for places, x in zip(is_there, routes, strict=True)]
    return arrays | mask_arrays(kept, shape) | route_arrays(pairs, width)


def _joined(before: np.ndarray | None, after: np.ndarray | None) -> np.ndarray | None:
    """Return the experts of a prompt and a completion, None where they are not told."""
    return None if before is None or after is None else np.concatenate([before, after])
