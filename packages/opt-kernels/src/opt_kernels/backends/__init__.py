"""Sweeps over all elements of a step, in four versions. `dispatch` chooses the version that runs; `kept` holds what
steps reuse while no tensor has moved."""
