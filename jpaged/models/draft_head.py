"""What the config of a head that guesses for a model says beside those of a model: HeadConfig of an
EAGLE-3 head (models/eagle.py), MTPConfig of a layer that a checkpoint has for it (models/mtp.py).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from jpaged.models.layers.embedding import EMBED
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Init, ParamSpec
from jpaged.models.record import Field, Record

STATES = 3  # hidden states of a position that `fc` joins
# A mesh splits what `fc` gives: devices put it together again.
FC = ParamSpec("fc.weight", "E, E+E", "fc.weight", split="E")
TARGET_HIDDEN = "target_hidden"  # in the cache: what `fc` made of the model's at each position


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The part of a ModelConfig of one layer that makes it a head: `ModelConfig.draft_head`.

    target_hidden_size: of the model that it guesses for. aux_layers: the layers of that model whose
    inputs the head takes; the number of layers stands for the output of the last. () is the
    published default: 2, half of the layers, all but 3. draft_vocab_size: how many tokens it can
    guess. draft_tokens: their ids as int32 bytes, b"" where they are all that the model has; then a
    mesh pads and splits its output head as the model's.
    has_embed, has_lm_head: where it has none, those of the model serve. norm_before_residual: the
    output of attention is added to the normed hidden states.
    """

    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...] = ()
    draft_tokens: bytes = b""
    has_embed: bool = False
    has_lm_head: bool = True
    norm_before_residual: bool = False

    title: ClassVar[str] = "EAGLE-3 head"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a head's axes by their letters."""
        return {"A": STATES * self.target_hidden_size, "W": self.draft_vocab_size}

    def params(
        self, sizes: Mapping[str, int], layers: Iterable[ParamSpec], norm_init: Init
    ) -> Iterator[ParamSpec]:
        """Yield the parameters of a head in the order of its forward pass.

        sizes: of the axes of its ModelConfig. layers: the parameters of its one layer, as a model
        has them. norm_init: how the scale of a norm begins.
        """
        yield dataclasses.replace(FC, axes="E, A").placed(sizes)
        if self.has_embed:
            yield EMBED.placed(sizes)
        for spec in layers:
            # Attention takes an embedding and a hidden state, each normed, side by side.
            if spec.name == "layers.{i}.attention.qkv":
                norm = ParamSpec("hidden_norm.scale", "E", "hidden_norm.weight", norm_init)
                yield norm.placed(sizes, spec.layer)
                assert not isinstance(spec.source, str)
                parts = (p._replace(axes=p.axes.replace("E", "E+E")) for p in spec.source)
                spec = dataclasses.replace(spec, axes="K G+2 D, E+E", source=tuple(parts))
            yield spec
        yield ParamSpec("norm.scale", "E", "model.norm.weight", norm_init).placed(sizes)
        if self.has_lm_head:
            tokens = "W" if self.draft_tokens else "V"
            head = ParamSpec("lm_head.weight", f"{tokens}, E", "lm_head.weight", split=tokens)
            yield head.placed(sizes)

    def keeps(self, record: Record, hidden_size: int) -> Record:
        """Return what the cache holds for a head whose layer alone would keep this record."""
        return _with_hidden(record, hidden_size)

    def scratch(self, step: StepSizes, hidden_size: int, vocab_size: int) -> Scratch:
        """Return what a step allocates for a head beside its layer: the model's hidden states,
        joined ones, and pairs; guesses over the whole vocabulary, and which entry is the first in a
        slot.
        """
        widest = 2 * STATES * self.target_hidden_size + 8 * hidden_size
        guesses = 4 * step.sequences * (vocab_size + self.draft_vocab_size + step.tokens)
        return Scratch(shared=step.rows * 2 * widest + guesses)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """The part of a ModelConfig of one layer that makes it an MTP head: `ModelConfig.draft_head`.

    target_hidden_size, target_layers: of the model that it guesses for, in whose files it lies.
    """

    target_hidden_size: int
    target_layers: int

    title: ClassVar[str] = "MTP head"
    aux_layers: ClassVar[tuple[int, ...]] = ()  # it takes what the model gives to its own head
    has_embed: ClassVar[bool] = False
    has_lm_head: ClassVar[bool] = False

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a head's axes by their letters: none beside the model's."""
        return {}

    def params(
        self, sizes: Mapping[str, int], layers: Iterable[ParamSpec], norm_init: Init
    ) -> Iterator[ParamSpec]:
        """Yield its parameters: see HeadConfig.params. It embeds and guesses by the model's."""
        for name in ("embed_norm", "hidden_norm"):
            yield ParamSpec(f"{name}.scale", "E", f"{name}.weight", norm_init).placed(sizes)
        yield FC.placed(sizes)
        yield from layers
        yield ParamSpec("norm.scale", "E", "model.norm.weight", norm_init).placed(sizes)

    def keeps(self, record: Record, hidden_size: int) -> Record:
        """Return what the cache holds for a head whose layer alone would keep this record."""
        return _with_hidden(record, hidden_size)

    def scratch(self, step: StepSizes, hidden_size: int, vocab_size: int) -> Scratch:
        """Return what a step allocates for a head beside its layer: the model's hidden states, and
        pairs of them with embeddings; guesses over the vocabulary, and which entry is the first in
        a slot.
        """
        guesses = 4 * step.sequences * (vocab_size + step.tokens)
        return Scratch(shared=step.rows * 20 * hidden_size + guesses)


def _with_hidden(record: Record, hidden_size: int) -> Record:
    hidden = Field(TARGET_HIDDEN, (hidden_size,), split=0)
    return dataclasses.replace(record, fields=(*record.fields, hidden))
