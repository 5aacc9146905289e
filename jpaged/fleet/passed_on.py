"""PassedOn: what of a request's pieces a client has, so that another replica can go on with it."""

import dataclasses
from typing import Any

import numpy as np

from jpaged.errors import ReplicaError
from jpaged.request.inputs import Prompt
from jpaged.request.outputs import (
    CompletionChunk,
    RequestOutput,
    WeightSpan,
    completion,
)
from jpaged.sampling_params import SamplingParams


@dataclasses.dataclass(eq=False)
class _Sample:
    """What was passed on of one completion, and what the replica that runs now has sent of it."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    tops: list[Any] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    masks: list[np.ndarray] = dataclasses.field(default_factory=list)
    masses: list[np.ndarray] = dataclasses.field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_seen: int = 0  # tokens
    num_characters: int = 0

    def take(self, chunk: CompletionChunk) -> None:
        """Count a piece as passed on."""
        self.token_ids += chunk.token_ids_delta
        self.logprobs += chunk.token_logprobs_delta
        for version, start, end in chunk.weight_versions_delta:
            self.versions += [version] * (end - start)
        if chunk.logprobs_delta is not None:
            self.tops += list(chunk.logprobs_delta)
        if chunk.sampling_mask_delta is not None and chunk.kept_logprobs_delta is not None:
            self.masks.append(chunk.sampling_mask_delta)
            self.masses.append(chunk.kept_logprobs_delta)
        if chunk.text_delta is not None:
            self.text = (self.text or "") + chunk.text_delta
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason


class PassedOn:
    """The pieces of one request's completions that were passed on, of all replicas that ran it."""

    def __init__(self, params: SamplingParams):
        self._params = params
        self._samples = [_Sample() for _ in range(params.n)]

    def __bool__(self) -> bool:
        """Whether a client has anything."""
        return any(s.token_ids or s.text or s.finish_reason for s in self._samples)

    def restart(self) -> None:
        """Expect the pieces of a replica that begins the request anew."""
        for sample in self._samples:
            sample.num_seen = sample.num_characters = 0

    def fresh(self, chunk: CompletionChunk) -> CompletionChunk | None:
        """Return what of a piece was not passed on before, and count it as passed on; None where
        that is nothing. ReplicaError where it has other tokens than those that were passed on.
        """
        sample, ids = self._samples[chunk.index], chunk.token_ids_delta
        known = sample.token_ids[sample.num_seen : sample.num_seen + len(ids)]
        if known != ids[: len(known)]:
            raise ReplicaError(
                "the replica that ran this request has died, and the one in its place drew other "
                f"tokens than the {len(sample.token_ids)} that were sent"
            )
        sample.num_seen += len(ids)
        text, cut = chunk.text_delta, 0
        if text is not None:
            sent = len(sample.text or "")
            cut = min(max(sent - sample.num_characters, 0), len(text))
            sample.num_characters += len(text)
        was_ended = sample.finish_reason is not None
        fresh = chunk if not known and not cut else _without(chunk, len(known), cut)
        if was_ended or not (fresh.token_ids_delta or fresh.text_delta or fresh.finish_reason):
            return None
        sample.take(fresh)
        return fresh

    def continued(self, prompt: Prompt) -> Prompt:
        """Return the prompt as one that goes on after what was passed on: its tokens are kept, and
        the later ones are those that its key draws there. Where it cannot go on (its prompt is
        scored), the prompt itself: its key draws the same tokens again, and `fresh` compares them.
        """
        params = self._params
        if not self or params.prompt_logprobs is not None:
            return prompt
        has_mass = params.structured is not None and params.logprobs_mode == "tempered"
        outputs = [
            completion(
                index,
                sample.token_ids,
                sample.logprobs,
                sample.finish_reason or "abort",
                text=sample.text,
                tops=None if params.logprobs is None else sample.tops,
                stop_reason=sample.stop_reason,
                allowed_logprobs=np.zeros(len(sample.token_ids), np.float32) if has_mass else None,
                versions=sample.versions,
                sampling_mask=_joined(sample.masks, (0, params.top_k))
                if params.sampling_mask
                else None,
                kept_logprobs=_joined(sample.masses, (0,)) if params.sampling_mask else None,
            )
            for index, sample in enumerate(self._samples)
        ]
        first = next((s.versions[0] for s in self._samples if s.versions), 0)
        begun = RequestOutput(
            request_id="",
            prompt=prompt.text,
            prompt_token_ids=list(prompt.ids),
            outputs=outputs,
            weight_version=first,
            unfinished=None if prompt.begun is None else prompt.begun.unfinished,
        )
        return dataclasses.replace(prompt, begun=begun)


def _joined(parts: list[np.ndarray], empty: tuple[int, ...]) -> np.ndarray:
    kind = np.int32 if len(empty) == 2 else np.float32
    return np.concatenate(parts) if parts else np.zeros(empty, kind)


def _without(chunk: CompletionChunk, tokens: int, characters: int) -> CompletionChunk:
    """Return a piece without its first tokens and characters."""
    ids = chunk.token_ids_delta
    start = min((span.start for span in chunk.weight_versions_delta), default=0) + tokens
    spans = [
        WeightSpan(span.version, max(span.start, start), span.end)
        for span in chunk.weight_versions_delta
        if span.end > start
    ]
    tops, mask, mass = (
        None if x is None else x[tokens:]
        for x in (chunk.logprobs_delta, chunk.sampling_mask_delta, chunk.kept_logprobs_delta)
    )
    return dataclasses.replace(
        chunk,
        token_ids_delta=ids[tokens:],
        text_delta=None if chunk.text_delta is None else chunk.text_delta[characters:],
        token_logprobs_delta=chunk.token_logprobs_delta[tokens:],
        logprobs_delta=tops,
        weight_versions_delta=spans,
        sampling_mask_delta=mask,
        kept_logprobs_delta=mass,
    )
