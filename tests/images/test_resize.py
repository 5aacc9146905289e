"""Resizing: torchvision's bits, which tests/golden/pictures.npz has (make_golden.py pictures)."""

import numpy as np
import pytest

from jpaged.images.resize import resized
from tests.golden.pictures import FILE, RESIZED, noisy


@pytest.mark.parametrize("i", range(len(RESIZED)))
def test_bits_are_those_of_torchvision(i: int) -> None:
    """Larger and smaller, along either side or both, down to one row."""
    before, after = RESIZED[i]
    with np.load(FILE, allow_pickle=False) as stored:
        expected = stored[f"resized/{i}"]
    found = resized(noisy(before), *after)
    assert found.dtype == np.uint8 and found.flags.c_contiguous
    np.testing.assert_array_equal(found, expected)


def test_what_stays_as_it_is() -> None:
    image = noisy((7, 12))
    np.testing.assert_array_equal(resized(image, 7, 12), image)
    flat = np.full((40, 30, 3), 201, np.uint8)
    np.testing.assert_array_equal(resized(flat, 9, 77), np.full((9, 77, 3), 201, np.uint8))
