"""Every kind of input gives the same numbered lines; damage is an error that keeps what came before
it.
"""

import datetime
import gzip
import json
import random
import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zstandard

from jpaged.integrations.batch.formats import guess_format, open_source
from jpaged.integrations.batch.intake import Line, ReadAhead
from jpaged.integrations.batch.lines import BatchRequest
from jpaged.integrations.batch.source import (
    BatchError,
    LineError,
    LineSource,
)
from jpaged.integrations.batch.tables import as_line

TEXT = b'{"prompt": "a"}\n\n  \n{"prompt": "' + b"x" * 200 + b'"}\r\nlast, without an end'
LINES = [
    (1, b'{"prompt": "a"}\n'),
    (4, b'{"prompt": "' + b"x" * 200 + b'"}\r\n'),
    (5, b"last, without an end"),
]


def compress_zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


WAYS = {"": bytes, ".gz": gzip.compress, ".zst": compress_zst}


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize("suffix", WAYS)
def test_lines(tmp_path: Path, suffix: str) -> None:
    pack = WAYS[suffix]
    source = open_source(write(tmp_path / f"in.jsonl{suffix}", pack(TEXT)))
    assert (source.text, source.total()) == (False, None)
    assert list(source) == LINES
    assert source.fraction() == 1.0
    source.close()
    # Members that follow each other are one file.
    double = LineSource(
        write(tmp_path / f"two{suffix}", pack(TEXT[:30]) + pack(TEXT[30:])), max_line_bytes=1000
    )
    assert list(double) == LINES
    double.close()
    empty = LineSource(write(tmp_path / f"none{suffix}", pack(b"")), max_line_bytes=1000)
    assert list(empty) == []
    empty.close()


@pytest.mark.parametrize("suffix", WAYS)
def test_long_lines_are_never_held(tmp_path: Path, suffix: str) -> None:
    data = b"a" * 99 + b"\n" + b"b" * 100 + b"\n" + b"c" * 101 + b"\n" + b"d" * 300_000 + b"\nend"
    source = LineSource(write(tmp_path / f"in{suffix}", WAYS[suffix](data)), max_line_bytes=100)
    found = list(source)
    assert [number for number, _ in found] == [1, 2, 3, 4, 5]
    assert (
        found[0][1] == b"a" * 99 + b"\n"
        and found[1][1] == b"b" * 100 + b"\n"
        and found[4][1] == b"end"
    )
    for (_, error), length in zip(found[2:4], (102, 300_001), strict=True):
        assert isinstance(error, LineError) and error.code == "line_too_long"
        assert str(error) == f"{length} bytes are above --max-line-bytes 100"
    assert max(len(raw) for _, raw in found if isinstance(raw, bytes)) <= 101
    source.close()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damage(tmp_path: Path, suffix: str, damage: str) -> None:
    rng = random.Random(0)
    text = b"".join(b"%d %032x\n" % (i, rng.getrandbits(128)) for i in range(20_000))
    data = bytearray(WAYS[suffix](text))
    if damage == "cut":
        data = data[: len(data) // 2]
    else:
        for i in range(len(data) // 2, len(data) // 2 + 64):
            data[i] ^= 0x5A
    source, found = (
        LineSource(write(tmp_path / f"in{suffix}", bytes(data)), max_line_bytes=1000),
        [],
    )
    with pytest.raises(Exception, match=r".+"):
        for number, raw in source:
            found.append((number, raw))
    source.close()
    whole = text.splitlines(keepends=True)
    good = [raw == whole[number - 1] for number, raw in found]
    assert len(found) > 1000 and all(good[:1000])
    assert damage == "flipped" or all(good)


def test_the_mark_at_the_beginning(tmp_path: Path) -> None:
    """A blank first line with the mark of UTF-8 is no line; a file of UTF-16 is refused at once."""
    mark = b"\xef\xbb\xbf"
    for number, begin in ((1, mark), (2, mark + b"\r\n"), (3, mark + b" \n\n")):
        source = LineSource(write(tmp_path / "in", begin + b"a\n"), max_line_bytes=100)
        assert [(n, line[-2:]) for n, line in source if isinstance(line, bytes)] == [
            (number, b"a\n")
        ]
        source.close()
    for data in ("a\n".encode("utf-16"), b"\xfe\xff\0a"):
        with pytest.raises(BatchError, match="it is UTF-16: write it as UTF-8"):
            open_source(write(tmp_path / "in.txt", data))


def test_what_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BatchError, match="No such file"):
        open_source(str(tmp_path / "none.jsonl"))
    with pytest.raises(BatchError, match=r"--columns: .* is read as jsonl"):
        open_source(write(tmp_path / "in.jsonl", b""), columns=["a"])
    with pytest.raises(BatchError, match=r"no such folder \(hf:NAME"):
        open_source(str(tmp_path / "none"), format="dataset")
    for module, name, extra in (
        ("zstandard", "in.zst", "zstd"),
        ("pyarrow.parquet", "in.parquet", "data"),
        ("datasets", "hf:x", "data"),
    ):
        monkeypatch.setitem(__import__("sys").modules, module, None)
        monkeypatch.setitem(__import__("sys").modules, "compression.zstd", None)
        path = name if name.startswith("hf:") else write(tmp_path / name, b"")
        with pytest.raises(BatchError, match=rf"jpaged\[{extra}\]"):
            open_source(path).close()


def test_formats_by_name(tmp_path: Path) -> None:
    names = {"a.jsonl": "jsonl", "a": "jsonl", "-": "jsonl", "a.txt": "text", "a.txt.gz": "text"}
    names |= {"a.jsonl.zst": "jsonl", "a.parquet": "parquet", "hf:a/b": "dataset"}
    assert {name: guess_format(name) for name in names} == names
    (tmp_path / "dataset_dict.json").touch()
    assert guess_format(str(tmp_path)) == "dataset"
    (tmp_path / "part.parquet").touch()
    assert guess_format(str(tmp_path)) == "parquet"


def test_rows_as_lines() -> None:
    row = {
        "prompt": "é",
        "seed": None,
        "messages": [{"role": "user", "name": None}],
        "day": datetime.date(2026, 1, 2),
    }
    assert json.loads(bytes(as_line(row))) == {  # pyright: ignore[reportArgumentType]
        "prompt": "é",
        "messages": [{"role": "user"}],
        "day": "2026-01-02",
    }
    error = as_line({"image": b"\x00"})
    assert isinstance(error, LineError) and "bytes" in str(error)


ROWS = [
    {"id": f"r{i}", "prompt": f"p{i}", "max_tokens": i if i % 2 else None} for i in range(1, 1001)
]


def lines_of(source) -> list[tuple[int, dict]]:
    try:
        assert source.total() in (None, len(ROWS))
        return [(number, json.loads(raw)) for number, raw in source]
    finally:
        source.close()


def wanted(**names: str) -> list[tuple[int, dict]]:
    kept = [{names.get(k, k): v for k, v in row.items() if v is not None} for row in ROWS]
    return list(enumerate(kept, 1))


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=100)
    source = open_source(str(path))
    assert lines_of(source) == wanted() and source.fraction() == 1.0
    assert source.identity()["files"]["in.parquet"]["bytes"] == path.stat().st_size
    found = lines_of(open_source(str(path), columns=["prompt", "custom_id=id"]))
    assert found[2] == (3, {"prompt": "p3", "custom_id": "r3"})
    with pytest.raises(BatchError, match=r"--columns question: .* has id, prompt, max_tokens"):
        open_source(str(path), columns=["prompt=question"])
    for twice in (["prompt", "prompt=id"], ["prompt=id", "custom_id=id"]):
        with pytest.raises(BatchError, match=r"--columns prompt.* a field has one column"):
            open_source(str(path), columns=twice)
    with pytest.raises(BatchError, match="cannot read"):
        open_source(write(tmp_path / "bad.parquet", b"PAR1"))
    folder = tmp_path / "folder"
    folder.mkdir()
    for i in range(4):
        parquet.write_table(
            pyarrow.Table.from_pylist(ROWS[250 * i : 250 * (i + 1)]), folder / f"{i}.parquet"
        )
    assert lines_of(open_source(str(folder))) == wanted()


def test_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    assert lines_of(open_source(str(tmp_path / "one"))) == wanted()
    datasets.DatasetDict({"train": data.select(range(10)), "test": data}).save_to_disk(
        str(tmp_path / "splits")
    )
    assert lines_of(open_source(str(tmp_path / "splits"), split="test")) == wanted()
    with pytest.raises(BatchError, match="has the splits train, test: name one"):
        open_source(str(tmp_path / "splits"))
    with pytest.raises(BatchError, match=r"--split other: .* has train, test"):
        open_source(str(tmp_path / "splits"), split="other")
    (tmp_path / "lines").mkdir()
    with open(tmp_path / "lines" / "train.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    streamed = open_source(f"hf:{tmp_path / 'lines'}", split="train", columns=["prompt"])
    assert lines_of(streamed)[4] == (5, {"prompt": "p5"})


def test_reading_ahead_is_over_once_it_is_closed(tmp_path: Path) -> None:
    """A line that is being parsed is seen through: the exit of the interpreter would abort the
    process where it finds a thread inside compiled code.
    """
    begun, may_go_on, parsed = threading.Event(), threading.Event(), []

    def lines() -> Generator[Line]:
        for number in range(1, 100):
            begun.set()
            assert may_go_on.wait(60)
            parsed.append(number)
            yield Line(request=BatchRequest(number=number), raw=b"")

    reader = ReadAhead(cast(Any, SimpleNamespace(lines=lines)), 1000)
    assert begun.wait(60)
    threading.Timer(0.2, may_go_on.set).start()
    reader.close()
    assert parsed == [1] and not [t for t in threading.enumerate() if t.name == "jpaged reader"]
