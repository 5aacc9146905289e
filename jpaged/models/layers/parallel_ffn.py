"""An MLP and a mixture of experts side by side, each with norms of its own (Gemma 4's 26B-A4B)."""

import dataclasses
from typing import Self

import jax
from jax import Array

from jpaged.models.layers.arithmetic import added
from jpaged.models.layers.experts import Experts, ExpertsConfig, ExpertSharing, Routed
from jpaged.models.layers.linear import StepContext
from jpaged.models.layers.mlp import MLP, MLPConfig
from jpaged.models.layers.norm import PLAIN_NORM, NormConfig, RMSNorm
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec
from jpaged.models.record import Record

MLP_NORM = "mlp.dense_post_norm.scale"
EXPERTS_NORM, EXPERTS_POST_NORM = "mlp.experts_norm.scale", "mlp.experts_post_norm.scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelFFNConfig:
    """An MLP and experts whose results are added. norm: what the experts take and what both give
    is normed; the layer norms what the MLP takes.
    """

    mlp: MLPConfig
    experts: ExpertsConfig
    norm: NormConfig = PLAIN_NORM

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        return self.mlp.sizes | self.experts.sizes

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer."""
        init = self.norm.init
        return (
            *self.mlp.params(),
            ParamSpec(MLP_NORM, "E", "post_feedforward_layernorm_1.weight", init),
            ParamSpec(EXPERTS_NORM, "E", "pre_feedforward_layernorm_2.weight", init),
            *self.experts.params(),
            ParamSpec(EXPERTS_POST_NORM, "E", "post_feedforward_layernorm_2.weight", init),
        )

    def keeps(self) -> tuple[Record, ...]:
        """Return what the cache holds of each token; () where that is nothing."""
        return self.experts.keeps()

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it."""
        norms = Scratch(shared=step.rows * 12 * step.hidden_size)
        return self.mlp.scratch(step) + self.experts.scratch(step) + norms

    def served(self, devices: int, sharing: ExpertSharing) -> Self:
        """Return an equal part that so many devices can share."""
        return dataclasses.replace(self, experts=self.experts.served(devices, sharing))

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of it."""
        mlp, experts = self.mlp.share(devices), self.experts.share(devices)
        return dataclasses.replace(self, mlp=mlp, experts=experts)

    def build(self, weights: Parameters) -> "ParallelFFN":
        """Return the module of these parameters."""

        def norm(name: str) -> RMSNorm:
            return RMSNorm(scale=weights[name].value, config=self.norm)

        return ParallelFFN(
            mlp=self.mlp.build(weights),
            mlp_norm=norm(MLP_NORM),
            experts_norm=norm(EXPERTS_NORM),
            experts=self.experts.build(weights),
            experts_post_norm=norm(EXPERTS_POST_NORM),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelFFN:
    """mlp_norm: of what the MLP gives. experts_norm, experts_post_norm: of what the experts take
    and give.
    """

    mlp: MLP
    mlp_norm: RMSNorm
    experts_norm: RMSNorm
    experts: Experts
    experts_post_norm: RMSNorm

    def __call__(
        self, x: Array, step: StepContext, stream: Array, routed: Routed | None = None
    ) -> Array:
        """x [..., E]: what the MLP takes. stream [..., E]: the residual stream that x is the norm
        of, which the experts norm by themselves and their router sees as it is. routed: see
        Experts.
        """
        y = self.mlp_norm(self.mlp(x, step))
        experts = self.experts(self.experts_norm(stream), step, routed_by=stream, routed=routed)
        return added(y, self.experts_post_norm(experts))
