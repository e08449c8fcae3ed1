"""Names of `megatron.core.optimizer.qk_clip`: each says what to write instead."""

from typing import NoReturn

from opt_stack.megatron.absent import absent


def __getattr__(name: str) -> NoReturn:
    absent(name, __name__)
