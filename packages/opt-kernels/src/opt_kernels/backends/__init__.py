"""The sweeps over all elements of a step, in four versions; `dispatch` says which one runs."""
