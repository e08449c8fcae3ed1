"""Operations on whole matrices: orthogonalisation, symmetric products, eigenbases, and stacks of equal shapes."""
