"""EmbeddingSpan: embeddings that a prompt has in place of some of its tokens, and their checks."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.checks import is_scalar
from jpaged.engine.spans import Span, Spans
from jpaged.errors import RequestError
from jpaged.images.spans import Prepared, rows_grid
from jpaged.models.config import ModelConfig


@dataclasses.dataclass(eq=False, frozen=True)
class EmbeddingSpan:
    """Embeddings [n, E] in place of n tokens of a prompt, numpy or jax floats, as the first layer
    takes them: a model that scales the embeddings of its tokens does not scale these.

    grid: (frames, rows, columns) of the image or video that they are of, frame by frame and row by
    row, after a tower has merged its patches: n in all. Positions of models with three axes go by
    it, and what tokens of one image see of each other; None is a run of text. deepstack: [layers,
    n, E], what is added to them after each of the first layers, of a model that has such; None adds
    nothing. digest: names what they are of, as a hash of its pixels, in place of a hash of the
    numbers: cached prefixes are shared where digests, grids and places are equal. time_interval:
    how far the frames of a video are from each other on the time axis, on which Qwen2.5-VL has
    seconds (tokens_per_second of its config times the seconds between two frames of the grid).

    In an output whose prompt had images, `embeddings` of these are what the tower takes (Prepared),
    and an engine with images=True encodes them again, or not, as it does those of any prompt.
    """

    embeddings: Any
    _: dataclasses.KW_ONLY
    grid: tuple[int, int, int] | None = None
    deepstack: Any = None
    digest: bytes | str | None = None
    time_interval: float = 1.0


def spans_of(embeddings: object, num_tokens: int, model: ModelConfig) -> Spans | None:
    """Return the spans of a prompt of so many tokens; None where there are none. embeddings: by the
    positions that they begin at, arrays [n, E] or EmbeddingSpans. Raises RequestError.
    """
    if not isinstance(embeddings, Mapping):
        kind = type(embeddings).__name__
        raise RequestError(f"embeddings of type {kind}: pass a dict of positions and arrays [n, E]")
    spans, end = list[Span](), 0
    for position in embeddings:
        if not is_scalar(position) or position < 0:
            raise RequestError(f"embeddings at {position!r}: must be a position in the prompt")
    for position in sorted(embeddings):
        start, value = int(position), embeddings[position]
        span = value if isinstance(value, EmbeddingSpan) else EmbeddingSpan(value)
        if start < end:
            raise RequestError(f"embeddings at {start}: the span before them ends at {end}")
        spans.append(_span(start, span, model))
        end = spans[-1].end
        if end > num_tokens:
            raise RequestError(
                f"{len(spans[-1])} embeddings at {start}: the prompt has {num_tokens} tokens"
            )
    if not spans:
        return None
    return Spans(tuple(spans), num_tokens, has_axes=model.has_axes, are_whole=model.sees_images)


def as_mapping(spans: Spans) -> dict[int, EmbeddingSpan]:
    """Return what `spans_of` makes equal spans of."""
    return {
        span.start: EmbeddingSpan(
            span.embeddings if span.image is None else span.image,
            grid=span.grid,
            deepstack=span.deepstack,
            digest=span.named,
            time_interval=span.time_interval,
        )
        for span in spans
    }


def _span(start: int, value: EmbeddingSpan, model: ModelConfig) -> Span:
    place, width, layers = f"embeddings at {start}", model.hidden_size, model.num_deepstack
    if isinstance(value.embeddings, Prepared):
        return _of_image(start, value.embeddings, model)
    rows = _floats(value.embeddings, place)
    if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
        shape = list(rows.shape)
        raise RequestError(f"{place} are {shape}: must be [n, {width}], the model's hidden_size")
    count, extra = len(rows), None
    if value.deepstack is not None:
        extra = _floats(value.deepstack, f"deepstack of {place}")
        if not layers:
            raise RequestError(f"deepstack of {place}: this model adds nothing after its layers")
        if extra.shape != (layers, count, width):
            wanted = [layers, count, width]
            raise RequestError(
                f"deepstack of {place} is {list(extra.shape)}: must be {wanted}, by the model's "
                "num_deepstack"
            )
    grid = _grid(value.grid, count, place)
    named = value.digest.encode() if isinstance(value.digest, str) else value.digest
    if named is not None and not (isinstance(named, bytes) and named):
        raise RequestError(f"digest={value.digest!r} of {place}: must be bytes or a str")
    interval = value.time_interval
    is_number = isinstance(interval, int | float) and not isinstance(interval, bool)
    if not is_number or not 0 <= interval < 2**16:
        raise RequestError(
            f"time_interval={interval!r} of {place}: must be a number of at least 0, below 65536"
        )
    return Span(
        start=start,
        embeddings=rows,
        deepstack=extra,
        grid=grid,
        named=named,
        digest=_digest(rows, extra, grid, named, float(interval)),
        time_interval=float(interval),
    )


def _of_image(start: int, image: Prepared, model: ModelConfig) -> Span:
    """Return the span of an image that is encoded later."""
    if model.vision is None or image.patches.shape[1:] != (model.vision.num_features,):
        raise RequestError(
            f"embeddings at {start}: an image of another model than this one, or of one without "
            "its vision tower"
        )
    grid = rows_grid(image.grid, model.vision)
    return Span(
        start=start,
        embeddings=None,
        grid=grid,
        digest=image.digest,
        image=image,
        time_interval=image.time_interval,
    )


def _floats(value: object, what: str) -> np.ndarray:
    """Return an array of floats on the host that nobody writes to; RequestError where it is none,
    or not of finite numbers.
    """
    is_array = isinstance(value, np.ndarray | jax.Array)
    if not is_array or not jnp.issubdtype(value.dtype, jnp.floating):
        kind = f"an array of {value.dtype}" if is_array else f"of type {type(value).__name__}"
        raise RequestError(f"{what}: {kind}; pass a numpy or jax array of floats")
    array = np.asarray(jax.device_get(value))
    if not np.isfinite(array.astype(np.float32, copy=False)).all():
        raise RequestError(f"{what}: not all are finite numbers")
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


def _grid(grid: object, count: int, place: str) -> tuple[int, int, int] | None:
    if grid is None:
        return None
    if not isinstance(grid, tuple | list) or len(grid) != 3 or not all(map(is_scalar, grid)):
        raise RequestError(f"grid={grid!r} of {place}: must be (frames, rows, columns)")
    frames, rows, columns = (int(x) for x in grid)
    if min(frames, rows, columns) < 1 or frames * rows * columns != count:
        raise RequestError(f"grid={grid!r} of {place}: must hold {count} embeddings")
    return frames, rows, columns


def _digest(
    rows: np.ndarray,
    extra: np.ndarray | None,
    grid: tuple[int, int, int] | None,
    named: bytes | None,
    interval: float,
) -> bytes:
    """Return a hash of all that the keys and values of a span's tokens depend on."""
    form = repr((rows.shape, str(rows.dtype), extra is None, grid, named is None))
    form += "" if interval == 1.0 else repr(interval)
    digest = hashlib.blake2b(form.encode(), digest_size=32)
    if named is not None:
        digest.update(named)
    else:
        digest.update(rows.tobytes())
        digest.update(b"" if extra is None else extra.tobytes())
    return digest.digest()
