"""One thread a worker: two workers share two cores, and results do not depend on the count."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
