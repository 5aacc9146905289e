"""image_arrays: the images of prompts as arrays for a jitted training step, whose loss runs the
vision tower itself; and embeddings in place of tokens as they were passed.

Shapes beside those of jpaged/__init__.py: G prompts of P tokens at most, B rows of arrays, L tokens
of a row, R rows of embeddings, D layers after which something is added to them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jpaged.checks import check_whole
from jpaged.engine.spans import Piece, Span, Spans, rows_of
from jpaged.errors import ConfigError, RequestError
from jpaged.images.spans import Prepared, packed
from jpaged.models.config import ModelConfig
from jpaged.models.embedded import Embedded
from jpaged.models.forward import Forward
from jpaged.models.layers.linear import StepContext
from jpaged.models.params import Params
from jpaged.models.vision.tower import Patches
from jpaged.request.embeddings import EmbeddingSpan, spans_of
from jpaged.request.outputs import RequestOutput


class Trajectory(Protocol):
    """A Dialog, as far as its images go."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def embeddings(self) -> Mapping[int, EmbeddingSpan]: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageArrays:
    """What `logprobs` takes of the images of prompts, and of their embeddings: a pytree of arrays.

    lens_G: int32, tokens of each prompt, or of each dialog, turns too. row_GP: int32, for each of
    its tokens the row that stands in place of its embedding, -1 for a token of text. The rows are
    those that the tower makes of `patches`, each image once, and after them `rows`, f32 [N, 1 + D,
    E], of prompts that came with embeddings; None where there are none. axes_G3P, offset_G: int32,
    positions on three axes, and what they are ahead of the index after the prompt; None in a model
    without axes. ends_GP: int32, for each token of an image the position after it, else 0; None
    where nothing comes of it.
    """

    lens_G: Array
    row_GP: Array
    patches: Patches | None = None
    rows: Array | None = None
    axes_G3P: Array | None = None
    offset_G: Array | None = None
    ends_GP: Array | None = None

    def embedded(
        self, model: Forward, group_B: Array, lens_B: Array | None, length: int
    ) -> tuple[Embedded, Array | None]:
        """Return the embeddings of rows [B, L] of tokens whose first lens_B are of the prompts
        group_B, and their positions [3, B, L] on the axes, None where all are the index.

        A prompt that was cut has kept its right end. lens_B None: of the dialogs group_B, which
        have kept their left ends. ConfigError for a model without the tower.
        """
        if lens_B is None:
            lens_B = jnp.take(self.lens_G, group_B)
        rows, index_1L = self._rows(model), jnp.arange(length)[None]
        # The place in the whole prompt of each token.
        shift_B = (jnp.take(self.lens_G, group_B) - lens_B)[:, None]
        place_BL, is_prompt_BL = index_1L + shift_B, index_1L < lens_B[:, None]

        def of_prompts(table: Array, otherwise: Array | int) -> Array:
            known = jnp.take(table, group_B, axis=0)
            last = jnp.minimum(place_BL, table.shape[-1] - 1)
            return jnp.where(is_prompt_BL, jnp.take_along_axis(known, last, axis=-1), otherwise)

        ends = None
        if self.ends_GP is not None:
            ends = of_prompts(self.ends_GP, 0)
            ends = jnp.where(ends > 0, ends - shift_B, 0)
        embedded = Embedded(row=of_prompts(self.row_GP, -1), rows=rows, ends=ends)
        if self.axes_G3P is None or self.offset_G is None:
            return embedded, None
        behind_BL = place_BL + jnp.take(self.offset_G, group_B)[:, None]
        axes = [of_prompts(self.axes_G3P[:, axis], behind_BL) for axis in range(3)]
        return embedded, jnp.stack(axes)

    def _rows(self, model: Forward) -> Array:
        """Return all rows of embeddings [R, 1 + D, E]; those of images have their gradient."""
        parts: list[Array] = []
        if self.patches is not None:
            if model.vision is None:
                raise ConfigError(
                    "images: params without a vision tower: load_params(FOLDER, images=True) has it"
                )
            made = model.vision(self.patches, StepContext())
            deep = () if made.deepstack_JRE is None else tuple(made.deepstack_JRE)
            parts.append(jnp.stack([made.rows_RE, *deep], axis=1))
        if self.rows is not None:
            parts.append(self.rows)
        widest = max(part.shape[1] for part in parts)
        dtype = jnp.result_type(*parts)
        padded = [
            jnp.pad(part.astype(dtype), ((0, 0), (0, widest - part.shape[1]), (0, 0)))
            for part in parts
        ]
        return jnp.concatenate(padded)


def image_arrays(
    model: Params | ModelConfig,
    outs: Sequence[RequestOutput | Trajectory],
    *,
    max_prompt_len: int | None = None,
    max_rows: int | None = None,
) -> ImageArrays:
    """Return the images of outputs' prompts for `logprobs(params, to_arrays(outs), images=)`, or
    those of dialogs for `logprobs(params, dialog_arrays(dialogs), images=)`.

    Images are there as patches, each once, from which the loss makes rows of embeddings by the
    tower of the params that it differentiates; embeddings that a caller has passed are constants.
    max_prompt_len: P, of dialogs of their whole length; None is the longest. max_rows: rows of
    embeddings of all images, and of all embeddings, that a step is compiled for; None is the least
    power of two. RequestError for outputs without any, and for what does not fit.
    """
    config = model.config if isinstance(model, Params) else model
    lens = [
        len(out.prompt_token_ids if isinstance(out, RequestOutput) else out.token_ids)
        for out in outs
    ]
    width = max(lens, default=0)
    if max_prompt_len is not None:
        check_whole("max_prompt_len", max_prompt_len, 1)
        if width > max_prompt_len:
            raise RequestError(f"a prompt of {width} tokens is over {max_prompt_len=}: raise it")
        width = max_prompt_len
    spans = [
        None if out.embeddings is None else spans_of(out.embeddings, count, config)
        for out, count in zip(outs, lens, strict=True)
    ]
    every = [span for of_prompt in spans if of_prompt is not None for span in of_prompt]
    if not every:
        raise RequestError("no prompt of these outputs has images or embeddings: pass no images=")
    known = {span.digest: span for span in every}
    images = {digest: x for digest, x in known.items() if x.image is not None}
    passed = {digest: x for digest, x in known.items() if x.image is None}
    most, rest = (_most(x, max_rows) for x in (images, passed))
    firsts = _firsts(images, 0) | _firsts(passed, most)
    row_GP = np.full((len(outs), width), -1, np.int32)
    for row, of_prompt in zip(row_GP, spans, strict=True):
        for span in of_prompt or ():
            row[span.start : span.end] = firsts[span.digest] + np.arange(len(span))
    arrays = {"lens_G": np.array(lens, np.int32), "row_GP": row_GP}
    patches = None
    if images:
        assert config.vision is not None, "spans_of has seen that it has one"
        prepared = [x.image for x in images.values() if isinstance(x.image, Prepared)]
        patches = packed(prepared, config.vision, most)
    if passed:
        arrays["rows"] = _passed_rows(list(passed.values()), config, rest)
    if config.has_axes:
        arrays |= _axes(spans, lens, width)
    if config.sees_images:
        ends = np.zeros_like(row_GP)
        for row, of_prompt in zip(ends, spans, strict=True):
            if of_prompt is not None:
                of_prompt.write_ends(row, 0)
        arrays["ends_GP"] = ends
    return ImageArrays(patches=patches, **arrays)  # pyright: ignore[reportArgumentType]


def _most(spans: dict[bytes, Span], max_rows: int | None) -> int:
    """Return for how many rows of spans a step is compiled; 0 where there are none."""
    total = sum(map(len, spans.values()))
    if not total or max_rows is None:
        return 1 << (total - 1).bit_length() if total else 0
    check_whole("max_rows", max_rows, 1)
    if total > max_rows:
        raise RequestError(f"{total} rows of embeddings are over {max_rows=}: raise it")
    return max_rows


def _firsts(spans: dict[bytes, Span], start: int) -> dict[bytes, int]:
    """Return the first row of each span, of those that lie one after another from `start` on."""
    firsts: dict[bytes, int] = {}
    for digest, span in spans.items():
        firsts[digest] = start
        start += len(span)
    return firsts


def _passed_rows(spans: list[Span], config: ModelConfig, most: int) -> np.ndarray:
    pieces = [Piece(0, span, 0, len(span)) for span in spans]
    rows = rows_of(pieces, config.num_deepstack, np.float32)
    return np.pad(rows, ((0, most - len(rows)), (0, 0), (0, 0)))


def _axes(spans: list[Spans | None], lens: list[int], width: int) -> dict[str, np.ndarray]:
    """Return positions on the three axes, and what they are ahead of the index afterwards."""
    axes = np.tile(np.arange(width, dtype=np.int32), (len(spans), 3, 1))
    offset = np.zeros(len(spans), np.int32)
    for i, (of_prompt, count) in enumerate(zip(spans, lens, strict=True)):
        if of_prompt is not None:
            of_prompt.write_positions(axes[i, :, :count], 0)
            offset[i] = of_prompt.offset
    return {"axes_G3P": axes, "offset_G": offset}
