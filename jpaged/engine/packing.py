"""Plan -> Batch: one int32 buffer padded to its StepShapes, and back: what the step returns ->
StepResult.

Floats and uint32 travel as their bits. numpy ends here; jax begins at the runner.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.adapters import Loads
from jpaged.engine.cache.kinds import Replay
from jpaged.engine.layout import (
    CONTROLS,
    INT32_MAX,
    input_sections,
    is_float,
    output_sections,
)
from jpaged.engine.masks import ALL, prompt_masks
from jpaged.engine.plan import Plan, PlanEntry, StepResult
from jpaged.engine.sequence import Sequence
from jpaged.engine.shapes import (
    DecodeShape,
    DraftShape,
    PrefillShape,
    ReplayShape,
    SampleShape,
    Shape,
    StepShapes,
    choose_shapes,
)
from jpaged.engine.spans import Piece
from jpaged.sampling_params import LOGPROBS_MODES

ON_DEVICE = -1  # among the tokens of a step: the last one that the device's row drew
PAD_TOKEN = np.int32(INT32_MAX)  # in id lists: past any vocabulary, so a scatter drops it

Views = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """What one step uploads: `packed` (int32 [n], laid out by input_sections), blocks that must be
    copied before it, and device rows whose counts must be set.

    bucket: the shape of a prefill, decode or draft. sample: that of the draw after it, None where
    no row draws or where the step draws itself. num_tokens, num_rows: without padding, num_rows of
    those that draw.
    steps: that a decode runs at most. copies: int32 [groups, rows, 2], pairs of a source and a
    target, or None; one whose blocks are the same ends a group's. loads: of adapters, before it.
    counts: (device row, token ids, prompt length) of rows with penalties that were just admitted.
    masks_TW: of prompts that are scored under masks, a bit a token for what comes after each.
    embedded: parts of spans of embeddings, which are put into the first rows of their pool first.
    parts: of a step of several replicas (see `join`), the batch of each.
    """

    bucket: PrefillShape | DecodeShape | DraftShape
    sample: SampleShape | None
    packed: np.ndarray
    num_tokens: int
    num_rows: int
    steps: int = 1
    copies: np.ndarray | None = None
    loads: Loads = ()
    counts: tuple[tuple[int, list[int], int], ...] = ()
    masks_TW: np.ndarray | None = None
    embedded: tuple[Piece, ...] = ()
    parts: tuple["Batch", ...] = ()

    @property
    def each(self) -> tuple["Batch", ...]:
        """One Batch a replica: `parts`, or this batch alone if there is only one."""
        return self.parts or (self,)

    @property
    def drawing(self) -> Shape | None:
        """Return the shape of the step that draws tokens, None where no row draws."""
        return self.bucket if self.bucket.sampler is not None else self.sample

    @property
    def padded_tokens(self) -> int:
        return self.bucket.tokens * self.steps * len(self.each)


def pack(plan: Plan, config: EngineConfig, buckets: StepShapes | None = None) -> Batch:
    """Lay a plan out in the one buffer of its shape. Padding rows have no tokens, no context and
    no device row.

    buckets: larger ones than the plan's own; it may then have no entries.
    """
    bucket, sample = buckets or choose_shapes(plan, config)
    packed, view = _views(bucket, config)
    computed = [e for e in plan.entries if e.num_tokens]
    drawing = [e for e in plan.entries if e.draws]
    num_draws = plan.num_draws
    _pack_tables(view, computed)
    if bucket.loras:
        _pack_adapters(view, computed, config)
    embedded: tuple[Piece, ...] = ()
    if config.max_embeddings:
        embedded = _pack_spans(view, computed)
    if bucket.phase != "prefill":
        rows = len(drawing)
        view["context_lens"][:rows] = [e.start + 1 for e in drawing]  # of the first step
        view["tokens"][:rows] = [_input_token(e) for e in drawing]
        if sample is None:
            view["steps"][:rows] = [e.draws for e in drawing]
            _pack_rows(view, [(e, e.start + 1) for e in drawing], config)
        else:
            _pack_device_rows(view, drawing, config)
    else:
        view["context_lens"][: len(computed)] = [e.start + e.num_tokens for e in computed]
        _pack_tokens(view, plan, config)
    if sample is not None:
        _, rows_view = _views(sample, config, view["sample"])
        # What follows each token of a run is drawn; the row of the device keeps the last of it.
        after = [(e, e.start + e.num_tokens) for e in drawing]
        if num_draws > len(drawing):
            after = [(e, e.end - i) for e in drawing for i in reversed(range(e.num_draws))]
        rows_view["context_lens"][:num_draws] = [length for _, length in after]
        _pack_rows(rows_view, after, config)
        for row, (entry, length) in enumerate(after if num_draws > len(drawing) else ()):
            if length < entry.end:
                rows_view["device_rows"][row] = config.num_rows
    scores_masked = isinstance(bucket, PrefillShape) and bucket.scores_masked
    admitted = [e.seq for e in plan.entries if e.is_new and e.seq.sampling_params.has_penalties]
    return Batch(
        bucket=bucket,
        sample=sample,
        packed=packed,
        num_tokens=plan.num_tokens,
        num_rows=num_draws,
        steps=max([e.draws for e in drawing], default=1) if bucket.phase != "prefill" else 1,
        copies=_pack_copies(plan, config) if any(plan.copies) else None,
        loads=plan.loads,
        counts=tuple([(seq.device_row, list(seq.token_ids), seq.prompt_len) for seq in admitted]),
        masks_TW=prompt_masks(plan, bucket.tokens) if scores_masked else None,
        embedded=embedded,
    )


def join(parts: list[Batch], config: EngineConfig) -> Batch:
    """Return one step of several replicas, whose batches are of the same buckets: their buffers one
    after the other.
    """
    copies = None
    if any(part.copies is not None for part in parts):
        groups = next(len(part.copies) for part in parts if part.copies is not None)
        none = _no_copies(groups, config)
        copies = np.concatenate([none if p.copies is None else p.copies for p in parts])
    masks_TW = None
    if (some := next((p.masks_TW for p in parts if p.masks_TW is not None), None)) is not None:
        every = np.full_like(some, ALL)
        masks_TW = np.concatenate([every if p.masks_TW is None else p.masks_TW for p in parts])
    return Batch(
        bucket=parts[0].bucket,
        sample=parts[0].sample,
        packed=np.concatenate([part.packed for part in parts]),
        num_tokens=sum(part.num_tokens for part in parts),
        num_rows=sum(part.num_rows for part in parts),
        steps=max(part.steps for part in parts),
        copies=copies,
        masks_TW=masks_TW,
        parts=tuple(parts),
    )


def pack_replays(
    replays: list[list[Replay]], shape: ReplayShape, config: EngineConfig
) -> np.ndarray:
    """Lay out a round of replays, a list for each replica. Padding has no tokens and no blocks."""
    parts = list[np.ndarray]()
    for of_replica in replays:
        packed, view = _views(shape, config)
        view["read_blocks"][:], view["written_blocks"][:] = -1, -1
        end = 0
        for row, replay in enumerate(of_replica):
            first, end = end, end + replay.num_tokens
            view["query_start_loc"][row] = first
            view["places"][first:end] = range(replay.place, replay.place + replay.num_tokens)
            view["starts"][row] = replay.start
            view["read_blocks"][:, row] = replay.read
            view["written_blocks"][:, row] = replay.written
        view["query_start_loc"][len(of_replica) :] = end
        parts.append(packed)
    return np.concatenate(parts)


def _no_copies(groups: int, config: EngineConfig) -> np.ndarray:
    assert config.seq_buckets is not None
    # A row writes one block of each group, so it needs one copy at most.
    return np.zeros((groups, config.seq_buckets[-1], 2), np.int32)


def _pack_copies(plan: Plan, config: EngineConfig) -> np.ndarray:
    packed = _no_copies(len(plan.copies), config)
    for at, copies in enumerate(plan.copies):
        if copies:
            packed[at, : len(copies)] = copies
    return packed


def _input_token(entry: PlanEntry) -> int:
    """Return the token that a row decodes from; ON_DEVICE if it is still in flight and not certain,
    so that the device alone knows it.
    """
    if entry.run:
        return entry.run[0]
    tokens = entry.seq.token_ids
    return tokens[entry.start] if entry.start < len(tokens) else ON_DEVICE


def _pack_tables(view: Views, computed: list[PlanEntry]) -> None:
    for at, tables in enumerate(view["block_tables"]):
        width = tables.shape[1] * tables.itemsize
        # Padded as bytes and joined: an assignment to an array for each row takes four times as
        # long.
        rows = [e.seq.block_tables[at].tobytes().ljust(width, b"\0") for e in computed]
        tables[: len(rows)] = _from_rows(rows, tables.shape[1])
        for row, entry in enumerate(computed):
            if first := entry.seq.first_held[at]:
                tables[row, :first] = 0  # what the window has left: a block that exists


def _from_rows(rows: list[bytes], width: int) -> np.ndarray:
    """Return an int32 array [rows, width] of the bytes of each row."""
    return np.frombuffer(b"".join(rows), np.int32).reshape(len(rows), width)


def unpack(
    batch: Batch, config: EngineConfig, packed: list[np.ndarray], *, weight_version: int
) -> list[StepResult]:
    """Return the result of each replica from the output buffers of a step.

    packed: the buffer of the step that drew, if any row did, then that of a prefill that scored its
    prompts. weight_version: of the weights that drew.
    """
    shapes = dict.fromkeys([s for s in (batch.drawing, batch.bucket) if s is not None])
    laid_out = [layout for s in shapes if (layout := output_sections(s, config))[1]]
    results = []
    for replica, part in enumerate(batch.each):
        views: Views = {"num_drawn": np.zeros(0, np.int32)}
        views["tokens"] = views["logprobs"] = np.zeros((1, 0), np.int32)
        for (sections, size), buffer in zip(laid_out, packed, strict=True):
            for name, (offset, shape) in sections.items():
                first = replica * size + offset
                view = buffer[first : first + math.prod(shape)].reshape(shape)
                views[name] = view.view(np.float32) if is_float(name) else view
        rows = part.num_rows
        rest: dict[str, Any] = {**views}
        result = StepResult(
            weight_version=weight_version,
            num_drawn=rest.pop("num_drawn")[:rows].tolist(),
            tokens=rest.pop("tokens")[:, :rows].T.tolist(),
            logprobs=rest.pop("logprobs")[:, :rows].T.tolist(),
            **rest,
        )
        results.append(result)
    return results


def _views(
    bucket: Shape, config: EngineConfig, packed: np.ndarray | None = None
) -> tuple[np.ndarray, Views]:
    """Return a buffer of a bucket's inputs and a view of each input in it. packed: the buffer; None
    makes one of zeros.
    """
    sections, size = input_sections(bucket, config)
    packed = np.zeros(size, np.int32) if packed is None else packed
    return packed, {
        n: packed[s.offset : s.offset + math.prod(s.shape)].reshape(s.shape)
        for n, s in sections.items()
    }


def _pack_tokens(view: Views, plan: Plan, config: EngineConfig) -> None:
    """Write the tokens back to back, where each row begins, and the place of the last token of each
    row that draws.
    """
    start, starts, indices, computed, scored = 0, [], [], [], 0
    if "routes" in view:
        view["routes"][:] = -1
    for entry in plan.entries:
        seq = entry.seq
        if entry.num_tokens:
            end = start + entry.num_tokens
            if entry.run:
                view["tokens"][start:end] = entry.run
            elif entry.decodes:
                view["tokens"][start] = _input_token(entry)
            else:
                past = entry.start + entry.num_tokens
                view["tokens"][start:end] = seq.token_ids[entry.start : past]
            if seq.scoring is not None and seq.scoring.routed is not None:
                taken = seq.scoring.routed[entry.start : entry.start + entry.num_tokens]
                view["routes"][start:end] = taken.reshape(len(taken), -1)
            if "targets" in view and (positions := entry.scored):
                _pack_scored(view, entry, positions, start, scored, len(starts))
                scored += len(positions)
            if entry.guesses:
                view["guesses"][len(starts)] = 1
            starts.append(start)
            computed.append(entry)
            start = end
        indices += range(start - (len(entry.run) or entry.draws > 0), start)
    view["query_start_loc"][: len(starts)] = starts
    view["query_start_loc"][len(starts) :] = start
    view["logits_indices"][: len(indices)] = indices
    if "num_scored" in view:
        view["num_scored"][0] = scored
    _pack_device_rows(view, computed, config)


def _pack_scored(
    view: Views, entry: PlanEntry, positions: range, place: int, row: int, step_row: int
) -> None:
    """Say what is scored at these positions of an entry. place: of its first token among the packed
    ones. row: the first of those that are scored. step_row: the entry's among those of the step.
    """
    seq, rows = entry.seq, slice(row, row + len(positions))
    first = place + positions.start - entry.start
    view["scored"][rows] = range(first, first + len(positions))
    view["targets"][rows] = seq.token_ids[positions.start + 1 : positions.stop + 1]
    view["scoring"].view(np.float32)[step_row, 0] = seq.sampling_params.divisor
    view["scoring"][step_row, 1] = LOGPROBS_MODES.index(seq.sampling_params.logprobs_mode)
    if seq.scoring is not None and seq.scoring.candidates is not None:
        at = positions.start - seq.scoring.first
        candidates = seq.scoring.candidates[at : at + len(positions)]
        view["candidates"][rows, : candidates.shape[1]] = candidates


def _pack_spans(view: Views, entries: list[PlanEntry]) -> tuple[Piece, ...]:
    """Write which tokens have embeddings in their place, and the positions that follow of that.
    Return the parts of spans in the order of their rows in the pool.
    """
    if "offsets" in view:
        offsets = [0 if e.seq.spans is None else e.seq.spans.offset for e in entries]
        view["offsets"][: len(offsets)] = offsets
        return ()
    view["embedded"][:] = -1
    pieces, place, row = list[Piece](), 0, 0
    for entry in entries:
        start, spans = entry.start, entry.seq.spans
        tokens = slice(place, place + entry.num_tokens)
        place = tokens.stop
        if spans is None:
            view["axes"][:, tokens] = np.arange(start, entry.end)
            continue
        spans.write_positions(view["axes"][:, tokens], start)
        spans.write_ends(view["ends"][tokens], start)
        for piece in spans.pieces(start, entry.end):
            at = tokens.start + piece.place
            view["embedded"][at : at + piece.size] = range(row, row + piece.size)
            pieces.append(piece)
            row += piece.size
    return tuple(pieces)


def _pack_adapters(view: Views, entries: list[PlanEntry], config: EngineConfig) -> None:
    none = config.max_loras
    slots = [e.seq.adapter_slot for e in entries]
    view["adapters"][: len(slots)] = [none if at is None else at for at in slots]
    view["adapters"][len(slots) :] = none


def _pack_device_rows(view: Views, entries: list[PlanEntry], config: EngineConfig) -> None:
    view["device_rows"][: len(entries)] = [e.seq.device_row for e in entries]
    view["device_rows"][len(entries) :] = config.num_rows  # past the end: dropped


def _pack_rows(view: Views, draws: list[tuple[PlanEntry, int]], config: EngineConfig) -> None:
    """Write what drawing needs of each row, after a context of so many tokens."""
    rows, drawing = len(draws), [entry for entry, _ in draws]
    _pack_device_rows(view, drawing, config)
    if "adapters" in view:
        _pack_adapters(view, drawing, config)
    if "follows" in view:  # not where the decode draws itself
        view["follows"][:rows] = [e.decodes and _input_token(e) == ON_DEVICE for e in drawing]
    seqs = [entry.seq for entry in drawing]
    for seq in [seq for seq in seqs if seq.controls is None]:
        seq.controls = _pack_controls(seq, config)
    controls = view["controls"]
    controls[:rows] = _from_rows([seq.controls for seq in seqs], controls.shape[1])
    if "bias" not in view:  # nor has any row min_tokens
        return
    view["bias_ids"][:] = PAD_TOKEN
    for row, (entry, length) in enumerate(draws):
        seq = entry.seq
        # So many tokens of output come before the first one drawn now. A mask says it by itself.
        if seq.sampling_params.min_tokens and seq.structured is None:
            left = seq.sampling_params.min_tokens - (length - seq.prompt_len)
            view["open_after"][row] = min(max(left, 0), INT32_MAX)
        if bias := seq.sampling_params.logit_bias:
            view["bias_ids"][row, : len(bias)] = list(bias)
            view["bias"].view(np.float32)[row, : len(bias)] = list(bias.values())


def _pack_controls(seq: Sequence, config: EngineConfig) -> bytes:
    """Return a row of CONTROLS and the ids that stop it, int32."""
    # Where there are more than fit, the host alone sees the others; with min_tokens they always
    # fit.
    columns = [int(np.asarray(c.read(seq), c.dtype).view(np.int32)) for c in CONTROLS]
    stops = sorted(seq.eos_ids | seq.stop_ids)[: config.max_stop_ids]
    padding = [PAD_TOKEN] * (config.max_stop_ids - len(stops))
    return np.array([*columns, *stops, *padding], np.int32).tobytes()
