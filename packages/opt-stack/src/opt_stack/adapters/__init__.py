"""The stack inside other trainers: Accelerate, the Hugging Face Trainer."""

from opt_stack.adapters.deferred import DeferredOptimizer
from opt_stack.adapters.hf_trainer import StackFactory

__all__ = ["DeferredOptimizer", "StackFactory"]
