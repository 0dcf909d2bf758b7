import pytest

from tests.optim.cases import EVERY, Case


@pytest.fixture(params=EVERY)
def case(request: pytest.FixtureRequest) -> Case:
    return EVERY[request.param]
