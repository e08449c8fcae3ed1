"""What the rules do to whole matrices: orthogonalisation, symmetric products, bases, and stacks of equal shapes."""
