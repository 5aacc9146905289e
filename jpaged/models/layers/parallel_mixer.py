"""Attention and Mamba-2 side by side in one layer (Falcon-H1)."""

import dataclasses
from typing import Self

import jax
from jax import Array

from jpaged.checks import positive
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.arithmetic import added, scaled
from jpaged.models.layers.attention import Attention, AttentionConfig
from jpaged.models.layers.linear import StepContext
from jpaged.models.layers.mamba import Mamba, MambaConfig
from jpaged.models.layers.rope import RopeConfig, Rotary
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec
from jpaged.models.record import Record
from jpaged.models.rows import State
from kernels_pallas.packed_rows import PackedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelMixerConfig:
    """Attention and Mamba-2 that take the same x and whose results are added. Multipliers are of
    what either takes and gives.
    """

    attention: AttentionConfig
    mamba: MambaConfig
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    mamba_in_multiplier: float = 1.0
    mamba_out_multiplier: float = 1.0

    def __post_init__(self) -> None:
        positive(
            attention_in_multiplier=self.attention_in_multiplier,
            attention_out_multiplier=self.attention_out_multiplier,
            ssm_in_multiplier=self.mamba_in_multiplier,
            ssm_out_multiplier=self.mamba_out_multiplier,
        )

    @property
    def rope(self) -> RopeConfig | None:
        """The rotation of its attention."""
        return self.attention.rope

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        return self.attention.sizes | self.mamba.sizes

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer."""
        return *self.attention.params(), *self.mamba.params()

    def keeps(self) -> tuple[Record, ...]:
        """Return what the cache holds for it: keys and values of each token, then a state."""
        return *self.attention.keeps(), *self.mamba.keeps()

    def replay(self, tokens: State, pool: State, rows: PackedRows, step: StepContext) -> State:
        """Return the pool with the states of Mamba-2 after these tokens."""
        return self.mamba.replay(tokens, pool, rows, step)

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it."""
        both = self.attention.scratch(step) + self.mamba.scratch(step)
        return both + Scratch(shared=8 * step.rows * step.hidden_size)

    def served(self, devices: int) -> Self:
        """Return an equal mixer that so many devices can share; ConfigError where there is none."""
        attention, mamba = self.attention.served(devices), self.mamba.served(devices)
        return dataclasses.replace(self, attention=attention, mamba=mamba)

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of a served one."""
        attention, mamba = self.attention.share(devices), self.mamba.share(devices)
        return dataclasses.replace(self, attention=attention, mamba=mamba)

    def build(self, weights: Parameters) -> "ParallelMixer":
        """Return the module of these parameters."""
        attention, mamba = self.attention.build(weights), self.mamba.build(weights)
        return ParallelMixer(attention=attention, mamba=mamba, config=self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelMixer:
    """See ParallelMixerConfig."""

    attention: Attention
    mamba: Mamba
    config: ParallelMixerConfig = dataclasses.field(metadata={"static": True})

    def __call__(
        self,
        x: Array,
        step: StepContext,
        rotary: Rotary | None,
        kv: KVView,
        places: tuple[Place, ...],
    ) -> tuple[Array, KVView]:
        """x [..., E]. rotary: of config.rope. places: where the cache holds what `keeps` says."""
        of_keys, of_state = places
        c = self.config
        taken = scaled(x, c.mamba_in_multiplier)
        scanned, kv = self.mamba(taken, step, None, kv, (of_state,))
        taken = scaled(x, c.attention_in_multiplier)
        attended, kv = self.attention(taken, step, rotary, kv, (of_keys,))
        y = scaled(scanned, c.mamba_out_multiplier)
        return added(y, scaled(attended, c.attention_out_multiplier)), kv
