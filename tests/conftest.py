"""Settings of every test."""

from __future__ import annotations

import torch
from hypothesis import settings

# the tensors of a test are small: a second thread costs more than it gives
torch.set_num_threads(1)

# derandomized: a run in CI repeats on any desk
settings.register_profile("repository", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("repository")
