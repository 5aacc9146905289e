"""DraftModel: the weights of what guesses for a model, which a session serves beside it."""

from typing import Any

from jpaged.checkpoint.load import load_params
from jpaged.config import EngineConfig, has_draft_model
from jpaged.errors import ConfigError, UnsupportedError
from jpaged.models.config import ModelConfig
from jpaged.models.eagle import HeadConfig, fitted
from jpaged.models.params import Params
from jpaged.models.quantized import experts_are_plain
from jpaged.runtime.choices import Choices, choose
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import DraftOf, dtype_of
from jpaged.runtime.weights import ServingWeights, as_params
from jpaged.types import PyTree


class DraftModel:
    """A smaller model, or a head of the model, that guesses for it. params: those bound now.
    weights: as they are served. is_own: read from a folder, and so kept between calls.

    It decides no token, so new weights of it leave every prefix in the cache; until what they
    compute has taken the place of what the old ones did, fewer guesses come true.
    """

    def __init__(self, params: Params, weights: ServingWeights, *, target: ModelConfig, own: bool):
        self.is_own, self.target = own, target
        self.params: Params | None = _fitted(params, target)
        self.model_config = self.params.config
        self.weights = weights

    def accept(self, params: PyTree) -> Params:
        """Weights of any form as Params that can be bound; ConfigError where they cannot be."""
        fresh = as_params(params, None if isinstance(params, Params) else self.model_config)
        fresh = _fitted(fresh, self.target)
        if fresh.config != self.model_config:
            own = self.model_config
            raise ConfigError(f"draft params of another architecture: {fresh.config} is not {own}")
        self.weights.check_dtypes(fresh)
        return fresh

    def choices(self, config: EngineConfig, where: Placement) -> Choices:
        """Return what computes its steps. config: resolved for the model that it guesses for."""
        assert self.params is not None
        dtype = self.weights.dtype or dtype_of(self.params)
        is_plain = experts_are_plain(self.params) and not self.weights.quantization
        return choose(self.model_config, config, where, dtype, is_plain)

    def tree(self) -> DraftOf:
        """The model and its serving tree."""
        assert self.params is not None, "bind weights first"
        return self.model_config, self.weights.tree(self.params)


def no_head(config: ModelConfig) -> ModelConfig:
    """The architecture of a model; ConfigError for that of a head."""
    if config.is_head:
        raise ConfigError(
            "an EAGLE-3 head is no model: pass it as speculative={'method': 'eagle', 'model': ...} "
            "of the model that it guesses for"
        )
    return config


def _fitted(params: Params, target: ModelConfig) -> Params:
    """Those of a head for the model that it is of; others as they are."""
    config = params.config
    if not isinstance(config, HeadConfig):
        return params
    return Params(dict(params), fitted(config, target), params.source)


def draft_model(
    draft: Params | None, target: ModelConfig, config: EngineConfig, where: Placement, dtype: Any
) -> DraftModel | None:
    """What guesses for a model by a resolved config; None where no model does. draft: weights, None
    reads those of the config's folder. dtype: of the model. ConfigError where it cannot guess for
    this model.
    """
    if not has_draft_model(config):
        if draft is not None:
            raise ConfigError("draft weights need speculative={'method': 'draft' or 'eagle'}")
        return None
    assert config.speculative is not None and config.max_model_len is not None
    asked, is_own = config.speculative, draft is None
    if asked.method == "eagle" and where.axis_size > 1:
        raise UnsupportedError(
            f"speculative: method='eagle' on {where.axis_size} devices that share the model: only "
            "on one; method='draft' or 'ngram' runs there"
        )
    if draft is None:
        if asked.model is None:
            raise ConfigError(
                f"speculative: method={asked.method!r} needs a model: a folder, or weights as "
                "LLM(speculative={'model': ...}) or generate(draft=...)"
            )
        mesh: Any = where.mesh
        draft = load_params(asked.model, dtype=config.dtype, mesh=mesh)
    own, named = draft.config, asked.model or "weights"
    if asked.method == "eagle":
        if not own.is_head:
            raise UnsupportedError(
                f"speculative: method='eagle': {named} of {own.family} is no EAGLE-3 head; a model "
                "guesses with method='draft'"
            )
        # A head joins its hidden states with the model's: it is served in their dtype, and plain.
        return DraftModel(draft, ServingWeights(where, str(dtype)), target=target, own=is_own)
    if own.is_head:
        raise ConfigError(f"speculative: method='draft': {named} is an EAGLE-3 head: use 'eagle'")
    if own.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft model: vocab_size={own.vocab_size}, the model has {target.vocab_size}: a draft "
            "needs the very same vocabulary"
        )
    if own.max_position_embeddings < config.max_model_len:
        raise ConfigError(
            f"draft model: max_position_embeddings={own.max_position_embeddings} is below "
            f"max_model_len={config.max_model_len}: lower max_model_len"
        )
    weights = ServingWeights(where, config.dtype, config.quantization)
    return DraftModel(draft, weights, target=target, own=is_own)
