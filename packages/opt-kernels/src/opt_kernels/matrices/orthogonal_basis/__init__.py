"""Orthogonal bases: the eigenvectors of a symmetric matrix, computed once and then tracked while the matrix changes."""
