"""The update sweep of every elementwise rule, made from its formula."""
