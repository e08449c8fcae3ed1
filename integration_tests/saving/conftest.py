"""A saved run that tests of resuming begin with."""

from pathlib import Path

import pytest
from partly_trained import PartlyTrained, begin, state_of, train

from opt_checkpoint import save
from opt_stack import Optimizer


@pytest.fixture
def plain_run(tmp_path: Path) -> tuple[PartlyTrained, Optimizer, Path]:
    """A plain run after three steps."""
    model, optimizer = begin("replicated fp32")
    train(model, optimizer, range(3))
    save(state_of(model, optimizer), tmp_path / "saved")
    return model, optimizer, tmp_path / "saved"
