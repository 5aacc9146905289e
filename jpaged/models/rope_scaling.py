"""RopeScaling: how the frequencies of rotary embeddings are scaled."""

import dataclasses
from typing import Literal

# what each kind reads beside its factor; anything else in the file changes no number
ROPE_OPTIONS = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    "longrope": ("attention_factor", "short_factor", "long_factor"),
    "proportional": ("partial_rotary_factor",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings.

    Source: linear (position interpolation, arXiv:2306.15595), yarn (arXiv:2309.00071), llama3
    (Llama 3.1's config), longrope (arXiv:2402.13753), proportional (Gemma 4: all dimensions of a
    head are rotated, the last frequencies being 0).
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "proportional"]
    factor: float
    original_max_position: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope, of each frequency: up to the original length
    long_factor: tuple[float, ...] = ()  # and beyond it
    partial_rotary_factor: float = 1.0  # proportional: the share of frequencies that are not 0
