import pytest
from ranks import Pools


@pytest.fixture(scope="session")
def pools():
    pools = Pools()
    yield pools
    pools.close()
