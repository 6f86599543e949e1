import os

import pytest
import torch
from ranks import Pools

# The tests' tensors are tiny. A second thread has nothing to do for them but to wait, which it does by spinning, on the
# core that a rank needs. The same for the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def pools():
    pools = Pools()
    yield pools
    pools.close()
