"""What all tests of the package share: a small model, and where its module is found."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `stack_models`

torch.set_num_threads(1)
