"""to_arrays, score_arrays: completions and scores as padded arrays for a jitted training step."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from jpaged.checks import check_whole
from jpaged.errors import RequestError
from jpaged.request.outputs import RequestOutput
from jpaged.request.scores import Scores


def to_arrays(
    outs: Sequence[RequestOutput],
    *,
    max_prompt_len: int | None = None,
    max_completion_len: int | None = None,
    pad_id: int = 0,
    overflow: Literal["error", "truncate", "drop"] = "error",
) -> dict[str, np.ndarray]:
    """Return completions as padded arrays, one row each (B), for a jitted training step.

    prompt_ids int32 [B, P] left-padded and completion_ids int32 [B, C] right-padded with pad_id;
    prompt_mask, completion_mask bool, made from lengths, never by comparing with pad_id;
    prompt_lens, completion_lens int32 [B]; logprobs float32 [B, C], 0 where masked;
    weight_versions int32 [B, C], of the weights that drew each token, 0 where masked; group_ids
    int32 [B], the index in `outs`; sample_index int32 [B]; finished bool [B], True where the
    completion ended by itself ("stop") and was not cut here. max_prompt_len, max_completion_len: P
    and C; None is the longest there is. overflow: what to do with a row that does not fit: raise
    RequestError, cut it (a prompt keeps its right end, a completion its left), or leave the row
    out. A failed request raises under "error" and is left out otherwise.

    Of requests with sampling_mask also sampling_mask int32 [B, C, K], -1 where nothing is kept, K
    the largest top_k, and kept_logprobs float32 [B, C]. Of an engine with routed_experts also
    routed_experts int16 [B, P + C, L, A], of prompt_ids and completion_ids one after the other, -1
    where there is none. RequestError where only some have one.
    """
    if overflow not in ("error", "truncate", "drop"):
        raise RequestError(f"overflow={overflow!r}: must be 'error', 'truncate' or 'drop'")
    check_whole("pad_id", pad_id, -(2**31), 2**31 - 1)
    rows = []
    for group, out in enumerate(outs):
        if out.error is None:
            rows += [(group, out.prompt_token_ids, c) for c in out.outputs]
        elif overflow == "error":
            raise RequestError(
                f"request {group} failed: {out.error}; overflow='drop' leaves it out"
            )
    width_p = _width("max_prompt_len", max_prompt_len, [len(prompt) for _, prompt, _ in rows])
    lengths = [len(c.token_ids) for *_, c in rows]
    width_c = _width("max_completion_len", max_completion_len, lengths)
    fits = [len(prompt) <= width_p and len(c.token_ids) <= width_c for _, prompt, c in rows]
    if overflow == "error" and not all(fits):
        group, prompt, c = rows[fits.index(False)]
        raise RequestError(
            f"request {group} has {len(prompt)} prompt and {len(c.token_ids)} completion tokens, "
            f"over max_prompt_len={width_p} or max_completion_len={width_c}: raise them or pass "
            "another overflow"
        )
    if overflow == "drop":
        rows = [row for row, fit in zip(rows, fits, strict=True) if fit]
    prompts = [prompt[max(len(prompt) - width_p, 0) :] for _, prompt, _ in rows]
    prompt_lens = np.array([len(prompt) for prompt in prompts], np.int32)
    completion_lens = np.array([min(len(c.token_ids), width_c) for _, _, c in rows], np.int32)
    prompt_mask = np.arange(width_p)[None, :] >= width_p - prompt_lens[:, None]
    completion_mask = np.arange(width_c)[None, :] < completion_lens[:, None]
    prompt_ids = np.full(prompt_mask.shape, pad_id, np.int32)
    completion_ids = np.full(completion_mask.shape, pad_id, np.int32)
    logprobs = np.zeros(completion_mask.shape, np.float32)
    weight_versions = np.zeros(completion_mask.shape, np.int32)
    for i, (*_, c) in enumerate(rows):
        prompt_ids[i, prompt_mask[i]] = prompts[i]
        completion_ids[i, completion_mask[i]] = c.token_ids[:width_c]
        logprobs[i, completion_mask[i]] = c.token_logprobs[:width_c]
        for version, start, end in c.weight_versions:
            weight_versions[i, start : min(end, width_c)] = version
    ended = [c.finish_reason == "stop" and len(c.token_ids) <= width_c for *_, c in rows]
    kept = [
        (i, slice(0, width_c), c.sampling_mask, c.kept_logprobs) for i, (*_, c) in enumerate(rows)
    ]
    places = np.concatenate([prompt_mask, completion_mask], axis=1)
    before = [outs[group].prompt_routed_experts for group, _, _ in rows]
    before = [x if x is None else x[max(len(x) - width_p, 0) :] for x in before]
    parts = [(x, c.routed_experts) for x, (*_, c) in zip(before, rows, strict=True)]
    routes = route_arrays(list(zip(places, parts, strict=True)), places.shape[1])
    return (
        mask_arrays(kept, completion_mask.shape)
        | routes
        | {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "prompt_lens": prompt_lens,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "completion_lens": completion_lens,
            "logprobs": logprobs,
            "weight_versions": weight_versions,
            "group_ids": np.array([group for group, _, _ in rows], np.int32),
            "sample_index": np.array([c.index for _, _, c in rows], np.int32),
            "finished": np.array(ended, bool),
        }
    )


def route_arrays(
    rows: Sequence[tuple[np.ndarray, Sequence[np.ndarray | None]]], width: int
) -> dict[str, np.ndarray]:
    """Return routed_experts of sequences as a padded array; {} where none has any. rows: for each
    of them which of `width` places have a token, and what its tokens took, a part after the other.
    """
    known = [[x for x in parts if x is not None] for _, parts in rows]
    forms = {x.shape[1:] for parts in known for x in parts}
    if not forms:
        return {}
    if len(forms) > 1 or any(len(a) < len(b) for a, (_, b) in zip(known, rows, strict=True)):
        raise RequestError("some completions have routed_experts and others have none, or others")
    routes = np.full((len(rows), width, *forms.pop()), -1, np.int16)
    for route, (is_there, _), parts in zip(routes, rows, known, strict=True):
        route[is_there] = np.concatenate(parts)[: np.count_nonzero(is_there)]
    return {"routed_experts": routes}


def mask_arrays(
    rows: Sequence[tuple[int, slice, np.ndarray | None, np.ndarray | None]], shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return sampling_mask and kept_logprobs of completions as padded arrays; {} where none has
    any. rows: for each of them its row, its places, and what it has. shape: [rows, places].
    """
    widths = {None if ids is None else ids.shape[1] for _, _, ids, _ in rows}
    if widths <= {None}:
        return {}
    if None in widths:
        raise RequestError("some completions have a sampling_mask and others have none")
    masks = np.full((*shape, max(width or 0 for width in widths)), -1, np.int32)
    mass = np.zeros(shape, np.float32)
    for row, places, ids, kept in rows:
        assert ids is not None and kept is not None
        room = len(range(*places.indices(shape[1])))
        masks[row, places.start : places.start + len(ids), : ids.shape[1]] = ids[:room]
        mass[row, places.start : places.start + len(ids)] = kept[:room]
    return {"sampling_mask": masks, "kept_logprobs": mass}


def score_arrays(scores: Sequence[Scores], max_len: int | None = None) -> dict[str, np.ndarray]:
    """Return Scores as padded arrays, one row each (B), for a jitted training step.

    Place t is of what comes after token t: it lies where a model's own logits of padded sequences
    [B, L] do, and its token is that at t + 1. mask: bool [B, L], True where there is a score;
    logprobs float32 [B, L]; and as far as there are any top_ids int32 and top_logprobs float32 [B,
    L, K], at_logprobs float32 [B, L, K], entropy float32 [B, L]; zeros where masked. max_len: L;
    None is the longest there is. RequestError for a sequence that is longer, and where one has what
    another lacks.
    """
    stops = [one.start - 1 + len(one.logprobs) for one in scores]
    width = _width("max_len", max_len, stops)
    if max(stops, default=0) > width:
        raise RequestError(f"scores up to place {max(stops)} are over max_len={width}: raise it")
    arrays = {"mask": np.zeros((len(scores), width), bool)}
    for i, (one, stop) in enumerate(zip(scores, stops, strict=True)):
        places = slice(one.start - 1, stop)
        arrays["mask"][i, places] = True
        for name in ("logprobs", "top_ids", "top_logprobs", "at_logprobs", "entropy"):
            values = getattr(one, name)
            if (values is None) != (getattr(scores[0], name) is None) or (
                values is not None and values.shape[1:] != getattr(scores[0], name).shape[1:]
            ):
                raise RequestError(f"scores 0 and {i} have different {name}: ask the same of all")
            if values is not None:
                shape = (len(scores), width, *values.shape[1:])
                arrays.setdefault(name, np.zeros(shape, values.dtype))[i, places] = values
    return arrays


def _width(name: str, asked: int | None, lengths: list[int]) -> int:
    if asked is None:
        return max(lengths, default=0)
    check_whole(name, asked, 0)
    return int(asked)
