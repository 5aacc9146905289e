"""Weight: one parameter on its way from a file, or from a trainer's array, to the array that a step
takes.

Whoever holds weights makes Weights of them: checkpoint readers of the pieces of files,
runtime.weights of a caller's tree. runtime.placing turns each into its array on the devices, one
after another: nothing of a file is read before that.
"""

import contextlib
import dataclasses
import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jpaged.combinations import Facts, check_combination
from jpaged.errors import CheckpointError
from jpaged.models.param_spec import ParamSpec, tokens_of
from jpaged.models.quantized import FORMS, QuantizedWeight, WeightForm, is_quantized

type Index = tuple[slice, ...]

CACHE_LINE, HUGE_PAGE = 64, 2 << 20  # bytes
WHOLE = PartitionSpec()  # on every device


class Piece(NamedTuple):
    """A stored tensor and the part of a canonical tensor that it fills.

    canonical[fills] takes the tensor's elements in C order. dtype: of plain elements. read: fills a
    view of that part and casts to its dtype. view: returns an array of a shape, an index of which
    reads only what it selects. quantized: returns what the file holds in 8 or 4 bits, as a
    QuantizedWeight [outputs, inputs] of numpy arrays; None where the tensor is plain.
    """

    dtype: np.dtype
    read: Callable[[np.ndarray], None]
    view: Callable[[tuple[int, ...]], Any]
    fills: Index = ()
    quantized: Callable[[], QuantizedWeight] | None = None


@dataclasses.dataclass(frozen=True)
class Change:
    """What the values of a canonical tensor go through on the way to the served one.

    Compared by value, so that a function compiled for one weight version serves the next as well.
    axes: as ParamSpec spells them. repeats: how often each KV head is held. rows: how many rows of
    padding follow the vocabulary. dtype: what the values are cast to.
    """

    axes: tuple[str, ...]
    dtype: str
    repeats: int
    rows: int

    @classmethod
    def of(cls, spec: ParamSpec, served: ParamSpec, dtype: Any) -> Self:
        """Return the change of one parameter. served: its spec in the served model."""

        def size(spec: ParamSpec, letter: str) -> int:
            return spec.shape_of(letter)[0]

        return cls(
            axes=tuple(tokens_of(spec.axes)),
            dtype=str(jnp.dtype(dtype)),
            repeats=size(served, "K") // size(spec, "K") if spec.split == "K" else 1,
            rows=size(served, "V") - size(spec, "V") if spec.split == "V" else 0,
        )

    def is_needed(self, leaf: Any) -> bool:
        """Return whether it changes anything in an array."""
        return self.repeats > 1 or self.rows > 0 or str(leaf.dtype) != self.dtype

    def __call__(self, leaf: Any) -> Any:
        """Return the served values: a new numpy array of a numpy array, a jax one of a jax one."""
        xp = jnp if isinstance(leaf, jax.Array) else np
        out = leaf.astype(self.dtype)
        if self.repeats > 1:
            out = self._repeated(out, xp)
        if self.rows:
            axis = self.axes.index("V")
            widths = [(0, self.rows if i == axis else 0) for i in range(out.ndim)]
            out = xp.pad(out, widths)
        return out

    def _repeated(self, x: Any, xp: Any) -> Any:
        """Repeat each KV head and deal its query heads out to the copies in order."""
        axis = self.axes.index("K")
        *queries, others = self.axes[axis + 1].split("+")  # "G", "G+2", or with gates "G+G+2"
        if "G" not in (*queries, others):
            return xp.repeat(x, self.repeats, axis=axis)
        num_query = x.shape[axis + 1] - (int(others) if others.isdecimal() else 0)
        q, kv = xp.split(x, [num_query], axis=axis + 1)
        dealt = (x.shape[axis] * self.repeats, num_query // self.repeats)
        q = q.reshape(*x.shape[:axis], *dealt, *x.shape[axis + 2 :])
        return xp.concatenate([q, xp.repeat(kv, self.repeats, axis=axis)], axis=axis + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter: what it is, where its values are, and what it is to become.

    spec: the canonical parameter. source: its values, as a jax or numpy array, as a QuantizedWeight
    of either, or as the pieces of a checkpoint.

    served: the parameter of the model that it becomes one of (see models.served); None: the
    canonical parameter itself. dtype: what plain values are cast to and what a QuantizedWeight
    stands for; None: the source's. form: what plain values are quantised to; None: they stay plain.
    keeps_form: values that a file holds in 8 or 4 bits stay so where they can. split: how it lies
    on a mesh. folder: where its pieces are, for messages. is_buffer: `read` made the source, so
    that nobody else will change or delete it. interleaved: how it is to lie in 8 or 4 bits (see
    models.served.in_order). keeps_order: a QuantizedWeight that lies in rows stays so all the same.
    """

    spec: ParamSpec
    source: Any
    served: ParamSpec | None = None
    dtype: Any = None
    form: WeightForm | None = None
    keeps_form: bool = True
    split: PartitionSpec = WHOLE
    folder: Path | None = None
    is_buffer: bool = False
    interleaved: bool = False
    keeps_order: bool = True

    @property
    def name(self) -> str:
        """Its name in the canonical tree: "layers.0.attention.qkv"."""
        return self.spec.at(self.spec.name)

    @property
    def num_outputs(self) -> int:
        """How many of its axes are outputs; they come first."""
        return len(self.spec.sides[0])

    @property
    def is_stored(self) -> bool:
        """Whether its values are in files."""
        return isinstance(self.source, tuple)

    @property
    def source_dtype(self) -> np.dtype:
        """The dtype of its values; float32 if its pieces differ in theirs."""
        if not self.is_stored:
            return jnp.dtype(self.source.dtype)
        dtypes = {piece.dtype for piece in self.source}
        return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    @property
    def wanted_dtype(self) -> np.dtype:
        """The dtype that it is served in."""
        if self.spec.in_f32:
            return np.dtype(np.float32)
        return self.source_dtype if self.dtype is None else jnp.dtype(self.dtype)

    @property
    def change(self) -> Change:
        """What plain values go through."""
        return Change.of(self.spec, self.served or self.spec, self.wanted_dtype)

    def check(self) -> None:
        """ConfigError if its values are in 8 or 4 bits and cannot be served as they are."""
        if not is_quantized(self.source):
            return
        stored, change = self.source.form.name, self.change
        check_combination(
            Facts(
                weight=self.name,
                form=stored,
                served_form=stored if self.form is None else self.form.name,
                is_rearranged=change.repeats > 1 or bool(change.rows),
            )
        )

    # What pieces of files hold

    def read(self) -> "Weight":
        """Return the same weight with its pieces read into numpy arrays, in the dtype that it is
        served in. CheckpointError where the files are damaged.
        """
        keeps_form = self.keeps_form and not self.spec.is_always_plain
        if keeps_form and (kept := self._read_quantized()) is not None:
            if not kept.is_finite():
                raise CheckpointError(
                    f"{self.folder}: {self.name} holds a value in {kept.form.name} that is not "
                    "finite"
                )
            return dataclasses.replace(self, source=kept, is_buffer=True, keeps_order=False)
        buffer = aligned(self.spec.shape, self.wanted_dtype)
        for piece in self.source:
            piece.read(buffer[piece.fills])
        return dataclasses.replace(self, source=buffer, is_buffer=True)

    def read_share(self, index: Index) -> np.ndarray:
        """Return canonical[index] in the dtype that it is served in; nothing else is read."""
        shape = self.spec.shape
        wanted = [range(*part.indices(n)) for part, n in zip(index, shape, strict=True)]
        out = np.empty([len(part) for part in wanted], self.wanted_dtype)
        for piece in self.source:
            slices = (*piece.fills, *[slice(None)] * (len(shape) - len(piece.fills)))
            filled = [range(*part.indices(n)) for part, n in zip(slices, shape, strict=True)]
            both = [
                (max(a[0], b[0]), min(a[-1], b[-1]) + 1)
                for a, b in zip(wanted, filled, strict=True)
            ]
            if all(first < end for first, end in both):
                taken, into = (
                    tuple(
                        slice(first - part[0], end - part[0])
                        for (first, end), part in zip(both, ranges, strict=True)
                    )
                    for ranges in (filled, wanted)
                )
                store(self.name, piece.view(tuple(map(len, filled)))[taken], out[into])
        return out

    def _read_quantized(self) -> QuantizedWeight | None:
        """Return the weight as its files hold it; None where they hold it plain, or in a way that
        its form cannot express: then it is read as plain values.
        """
        matrices = [piece.quantized() for piece in self.source if piece.quantized is not None]
        sizes = {(w.form, w.values.shape[1] // w.scales.shape[1]) for w in matrices}
        if len(matrices) < len(self.source) or len(sizes) > 1:
            return None
        ((unpacked, size),) = sizes
        shape, form = self.spec.shape, FORMS[unpacked.name]
        of_scales = form.scale_shape(shape, self.num_outputs, size)
        if of_scales is None:
            return None
        inputs = math.prod(shape[self.num_outputs :])
        grouped = math.prod(of_scales[self.num_outputs :]) > 1
        # The first input of each of our groups, which are as large as the file's or divide them.
        firsts = np.arange(0, inputs, shape[-1] // of_scales[-1] if grouped else inputs)
        values, scales = aligned(shape, form.dtype), aligned(of_scales, np.dtype(np.float32))
        has_zeros = any(w.zeros is not None for w in matrices)
        zeros = np.zeros_like(scales) if has_zeros else None
        for piece, w in zip(self.source, matrices, strict=True):
            i = piece.fills
            values[i] = np.reshape(w.values, values[i].shape)
            scales[i] = np.reshape(w.scales[:, firsts // size], scales[i].shape)
            if zeros is not None and w.zeros is not None:
                zeros[i] = np.reshape(w.zeros[:, firsts // size], zeros[i].shape)
        made: dict[str, Any] = {"values": form.pack(values), "scales": scales, "zeros": zeros}
        return QuantizedWeight(
            **made, form=form, num_outputs=self.num_outputs, dtype=self.wanted_dtype
        )


def store(name: str, block: np.ndarray, out: np.ndarray) -> None:
    """Write a block into a view of its shape, cast to the view's dtype."""
    with np.errstate(over="ignore"):
        out[...] = block
    if out.dtype == np.float16 and block.dtype != np.float16 and not np.isfinite(out).all():
        raise CheckpointError(
            f"{name}: holds values beyond float16's range; load it as bfloat16 or float32"
        )


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array without values of its own that starts on a cache line, which jax on CPU takes
    over without a copy. A large one lies on huge pages where the kernel gives any, but for an end
    that would waste too much of its last one.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    is_large = nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    raw = _huge(nbytes) if is_large else np.empty(nbytes + CACHE_LINE, np.uint8)
    start = 0 if is_large else -raw.ctypes.data % CACHE_LINE
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def huge_bytes(nbytes: int) -> int:
    """Return how many of the first bytes of a large array lie on huge pages: the last page, which
    is in memory whole, is one of them where it wastes an eighth of the array at most.
    """
    whole = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    return whole if (whole - nbytes) * 8 <= nbytes else whole - HUGE_PAGE


def _huge(nbytes: int) -> np.ndarray:
    """Return memory that the kernel may give huge pages for, from the first byte on; it is unmapped
    once nothing refers to it.
    """
    pages = mmap.mmap(-1, nbytes + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(pages, np.uint8)
    start = -raw.ctypes.data % HUGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes(nbytes))
    return raw[start:]
