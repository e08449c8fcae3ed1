"""One kernel for all tensors, on GPUs or under the interpreter."""
