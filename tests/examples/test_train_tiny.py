"""examples/train_tiny.py in miniature: it learns, and what it writes is what it trained."""

import textwrap
from pathlib import Path

import numpy as np
import pytest

from examples import train_tiny
from jpaged.checkpoint.load import load_params
from jpaged.checkpoint.tokenizer import load_tokenizer


@pytest.mark.train
@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ([], train_tiny.CHECK),
        (["--hybrid"], train_tiny.CHECK_HYBRID),
    ],
    ids=["plain", "hybrid"],
)
def test_check_mode_learns_and_its_folder_loads(
    flags: list[str],
    settings: train_tiny.Settings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loss = train_tiny.main(["--check", *flags, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    losses = [
        float(line.split("train loss")[1].split()[0])
        for line in out.splitlines()
        if line.startswith("step")
    ]
    uniform = np.log(settings.vocab)
    assert losses[-1] < losses[0] - 0.5 and losses[-1] < uniform - 1.0
    assert 0.5 < loss < uniform - 0.5

    # The folder, read back by the loader, scores the held-out files as the trainer said.
    params = load_params(tmp_path, dtype="float32", dequantize=True)
    tokenizer = load_tokenizer(tmp_path)
    assert params.config == settings.model()
    _, held = train_tiny.split(train_tiny.source_files()[: settings.max_files])
    again = train_tiny.evaluate(params, train_tiny.encode(tokenizer, held), settings)
    assert again == pytest.approx(loss, rel=1e-6)


def test_held_out_files_are_not_trained_on() -> None:
    files = [f"# {i}\n" for i in range(100)]
    training, held = train_tiny.split(files)
    assert len(held) == 2 and not set(training) & set(held) and len(training) + len(held) == 100


def test_chats_are_made_of_documented_functions() -> None:
    rng = train_tiny.random.Random(0)
    answer = 'def add(self, x):\n    """Add x to the list."""\n    self.x += x'
    module = (
        "class A:\n" + textwrap.indent(answer, "    ") + "\n\n    def bare(self):\n        pass\n"
    )
    (chat,) = train_tiny.chats([module], rng)
    assert (
        chat.startswith("<|im_start|>user\n") and "dd x to the list." in chat.split("<|im_end|>")[0]
    )
    assert chat.endswith(f"<|im_start|>assistant\n{answer}<|im_end|>\n")


def test_batches_cover_the_stream_without_repeating() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    stream = train_tiny.batches(tokens, 3, 10, np.random.default_rng(0))
    starts = [int(row[0]) for _ in range(33) for row in next(stream)]
    assert len(set(starts)) == len(starts) == 99
    batch = next(stream)
    assert batch.shape == (3, 11) and (np.diff(batch, axis=1) == 1).all()
