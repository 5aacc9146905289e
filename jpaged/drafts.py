"""DraftModel: the weights of what guesses for a model, which a session serves beside it."""

from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jpaged.checkpoint.load import load_params
from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig, has_draft_model
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.head_modules import fitted
from jpaged.models.params import Params
from jpaged.models.quantized import experts_are_plain
from jpaged.runtime.choices import Choices, choose, interleaves_at
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import DraftOf
from jpaged.runtime.weights import ServingWeights, as_params
from jpaged.types import PyTree


class DraftModel:
    """A smaller model, or a head of the model, that guesses for it. params: those bound now.
    weights: as they are served. is_own: read from a folder, and so kept between calls.

    It decides no token, so new weights of it leave every prefix in the cache; until what they
    compute has taken the place of what the old ones did, fewer guesses come true.
    """

    def __init__(
        self, params: Params, weights: ServingWeights, *, target: ModelConfig, is_own: bool
    ):
        self.is_own, self.target = is_own, target
        self.params: Params | None = _fitted(params, target)
        self.model_config = self.params.config
        self.weights = weights

    def accept(self, params: PyTree) -> Params:
        """Weights of any form as Params that can be bound; ConfigError where they cannot be."""
        fresh = as_params(params, None if isinstance(params, Params) else self.model_config)
        fresh = _fitted(fresh, self.target)
        if fresh.config != self.model_config:
            current = self.model_config
            raise ConfigError(
                f"draft params of another architecture: {fresh.config} is not {current}"
            )
        self.weights.check_dtypes(fresh)
        return fresh

    def choices(self, config: EngineConfig, placement: Placement) -> Choices:
        """Return what computes its steps. config: resolved for the model that it guesses for."""
        assert self.params is not None
        first = self.params["fc" if self.model_config.is_head else "embed"]["weight"]
        dtype = self.weights.dtype or first.dtype
        is_plain = experts_are_plain(self.params) and not self.weights.quantization
        return choose(self.model_config, config, placement, dtype, is_plain)

    def modules(self) -> DraftOf:
        """Return the model and the modules that serve it."""
        assert self.params is not None, "bind weights first"
        return self.model_config, self.weights.modules(self.params)


def no_head(config: ModelConfig) -> ModelConfig:
    """Return the architecture of a model; ConfigError for that of a head."""
    check_combination(Facts(model=config))
    return config


def _fitted(params: Params, target: ModelConfig) -> Params:
    """Return those of a head for the model that it is of; others as they are."""
    config = params.config
    if not config.is_head:
        return params
    return Params(dict(params), fitted(config, target), params.source)


def draft_model(
    draft: Params | None,
    target: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    dtype: DTypeLike,
    source: Path | None,
) -> DraftModel | None:
    """Return what guesses for a model by a resolved config; None where no model does. draft:
    weights, None reads those of the config's folder. dtype, source: of the model. ConfigError where
    it cannot guess for this model.
    """
    asked, is_passed = config.speculative, draft is not None
    is_mtp = asked is not None and asked.method == "mtp"
    folder = None if asked is None else asked.model or (source if is_mtp else None)
    has_weights = is_passed or (is_mtp and folder is not None)
    devices = placement.axis_size
    check_combination(Facts(config=config, devices=devices, has_draft_weights=has_weights))
    if not has_draft_model(config):
        return None
    assert asked is not None
    if draft is None:
        assert folder is not None
        mesh: Any = placement.mesh
        if is_mtp:  # plain, as it is served
            draft = load_params(folder, dtype=config.dtype, mesh=mesh, mtp=True, dequantize=True)
        else:
            draft = load_params(folder, dtype=config.dtype, mesh=mesh)
    facts = Facts(config=config, model=target, draft=draft.config, devices=devices)
    check_combination(facts)
    if draft.config.is_head:
        # A head joins its hidden states with the model's: it is served in their dtype, and plain.
        weights = ServingWeights(placement, str(dtype))
    else:
        draft_dtype = config.dtype or draft["embed"]["weight"].dtype
        weights = ServingWeights(
            placement,
            config.dtype,
            config.quantization,
            interleaved=interleaves_at(placement, draft_dtype, config),
        )
    return DraftModel(draft, weights, target=target, is_own=not is_passed)
