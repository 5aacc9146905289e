"""The smallest mixer with a state, in a tiny model that has attention too: what the cache and the
engine do for states is tested with it, whatever families have them.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec
from jpaged.models.record import Field, Record
from jpaged.models.rows import Rows, Slots, State
from kernels_pallas.packed_rows import PackedRows
from tests.tiny import CONFIG


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """S_t = a_t S_(t-1) + k_t v_t^T and o_t = S_t^T q_t for each of num_heads J heads, where S is
    [key_dim, value_dim] and a, k, v, q come of a causal convolution over `width` inputs.
    """

    num_heads: int = 2
    key_dim: int = 4
    value_dim: int = 8
    width: int = 3
    rope: None = None

    @property
    def channels(self) -> int:
        """C: of a head, a gate, a key, a query and a value."""
        return 1 + 2 * self.key_dim + self.value_dim

    @property
    def sizes(self) -> dict[str, int]:
        return {"J": self.num_heads, "C": self.channels, "D": self.value_dim, "W": self.width}

    def params(self) -> tuple[ParamSpec, ...]:
        return (
            ParamSpec("mixer.in", "J C, E", "mixer.in.weight", "normal", "J"),
            ParamSpec("mixer.taps", "J C W", "mixer.taps", "normal", "J"),
            ParamSpec("mixer.out", "E, J D", "mixer.out.weight", "residual", "J"),
        )

    def keeps(self) -> tuple[Record, ...]:
        state = Field("state", (self.num_heads, self.key_dim, self.value_dim), 0, jnp.float32)
        inputs = Field("inputs", (self.width - 1, self.num_heads, self.channels), split=1)
        replayed = tuple(
            Field(name, (self.num_heads, self.channels), 0, dtype)
            for name, dtype in (("convolved", jnp.float32), ("inputs", None))
        )
        return (Record(fields=(state, inputs), per="block", replayed=replayed),)

    def replay(self, tokens: State, pool: State, rows: PackedRows, step: StepContext) -> State:
        convolved, u = tokens["convolved"], tokens["inputs"]
        packed = Rows(
            start_loc_S1=rows.query_start_loc_S1,
            first_S=rows.start_S,
            row_T=rows.row_of(u.shape[0]),
            length=None,
        )
        slots = Slots(pool=pool, read_S=rows.read_S, written_S=rows.write_S)
        old = slots.read()
        _, state = scan(convolved, old["state"], packed)
        return slots.written({"state": state, "inputs": last_inputs(u, old["inputs"], packed)})

    def scratch(self, step: StepSizes) -> Scratch:
        of_row = 4 * self.num_heads * self.key_dim * self.value_dim
        rows = step.sequences + step.tokens
        return Scratch(shared=step.rows * 16 * self.num_heads * self.channels + 4 * rows * of_row)

    def served(self, devices: int) -> Self:
        if self.num_heads % devices:
            raise ConfigError(f"num_heads={self.num_heads} do not split over {devices} devices")
        return self

    def share(self, devices: int) -> Self:
        return dataclasses.replace(self, num_heads=self.num_heads // devices)

    def build(self, weights: Parameters) -> "Recurrent":
        return Recurrent(
            inputs=Linear.of(weights["mixer.in"]),
            taps=weights["mixer.taps"].value,
            out=Linear.of(weights["mixer.out"]),
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrent:
    inputs: Linear
    taps: Array
    out: Linear
    config: RecurrentConfig = dataclasses.field(metadata={"static": True})

    def __call__(
        self, x: Array, step: StepContext, rotary: None, kv: KVView, places: tuple[Place, ...]
    ) -> tuple[Array, KVView]:
        (place,) = places
        old, rows = kv.state(place), kv.rows(place)
        u = self.inputs(x, step)
        u_TJC = u.reshape(-1, *u.shape[-2:])
        c_TJC = convolution(u_TJC, self.taps, old["inputs"], rows)
        o_TJD, state = scan(c_TJC, old["state"], rows)
        new = {"state": state, "inputs": last_inputs(u_TJC, old["inputs"], rows)}
        kv = kv.with_state(place, new)
        kv = kv.with_replayed(place, {"convolved": c_TJC, "inputs": u_TJC})
        return self.out(o_TJD.astype(x.dtype).reshape(*x.shape[:-1], -1), step), kv


def convolution(u_TJC: Array, taps_JCW: Array, old_SWJC: Array, rows: Rows) -> Array:
    """A causal convolution over each row, in f32. old_SWJC: the W - 1 inputs before it."""
    width = taps_JCW.shape[-1]
    token_T, y = jnp.arange(rows.num_tokens), jnp.zeros(u_TJC.shape, jnp.float32)
    row_T = jnp.minimum(rows.row_T, rows.num_rows - 1)
    for back in range(width):
        here = jnp.take(u_TJC, token_T - back, axis=0, mode="clip")
        before = old_SWJC[row_T, jnp.clip(width - 1 - back + rows.offset_T, 0, width - 2)]
        is_here_T = rows.offset_T >= back
        past = jnp.where(is_here_T[:, None, None], here, before)
        y += past.astype(jnp.float32) * taps_JCW[None, ..., width - 1 - back].astype(jnp.float32)
    return jax.nn.silu(y)


def last_inputs(u_TJC: Array, old_SWJC: Array, rows: Rows) -> Array:
    """The last W - 1 inputs of each row, those of steps before it among them."""
    kept, new = old_SWJC.shape[1], []
    for i in range(kept):
        back_S = rows.lens_S - kept + i  # the index in the row of this one
        here = jnp.take(u_TJC, rows.start_loc_S1[:-1] + back_S, axis=0, mode="clip")
        before = old_SWJC[jnp.arange(rows.num_rows), jnp.clip(kept + back_S, 0, kept - 1)]
        new.append(jnp.where((back_S >= 0)[:, None, None], here, before))
    return jnp.stack(new, axis=1)


def scan(c_TJC: Array, state_SJKD: Array, rows: Rows) -> tuple[Array, Array]:
    """Token after token: outputs [T, J, D], and the state of each row after its last token."""
    key_dim, rows_S = state_SJKD.shape[2], rows.num_rows

    def one(states: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
        row, c_JC = token
        a, k, q, v = jnp.split(c_JC, [1, 1 + key_dim, 1 + 2 * key_dim], axis=-1)
        old = jnp.take(states, jnp.minimum(row, rows_S - 1), axis=0)
        new = jax.nn.sigmoid(a + 2)[..., None] * old + k[..., :, None] * v[..., None, :]
        states = states.at[row].set(new, mode="drop")
        return states, jnp.sum(new * q[..., :, None], axis=1)

    states, o_TJD = jax.lax.scan(one, state_SJKD, (rows.row_T, c_TJC))
    return o_TJD, states


def hybrid(recurrent: tuple[int, ...] = (0, 1), num_layers: int = 3, **changes: Any) -> ModelConfig:
    """The tiny model of so many layers, some of which have a state in place of attention."""
    model = dataclasses.replace(CONFIG, num_layers=num_layers, **changes)
    mixer: Any = RecurrentConfig()  # the types of layers name those of families alone
    layers: list[LayerConfig] = [
        dataclasses.replace(layer, mixer=mixer) if i in recurrent else layer
        for i, layer in enumerate(model.layers)
    ]
    return dataclasses.replace(model, layers=layers)


HYBRID = hybrid()
