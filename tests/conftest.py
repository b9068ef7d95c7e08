"""One thread a worker: two workers share two cores, and results do not depend on the count.

Every test begins with the same seed, so that none depends on which ran before it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SCIPY_ARRAY_API"] = "1"  # scikit-learn skips one of its checks without it

import tempfile

os.environ["DEEPSIMPLEX_DATA"] = tempfile.mkdtemp(prefix="deepsimplex-test-")  # never the user's

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
