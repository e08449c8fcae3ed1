"""What all tests of the package share: the worlds they run in, and how often random tests repeat."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# Worker processes import what they run by name, so the folder of the workers must be on the path of both.
sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_ranks import RankPool
from tiers import NIGHT

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Processes to be the ranks of small worlds, started when first needed and used again."""
    return RankPool()


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether fault tests run at their full counts: at night."""
    return NIGHT
