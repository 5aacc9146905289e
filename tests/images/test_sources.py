"""Sources of images: what is read, what is refused and how it is said, and that an event loop goes
on meanwhile.
"""

import asyncio
import base64
import io
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageCms

from jpaged.errors import ConfigError, RequestError, UnsupportedError
from jpaged.images.limits import ImageLimits
from jpaged.images.sources import ImageLoader, load_image

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (13, 29, 3), dtype=np.uint8)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


PNG = encoded(Image.fromarray(PIXELS))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header says a size, whatever is in it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(data))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def gif_of(*sizes: tuple[int, int]) -> bytes:
    """A GIF with frames of these (width, height), whose head says that of the first."""
    head, frames = b"", b""
    for size in reversed(sizes):
        data = encoded(Image.new("L", size, 7), "GIF")
        start = 13 + 3 * 2 ** ((data[10] & 7) + 1)  # what is told first, and the colours
        head, frames = data[:start], data[start:-1] + frames
    return head + frames + b";"


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class TestWhatIsRead:
    def test_every_source_gives_the_same_pixels(self, tmp_path: Path) -> None:
        file = tmp_path / "an image.png"
        file.write_bytes(PNG)
        sources: list[Any] = [
            *(PNG, bytearray(PNG), memoryview(PNG)),
            *(file, str(file)),
            *(data_url(PNG), data_url(PNG, ""), data_url(PNG, "IMAGE/PNG;name=x")),
            *(PIXELS, jnp.asarray(PIXELS), Image.fromarray(PIXELS), Image.open(io.BytesIO(PNG))),
        ]
        for source in sources:
            loaded = load_image(source)
            assert loaded.dtype == np.uint8 and np.array_equal(loaded, PIXELS)

    def test_arrays_are_copied(self) -> None:
        pixels = PIXELS.copy()
        loaded = load_image(pixels)
        pixels[:] = 0
        assert np.array_equal(loaded, PIXELS)

    @pytest.mark.parametrize("format", ["JPEG", "WEBP", "GIF", "BMP", "PNG"])
    def test_formats(self, format: str) -> None:
        image = Image.fromarray(PIXELS)
        expected = Image.open(io.BytesIO(encoded(image, format))).convert("RGB")
        assert np.array_equal(load_image(encoded(image, format)), np.array(expected))

    @pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "I;16"])
    def test_modes(self, mode: str) -> None:
        image = Image.fromarray(PIXELS)
        if mode == "I;16":
            deep = RNG.integers(0, 2**16, (13, 29), dtype=np.uint16)
            data, expected = encoded(Image.fromarray(deep)), np.repeat(deep[..., None] // 257, 3, 2)
        else:
            changed = image.convert(mode)
            data = encoded(changed, "JPEG" if mode == "CMYK" else "PNG")
            expected = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
        assert np.array_equal(load_image(data), expected)

    def test_a_palette_with_transparency(self) -> None:
        palette = Image.fromarray(PIXELS).convert("P")
        data = encoded(palette, transparency=bytes(range(256)))
        assert np.array_equal(load_image(data), np.array(palette.convert("RGB")))

    @pytest.mark.parametrize("turn", range(1, 9))
    def test_exif_turns(self, turn: int) -> None:
        exif = Image.Exif()
        exif[0x0112] = turn
        loaded = load_image(encoded(Image.fromarray(PIXELS), exif=exif))
        turned = {
            1: PIXELS,
            2: PIXELS[:, ::-1],
            3: PIXELS[::-1, ::-1],
            4: PIXELS[::-1],
            5: PIXELS.transpose(1, 0, 2),
            6: PIXELS[::-1].transpose(1, 0, 2),
            7: PIXELS[::-1, ::-1].transpose(1, 0, 2),
            8: PIXELS[:, ::-1].transpose(1, 0, 2),
        }
        assert np.array_equal(loaded, turned[turn])

    def test_a_colour_profile_changes_nothing(self) -> None:
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
        assert np.array_equal(
            load_image(encoded(Image.fromarray(PIXELS), icc_profile=profile)), PIXELS
        )

    def test_the_first_frame_of_an_animation(self) -> None:
        frames = [Image.fromarray(np.roll(PIXELS, i, 0)) for i in range(4)]
        data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
        loaded = load_image(data, ImageLimits(max_frames=4))
        assert np.array_equal(loaded, np.array(Image.open(io.BytesIO(data)).convert("RGB")))
        for most in (1, 3):
            with pytest.raises(RequestError, match=f"more than max_frames={most} frames"):
                load_image(data, ImageLimits(max_frames=most))

    def test_a_later_frame_changes_nothing_of_the_first(self) -> None:
        """One that is larger than all that the file's head says."""
        data = gif_of((4, 4), (30, 50))
        assert load_image(data, ImageLimits(max_frames=2)).shape == (4, 4, 3)

    def test_a_photo_with_a_preview_is_no_animation(self) -> None:
        """Cameras write such JPEGs, which Pillow gives a format and frames of their own."""
        preview = Image.fromarray(PIXELS[:8])
        data = encoded(Image.fromarray(PIXELS), "MPO", save_all=True, append_images=[preview])
        opened: Any = Image.open(io.BytesIO(data))
        assert data[:2] == b"\xff\xd8" and opened.n_frames == 2
        assert np.array_equal(load_image(data), np.array(opened))


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (b"", "holds no bytes"),
            (b"not an image", "no image of the formats PNG, JPEG, WEBP, GIF, BMP"),
            (PNG[:60], "truncated or damaged"),
            (PNG[:-40], "truncated or damaged"),
            (PNG[:20], "image"),
            (png_of(50_000, 50_000), "max_pixels=40,000,000"),
            (png_of(10_000, 10_000), "10000 x 10000 pixels|max_pixels"),
            (png_of(40_000, 2), "max_side=30,000"),
            (png_of(0, 5), "image"),
            (png_of(5, 0), "image"),
            (png_of(5, 5), "truncated or damaged"),
            (encoded(Image.fromarray(PIXELS), "TIFF"), "no image of the formats"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image of the formats"),
            (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of the formats"),
            ("data:image/png;base64,####", "not base64"),
            ("data:image/png,abc", "must have ;base64"),
            ("data:image/png;charset='x',abc", "must be data:image/TYPE;base64"),
            ("data:text/plain;base64,YWJj", "of type 'text/plain'"),
            (data_url(b"abc"), "no image of the formats"),
            ("ftp://host/a.png", "must begin with data:, http:// or https://"),
            ("file:///etc/passwd", "must begin with data:, http:// or https://"),
            ("https://example.com/a.png", "none are fetched unless hosts lists"),
            ("/no/such/file.png", "No such file"),
            ("a\0b", "null"),
            ("/", "directory"),
            (17, "an image of type int"),
            (None, "an image of type NoneType"),
            (np.zeros((4, 4, 3), np.float32), "dtype float32"),
            (np.zeros((4, 4, 2), np.uint8), r"shape \(4, 4, 2\)"),
            (np.zeros((0, 4, 3), np.uint8), "4 x 0 pixels"),
            (np.zeros((40_000, 1), np.uint8), "max_side"),
            (Image.new("L", (30_001, 1)), "max_side"),
        ],
    )
    def test_with_the_reason(self, source: Any, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            load_image(source)

    def test_bombs_take_no_memory(self) -> None:
        """A header of 2,500 million pixels with 64 MiB of zeros in 64 kB is refused before it is
        decoded.
        """
        import tracemalloc

        data = png_of(50_000, 50_000, bytes(2**26))
        assert len(data) < 2**17
        tracemalloc.start()
        began = time.perf_counter()
        with pytest.raises(RequestError, match="max_pixels"):
            load_image(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**20
        assert time.perf_counter() - began < 30

    def test_text_of_a_png_that_unpacks_to_much(self) -> None:
        packed = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**24)))
        with pytest.raises(RequestError, match="damaged"):
            load_image(PNG[:33] + packed + PNG[33:])

    def test_bytes(self, tmp_path: Path) -> None:
        limits = ImageLimits(max_bytes=len(PNG) - 1)
        file = tmp_path / "a.png"
        file.write_bytes(PNG)
        for source in (PNG, file, data_url(PNG)):
            with pytest.raises(RequestError, match=f"max_bytes={len(PNG) - 1:,}"):
                load_image(source, limits)
            load_image(source, ImageLimits(max_bytes=len(PNG)))

    def test_paths_where_they_may_not_be(self, tmp_path: Path) -> None:
        file = tmp_path / "a.png"
        file.write_bytes(PNG)
        for source in (file, str(file), "../a.png"):
            with pytest.raises(RequestError, match="local_paths=False"):
                load_image(source, ImageLimits(local_paths=False))
        load_image(data_url(PNG), ImageLimits(local_paths=False))

    @pytest.mark.parametrize(
        "options",
        [
            {"max_bytes": 0},
            {"max_pixels": True},
            {"max_frames": 1.5},
            {"timeout_s": 0},
            {"max_redirects": -1},
            {"max_redirects": "3"},
            {"formats": "PNG"},
            {"hosts": "a.b"},  # which is four names of one letter
            {"hosts": ("https://a.b",)},
            {"hosts": ("A.b",)},
            {"hosts": ("*.",)},
            {"hosts": ("*a.b",)},
            {"hosts": ("a.*",)},
            {"hosts": ("a.b:http",)},
            {"hosts": ("a.b:",)},
            {"hosts": ("face:abc",)},
            {"hosts": ("[::1]:80",)},
            {"hosts": ("user@a.b",)},
        ],
    )
    def test_limits_that_cannot_be(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            ImageLimits(**options)

    def test_hosts_that_can_be(self) -> None:
        ImageLimits(hosts=("a", "a.b:80", "*.b", "*.b-c.d:8080", "1.2.3.4:80", "::1", "fd00::a:1"))

    def test_frames_that_are_too_large(self) -> None:
        """Not the first alone, and before one of them is decoded."""
        for sizes in ((4, 4), (300, 300)), ((4, 4), (300, 300), (4, 4)), ((300, 300), (4, 4)):
            with pytest.raises(RequestError, match="of 300 x 300 pixels: the limits"):
                load_image(gif_of(*sizes), ImageLimits(max_frames=4, max_pixels=10_000))

    def test_without_pillow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "PIL.Image", None)
        with pytest.raises(UnsupportedError, match=r"pip install 'jpaged\[images\]'"):
            load_image(PNG)

    def test_random_damage_is_always_a_request_error(self) -> None:
        """Bytes changed, dropped or added at random places of files of every format."""
        rng = np.random.default_rng(7)
        image = Image.fromarray(PIXELS)
        exif = Image.Exif()
        exif[0x0112] = 6
        files = [encoded(image, f) for f in ("JPEG", "WEBP", "GIF", "BMP", "PNG")]
        files.append(encoded(image, "JPEG", exif=exif))
        read = refused = 0
        for _ in range(400):
            data = bytearray(files[rng.integers(len(files))])
            for _ in range(rng.integers(1, 6)):
                at = int(rng.integers(len(data)))
                kind = rng.integers(3)
                if kind == 0:
                    data[at] = int(rng.integers(256))
                elif kind == 1:
                    del data[at : at + int(rng.integers(1, 20))]
                else:
                    data[at:at] = rng.bytes(int(rng.integers(1, 20)))
                if not data:
                    break
            try:
                pixels = load_image(bytes(data))
                assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.size
                read += 1
            except RequestError:
                refused += 1
        assert read > 20 and refused > 100


class TestThreads:
    def test_a_loop_goes_on_while_images_are_decoded(self) -> None:
        """The loop turns while several large images are decoded, and gets them in order."""
        large = RNG.integers(0, 256, (1500, 1500, 3), dtype=np.uint8)
        data = encoded(Image.fromarray(large), compress_level=1)

        async def run() -> tuple[int, list[np.ndarray]]:
            loader = ImageLoader(threads=2)
            turns = 0
            images = loader.apply_all(lambda pixels: pixels, [data] * 4)
            task = asyncio.ensure_future(asyncio.to_thread(list, images))
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
            loader.close()
            return turns, await task

        turns, loaded = asyncio.run(run())
        assert turns > 100
        assert len(loaded) == 4 and all(np.array_equal(x, large) for x in loaded)

    def test_an_error_names_its_image(self) -> None:
        loader = ImageLoader()
        images = loader.apply_all(lambda pixels: pixels.shape, [PNG, b"none", PNG])
        assert len(next(images)) == 3
        with pytest.raises(RequestError, match=r"images\[1\]: "):
            next(images)
        loader.close()
