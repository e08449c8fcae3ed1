"""Descriptions of what a rank holds: sharded tensors and objects, nested states, optimizer state and groups."""
