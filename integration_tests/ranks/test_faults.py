"""Over gloo processes: ranks that fail."""

import pytest
from laid_out_ranks import raise_in_backward
from processes import run_processes


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_a_rank_that_raises_in_backward_leaves_the_others_an_error_and_their_weights(wrapped: bool) -> None:
    waiting, raised = run_processes(2, raise_in_backward, wrapped)
    assert (raised.error, raised.changed) == ("RuntimeError: no memory left on this rank", False)
    assert waiting.error.startswith("CollectiveError: step 2, ")
    assert "gradient" in waiting.error
    assert "bucket 0" in waiting.error
    assert not waiting.changed
