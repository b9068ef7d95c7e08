"""One thread a worker: two workers share two cores, and results do not depend on the count."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SCIPY_ARRAY_API"] = "1"  # scikit-learn skips one of its checks without it

import tempfile

os.environ["DEEPSIMPLEX_DATA"] = tempfile.mkdtemp(prefix="deepsimplex-test-")  # never the user's

import torch

torch.set_num_threads(1)
