"""resized: bicubic resizing of 8-bit images with the numbers of torch's own, for image processors
that transformers has with torchvision alone.
"""

import functools

import numpy as np

BICUBIC = 3  # Pillow's number of it, which a processor's settings have
SUPPORT = 2.0  # how far the kernel reaches, in pixels of the smaller of both images
CUBIC = -0.5  # the kernel's parameter, with antialiasing
MOST_BITS = 22  # of weights as integers
WEIGHT_BITS = 15  # of the absolute value of a weight as int16
AT_ONCE = 16  # rows that are made by one product
SMALL = 2**18  # multiplications of a product for which OpenBLAS wakes no threads


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return an image in another size: uint8 [height, width, channels].

    Columns first, then rows, each rounded to 8 bits, by weights of 16 bits: to the bit what
    torchvision's resize makes of a uint8 image on a CPU (bicubic, antialias=True), which rounds
    otherwise than Pillow. Source: upsample_avx_bilinear_bicubic_uint8 and
    _compute_index_ranges_int16_weights in torch's aten/src/ATen/native/cpu.
    """
    if pixels.shape[1] != width:
        pixels = _along_rows(pixels.swapaxes(0, 1), width).swapaxes(0, 1)
    if pixels.shape[0] != height:
        pixels = _along_rows(pixels, height)
    return np.ascontiguousarray(pixels)


def _along_rows(pixels: np.ndarray, count: int) -> np.ndarray:
    """Return an image with `count` rows. Sums are of integers, and exact in f64."""
    first, weights, bits = _weights(pixels.shape[0], count)
    made = np.empty((count, *pixels.shape[1:]), np.uint8)
    for start in range(0, count, AT_ONCE):
        part = slice(start, min(start + AT_ONCE, count))
        begin = first[start]
        end = min(first[part.stop - 1] + weights.shape[1], pixels.shape[0])
        at = first[part, None] - begin + np.arange(weights.shape[1])
        matrix = np.zeros((len(at), end - begin + weights.shape[1]))
        np.put_along_axis(matrix, at, weights[part], axis=1)
        taken = pixels[begin:end].reshape(end - begin, -1).astype(np.float64)
        total = np.empty((len(at), taken.shape[1]))
        step = max(1, SMALL // matrix.size)
        for j in range(0, taken.shape[1], step):
            np.matmul(matrix[:, : end - begin], taken[:, j : j + step], out=total[:, j : j + step])
        total += 1 << (bits - 1)
        total *= 0.5**bits
        np.clip(np.floor(total, out=total), 0, 255, out=total)
        made[part] = total.reshape(len(at), *pixels.shape[1:])
    return made


@functools.lru_cache(maxsize=64)
def _weights(size: int, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return what `count` rows are made of, of `size` of them: the first that counts, int [count];
    the weights of it and of those after it, whole numbers [count, taps] in f64; and the bits of
    their fraction.
    """
    scale = size / count
    shrinks = max(scale, 1.0)
    support = SUPPORT * shrinks
    taps = int(np.ceil(support)) * 2 + 1
    center = scale * (np.arange(count) + 0.5)
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    end = np.minimum((center + support + 0.5).astype(np.int64), size)
    index = first[:, None] + np.arange(taps)
    weights = _cubic((index - center[:, None] + 0.5) / shrinks)
    weights = np.where(index < end[:, None], weights, 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    bits, most = 0, weights.max()
    while bits < MOST_BITS and int(0.5 + most * (1 << (bits + 1))) < 1 << WEIGHT_BITS:
        bits += 1
    scaled = weights * (1 << bits)
    return first, np.trunc(scaled + np.copysign(0.5, scaled)), bits


def _cubic(x: np.ndarray) -> np.ndarray:
    """Return Keys' cubic kernel at distances x."""
    x, a = np.abs(x), CUBIC
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < SUPPORT, far, 0.0))
