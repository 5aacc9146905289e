"""Heads that guess for a model by its hidden states: of either kind, how they are fitted to a model
and bound to their weights.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jpaged.combinations import Facts, check_combination
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.draft_head import STATES, HeadConfig
from jpaged.models.eagle import EagleHead, bind_eagle
from jpaged.models.forward import Forward, bind
from jpaged.models.mtp import MTPHead, bind_mtp

Head = EagleHead | MTPHead


def fitted(config: ModelConfig, target: ModelConfig) -> ModelConfig:
    """Return the config of a head with the layers of a model that it takes; ConfigError where the
    head is not for that model.
    """
    head = config.draft_head
    assert head is not None
    check_combination(Facts(model=target, draft=config))
    if not isinstance(head, HeadConfig):
        return config
    layers = head.aux_layers or (2, target.num_layers // 2, target.num_layers - 3)
    if len(layers) != STATES or not all(0 <= i <= target.num_layers for i in layers):
        raise ConfigError(
            f"EAGLE-3 head: hidden states of layers {layers}: must be {STATES} of the model's "
            f"{target.num_layers} (eagle_aux_hidden_state_layer_ids of its config.json)"
        )
    head = dataclasses.replace(head, aux_layers=tuple(layers))
    return dataclasses.replace(config, draft_head=head)


def bind_any(config: ModelConfig, tree: Mapping[str, Any]) -> Forward | Head:
    """Return the modules of a model, or of a head: see forward.bind."""
    if config.draft_head is None:
        return bind(config, tree)
    is_eagle = isinstance(config.draft_head, HeadConfig)
    return (bind_eagle if is_eagle else bind_mtp)(config, tree)
