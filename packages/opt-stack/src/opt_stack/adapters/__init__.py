"""The stack inside other trainers: Accelerate, the Hugging Face Trainer."""

from opt_stack.adapters.deferred import DeferredOptimizer, StackFactory

__all__ = ["DeferredOptimizer", "StackFactory"]
