"""resolve: the config of a start with every setting filled in, and the choices that go with it."""

import dataclasses
from typing import Any

from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.models.config import ModelConfig
from jpaged.runtime.choices import Choices, choose
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import count_of
from kernels_cpu.rates import rates

# Deterministic products are the default while they take at most so much of the time of XLA's. Their
# share of a batch's time makes that at most 15% of it.
MOST_COST = 1.2


def resolve(
    model: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    dtype: Any,
    is_plain: bool = True,
) -> tuple[EngineConfig, Choices]:
    """Return the config resolved for a model at a place, and what computes its steps.

    What multiplies and attends decides what deterministic serving costs, and so whether it is the
    default. dtype: of the weights. is_plain: the params' experts are arrays, not in 8 or 4 bits.
    Raises ConfigError and UnsupportedError.
    """
    processes = count_of(placement.mesh)
    check_combination(Facts(config=config, devices=placement.axis_size, processes=processes))
    on_cpu = placement.device.platform == "cpu"
    resolved = config.resolve(model, batch_invariant=True, on_cpu=on_cpu)
    choices = choose(model, resolved, placement, dtype, is_plain and not config.quantization)
    check_combination(Facts(config=config, states_are_alike=choices.states_are_alike))
    if not resolved.deterministic:
        return resolved, choices
    if not choices.is_batch_invariant:
        resolved = config.resolve(model, on_cpu=on_cpu)
    elif config.deterministic is None and rates().worst > MOST_COST:
        resolved = dataclasses.replace(resolved, deterministic=False)
    return resolved, choices.for_config(resolved)
