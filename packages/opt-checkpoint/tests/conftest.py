"""What all tests of the package share: the worlds they run in, and how often random tests repeat."""

import pytest
from checkpoint_ranks import RankPool
from tiers import NIGHT


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Processes to be the ranks of small worlds, started when first needed and used again."""
    return RankPool()


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether fault tests run at their full counts: at night."""
    return NIGHT
