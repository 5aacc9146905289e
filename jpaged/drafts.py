"""DraftModel: the weights of a model that guesses for another, which a session serves beside it."""

from typing import Any

from jpaged.checkpoint.load import load_params
from jpaged.config import EngineConfig, has_draft_model
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.params import Params
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import DraftOf
from jpaged.runtime.weights import ServingWeights, as_params


class DraftModel:
    """Of one session. params: those bound now. weights: as they are served. is_own: read from a
    folder, and so kept between calls.

    It decides no token, so new weights of it leave every prefix in the cache; until what they
    compute has taken the place of what the old ones did, fewer guesses come true.
    """

    def __init__(self, params: Params, where: Placement, config: EngineConfig, *, is_own: bool):
        self.is_own = is_own
        self.model_config = params.config
        self.params: Params | None = params
        self.weights = ServingWeights(where, config.dtype, config.quantization)

    def accept(self, params: Any) -> Params:
        """Weights of any form as Params that can be bound; ConfigError where they cannot be."""
        fresh = as_params(params, None if isinstance(params, Params) else self.model_config)
        if fresh.config != self.model_config:
            own = self.model_config
            raise ConfigError(f"draft params of another architecture: {fresh.config} is not {own}")
        self.weights.check_dtypes(fresh)
        return fresh

    def tree(self) -> DraftOf:
        """The model and its serving tree."""
        assert self.params is not None, "bind weights first"
        return self.model_config, self.weights.tree(self.params)


def draft_model(
    draft: Params | None, target: ModelConfig, config: EngineConfig, where: Placement
) -> DraftModel | None:
    """What guesses for a model by a resolved config; None where no model does. draft: weights, None
    reads those of the config's folder. ConfigError where it cannot guess for this model.
    """
    if not has_draft_model(config):
        if draft is not None:
            raise ConfigError("draft weights need speculative={'method': 'draft'}")
        return None
    assert config.speculative is not None and config.max_model_len is not None
    is_own = draft is None
    if draft is None:
        if config.speculative.model is None:
            raise ConfigError(
                "speculative: method='draft' needs a model: a folder, or weights as "
                "LLM(speculative={'model': ...}) or generate(draft=...)"
            )
        mesh: Any = where.mesh
        draft = load_params(config.speculative.model, dtype=config.dtype, mesh=mesh)
    own = draft.config
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
    return DraftModel(draft, where, config, is_own=is_own)
