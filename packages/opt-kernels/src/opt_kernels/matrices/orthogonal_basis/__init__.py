"""Orthogonal bases: the eigenvectors of a symmetric matrix, found once and then followed as the matrix moves."""
