"""Texts that are too long: refused at a price that does not grow with them."""

from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM
from jpaged.errors import CapacityError
from jpaged.request.inputs import CHARACTERS_A_TOKEN, check_length
from tests.text_model import write_folder

MOST = 50


class Counting:
    """One token for so many characters; counts the characters that it was given."""

    def __init__(self, characters: int):
        self.characters, self.seen = characters, 0

    def encode(self, text: str) -> range:
        self.seen += len(text)
        return range(-(-len(text) // self.characters))


@pytest.mark.parametrize("characters", [1, 3, 8, 40])
def test_the_price_is_that_of_what_would_fit(characters: int):
    tokenizer = Counting(characters)
    with pytest.raises(CapacityError, match="leaves no room in max_model_len=50: shorten it"):
        check_length("a" * 10_000_000, MOST, tokenizer.encode)
    assert tokenizer.seen <= 8 * MOST * max(characters, CHARACTERS_A_TOKEN)


@pytest.mark.parametrize("characters", [1, 3, 8, 40, 10_000])
def test_what_fits_is_never_refused(characters: int):
    tokenizer = Counting(characters)
    for size in (0, 1, characters * (MOST - 1), characters * 2 * MOST - characters):
        check_length("a" * size, MOST, tokenizer.encode)


def test_long_prompts_are_refused_by_every_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A text, a conversation and token ids."""
    llm = LLM(write_folder(tmp_path / "tiny"), max_num_seqs=2, num_blocks=16, max_model_len=64)
    seen: list[int] = []
    tokenizer: Any = llm.session.inputs.tokenizer
    encode = type(tokenizer).encode

    def counted(self: Any, text: str, *args: Any, **how: Any) -> Any:
        seen.append(len(text))
        return encode(self, text, *args, **how)

    monkeypatch.setattr(type(tokenizer), "encode", counted)
    long = "a" * 1_000_000
    for prompt in (long, {"prompt": long}, [5] * 1_000_000):
        with pytest.raises(CapacityError, match="leaves no room in max_model_len=64"):
            llm.generate(prompt, use_tqdm=False)
    with pytest.raises(CapacityError, match="leaves no room in max_model_len=64"):
        llm.chat([{"role": "user", "content": long}], use_tqdm=False)
    assert sum(seen) < 10_000, "it was tokenized whole"
