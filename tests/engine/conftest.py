"""Every engine test runs with one dispatch in flight and with two."""

import pytest


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param
