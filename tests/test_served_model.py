"""ServedModel: which weights are served, also when new ones cannot be."""

import dataclasses
from typing import Any

import pytest

from jpaged.errors import ConfigError
from jpaged.runtime.weights import ServingWeights
from jpaged.served_model import ServedModel
from jpaged.served_pool import Size
from tests.tiny import ENGINE, config, make_params

MODEL = config(num_layers=1)
OLD, NEW, OLD_DRAFT, NEW_DRAFT = (make_params(seed, MODEL) for seed in range(4))


@pytest.fixture
def served() -> ServedModel:
    """A model with a draft model, whose pool has no engine yet."""
    speculative: Any = {"method": "draft"}
    settings = dataclasses.replace(ENGINE, speculative=speculative)
    made = ServedModel(OLD, settings, None, grows=True, draft=OLD_DRAFT)
    made.bind(OLD)
    return made


def bound(served: ServedModel) -> tuple[object, object]:
    assert served.draft is not None
    return served.params, served.draft.params


def test_new_weights_and_draft_weights(served: ServedModel) -> None:
    version = served.weights.version
    served.bind(NEW)
    assert bound(served) == (NEW, OLD_DRAFT) and served.weights.version == version + 1
    served.bind(NEW, draft=NEW_DRAFT)
    assert bound(served) == (NEW, NEW_DRAFT) and served.weights.version == version + 1


def test_weights_that_cannot_be_made_leave_the_old_ones(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the model's and the draft model's, whichever of them fails."""
    update = ServingWeights.update
    for failing in (NEW, NEW_DRAFT):

        def refuse(self: ServingWeights, params: Any, failing: Any = failing) -> bool:
            if params is failing:
                raise ConfigError("no room")
            return update(self, params)

        with monkeypatch.context() as patch, pytest.raises(ConfigError, match="no room"):
            patch.setattr(ServingWeights, "update", refuse)
            served.bind(NEW, draft=NEW_DRAFT)
        assert bound(served) == (OLD, OLD_DRAFT)
        served.pool.start(Size(8))
        assert served.pool.runner.weight_version == served.weights.version


def test_a_model_that_sleeps_takes_weights_for_later(served: ServedModel) -> None:
    served.pool.start(Size(8))
    served.sleep()
    with pytest.raises(ConfigError, match="sleeps: call wake"):
        served.check_awake()
    served.bind(NEW)
    assert served.params is NEW and served.pool.runner.params is None
    served.wake()
    served.check_awake()
    assert served.pool.runner.params is not None


def test_unbind_lets_go_of_what_the_caller_passed(served: ServedModel) -> None:
    served.pool.start(Size(8))
    served.unbind()
    assert bound(served) == (None, None) and served.pool.runner.params is None
    with pytest.raises(ConfigError, match="pass draft= again"):
        served.bind(OLD)
