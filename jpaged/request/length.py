"""Texts that are too long for a context: refused before they are tokenized whole."""

from collections.abc import Callable, Sequence

from jpaged.errors import CapacityError

# Characters for each token of a context that are tokenized before a text is judged by its length.
CHARACTERS_A_TOKEN = 8


def check_length(text: str, most: int, encode: Callable[[str], Sequence[int]]) -> None:
    """Raise CapacityError where a long text has `most` tokens or more, at the price of tokenizing
    little more than what would fit.

    Beginnings of the text are tokenized, each twice as long as the one before, until one has twice
    as many tokens as may be: where a text is cut changes its tokens around the cut alone. A text
    of another density comes to its end, and its own number of tokens is judged then.
    """
    size = CHARACTERS_A_TOKEN * most
    while size < len(text):
        if (count := len(encode(text[:size]))) >= 2 * most:
            raise CapacityError(
                f"prompt of more than {count} tokens, in {size} of its {len(text)} characters, "
                f"leaves no room in max_model_len={most}: shorten it or raise max_model_len"
            )
        size *= 2


def too_long(count: int, most: int) -> CapacityError:
    return CapacityError(
        f"prompt of {count} tokens leaves no room in max_model_len={most}: "
        "shorten it or raise max_model_len"
    )
