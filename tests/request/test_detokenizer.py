"""TextStream: text that grows with the tokens equals plain decoding, and stop strings are found
wherever they lie.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jpaged.request.detokenizer import TextStream, decode

CORPUS = [
    "def héllo(self): return 'wörld 🙂🙂 😀 naïve 日本語 日本'",
    "import os, sys\nfor i in range(10): print(i)\n",
]
EOS = "<eos>"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As sentencepiece's, whose decoder turns a whole run of bytes into replacement characters when
    one is wrong.
    """
    pieces = [
        "<unk>",
        EOS,
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁a",
        "a",
        "b",
        "▁the",
        "日",
        "▁日",
        "é",
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([EOS, "<unk>"])
    return tokenizer


class Fast:
    """What a transformers tokenizer is to TextStream."""

    def __init__(self, backend: Tokenizer):
        self.backend_tokenizer = backend

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


BYTES, FALLBACK = byte_level(), byte_fallback()
EOS_ID = BYTES.get_vocab()[EOS]
texts = st.text(st.characters(codec="utf-8"), max_size=40) | st.text("ab🙂é日 \n", max_size=40)
byte_tokens = st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=40)


def ids(text: str) -> list[int]:
    return BYTES.encode(text).ids


def byte_id(byte: int) -> int:
    """The token of one byte; GPT-2 writes those that cannot be printed as the characters from 256
    on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    token = BYTES.token_to_id(chr(byte if byte in printable else 256 + others.index(byte)))
    assert token is not None
    return token


def push(stream: TextStream, tokens: Iterable[int]) -> str | None:
    """Push until a stop string is found; returns it."""
    return next((found for token in tokens if (found := stream.push(token)) is not None), None)


@given(texts)
def test_text_equals_decoding(text: str):
    stream = TextStream(BYTES)
    assert push(stream, ids(text)) is None and stream.finish() == text


@pytest.mark.parametrize("tokenizer", [BYTES, Fast(BYTES)], ids=["any", "transformers"])
@given(tokens=byte_tokens)
def test_text_of_any_tokens_equals_decoding(tokenizer: Any, tokens: list[int]):
    """Invalid UTF-8 and special tokens too, as a random model emits them."""
    stream, seen = TextStream(tokenizer), ""
    whole = decode(tokenizer, tokens, True)
    for token in tokens:
        stream.push(token)
        assert stream.text.startswith(seen) and whole.startswith(stream.text)
        seen = stream.text
    assert stream.finish() == whole == stream.finish()


def test_a_character_split_over_tokens():
    tokens = [byte_id(byte) for byte in "aé🙂b".encode()]
    stream, shown = TextStream(BYTES), []
    for token in tokens:
        stream.push(token)
        shown.append(stream.text)
    assert shown == ["a", "a", "aé", "aé", "aé", "aé", "aé🙂", "aé🙂b"]


def test_text_before_a_split_character_is_not_held_back():
    """Else a stop string in the same token would be found late or never."""
    tokenizer = Letters({0: b"ab\xf0", 1: b"\x9f", 2: b"\x99\x82."})
    stream = TextStream(tokenizer)
    shown = [(stream.push(t), stream.text)[1] for t in (0, 1, 2)]
    assert shown == ["ab", "ab", "ab🙂."]
    stream = TextStream(tokenizer, stop=["b"])
    assert stream.push(0) == "b" and stream.finish() == "a"


class Letters:
    """A tokenizer of given pieces of UTF-8."""

    def __init__(self, pieces: dict[int, bytes]):
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def test_an_unfinished_character_is_flushed():
    stream = TextStream(BYTES)
    push(stream, [*ids("ab"), *(byte_id(b) for b in "🙂".encode()[:2])])
    assert stream.take_delta() == "ab" and stream.finish() == "ab\ufffd"
    assert stream.take_delta() == "\ufffd" and stream.take_delta() == ""


@settings(max_examples=300)
@given(st.lists(st.integers(0, FALLBACK.get_vocab_size() - 1) | st.integers(258, 265), max_size=30))
def test_a_decoder_that_takes_text_back_does_no_harm(tokens: list[int]):
    """What was shown stays, and nothing raises (tokenizers' own DecodeStream does, and would end
    the whole batch).
    """
    stream, deltas = TextStream(FALLBACK), ""
    for token in tokens:
        stream.push(token)
        deltas += stream.take_delta()
    final = stream.finish()
    assert deltas + stream.take_delta() == final
    whole = FALLBACK.decode(tokens)
    assert final == whole or "\ufffd" in whole


@given(st.lists(st.sampled_from([1, *range(258, 266)]), max_size=20))
def test_leading_spaces_and_special_tokens(tokens: list[int]):
    """A decoder that strips the first space must not strip one within the text."""
    stream = TextStream(FALLBACK)
    push(stream, tokens)
    assert stream.finish() == FALLBACK.decode(tokens)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip: bool):
    stream = TextStream(BYTES, skip_special_tokens=skip)
    push(stream, [*ids("a b"), EOS_ID, *ids(" c")])
    assert stream.finish() == ("a b c" if skip else f"a b{EOS} c")


@given(
    byte_tokens | texts.map(ids),
    st.lists(st.text("ab🙂é日 \n", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings(tokens: list[int], stops: list[str], include: bool):
    """Ends with the first token by which the text has a stop string, at the earliest one that it
    then has.
    """
    stream = TextStream(BYTES, stop=stops, include_stop=include)
    for count, token in enumerate(tokens, 1):
        text = BYTES.decode(tokens[:count]).rstrip("\ufffd")
        hits = [(text.find(stop), stop) for stop in stops if stop in text]
        found = stream.push(token)
        if hits:
            at, stop = min(hits, key=lambda hit: hit[0])
            assert found == stop and stream.finish() == text[: at + len(stop) * include]
            return
        assert found is None and stream.text == text
    assert stream.finish() == BYTES.decode(tokens)


@pytest.mark.parametrize(("include", "text"), [(False, "say "), (True, "say stop")])
def test_a_stop_string_split_over_tokens(include: bool, text: str):
    stream = TextStream(
        Letters({i: c.encode() for i, c in enumerate("say stopped")}),
        stop=["stop"],
        include_stop=include,
    )
    assert push(stream, range(11)) == "stop" and stream.finish() == text


def test_the_earliest_match_wins():
    tokenizer = Letters({0: b"one two three"})
    for stops in (["three", "two"], ["two", "three"]):
        stream = TextStream(tokenizer, stop=stops)
        assert stream.push(0) == "two" and stream.finish() == "one "


def test_a_token_may_complete_text_beyond_the_stop_string():
    stream = TextStream(Letters({0: b"end", 1: b".\n\nnext"}), stop=[".\n\n"])
    assert (stream.push(0), stream.push(1), stream.finish()) == (None, ".\n\n", "end")


def test_min_tokens_suppresses_stop_strings():
    stream = TextStream(Letters({0: b"ab", 1: b"c"}), stop=["b", "bc", "cc"])
    assert stream.push(0, may_stop=False) is None
    assert stream.push(1, may_stop=True) is None  # "bc" began where stopping was forbidden
    assert stream.push(1) == "cc" and stream.finish() == "ab"


def test_a_delta_holds_back_what_may_become_a_stop_string():
    stream = TextStream(
        Letters({i: c.encode() for i, c in enumerate("xENyEND")}), stop=["END", "yE!"]
    )
    deltas = []
    for token in range(7):
        stream.push(token)
        deltas.append(stream.take_delta())
    assert deltas == ["x", "", "", "EN", "", "y", ""] and stream.is_final
    assert stream.finish() == "xENy" and stream.take_delta() == ""


def test_a_held_tail_comes_with_the_end():
    stream = TextStream(Letters({0: b"ab", 1: b"EN"}), stop=["END"])
    push(stream, [0, 1])
    assert stream.take_delta() == "ab" and stream.finish() == "abEN" and stream.take_delta() == "EN"


@given(
    byte_tokens | texts.map(ids),
    st.lists(st.text("ab🙂é日 \n", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_deltas_add_up(tokens: list[int], stops: list[str], data: st.DataObject):
    include = data.draw(st.booleans())
    silent = data.draw(st.integers(0, 5))
    stream, deltas = TextStream(BYTES, stop=stops, include_stop=include), ""
    for i, token in enumerate(tokens):
        found = stream.push(token, may_stop=i >= silent)
        if data.draw(st.booleans()):
            deltas += stream.take_delta()
        if found is not None:
            break
    final = stream.finish()
    assert deltas + stream.take_delta() == final


@given(byte_tokens, st.integers(0, 40), st.integers(0, 4))
def test_rewind(tokens: list[int], keep: int, min_tokens: int):
    """Going back to fewer tokens and on again is as if nothing had happened."""
    stop = ["zz"]
    plain, stream = TextStream(BYTES, stop=stop), TextStream(BYTES, stop=stop)
    keep = min(keep, len(tokens))
    deltas = ""
    for i, token in enumerate(tokens):
        if plain.push(token, may_stop=i >= min_tokens) is not None:
            return
        stream.push(token, may_stop=i >= min_tokens)
        deltas += stream.take_delta() if i < keep else ""
    stream.rewind(tokens[:keep], min_tokens)
    for i, token in enumerate(tokens[keep:], keep):
        stream.push(token, may_stop=i >= min_tokens)
        deltas += stream.take_delta()
    assert stream.text == plain.text and stream.finish() == plain.finish()
    assert deltas + stream.take_delta() == plain.text
