"""Triton's kernels under its interpreter, as queued work of the fake accelerator."""

from functools import partial
from typing import Any

import pytest
import torch
from fake_accelerator import DeferredDevice

from opt_distributed.comm import device as devices
from opt_kernels.backends import tables


def queue_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue every kernel launch on the fake accelerator, and report whether it is capturing a graph."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    launch = interpreter.GridExecutor.__call__

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
        device = devices.device_of(torch.device("cpu"))
        if isinstance(device, DeferredDevice):
            device.mode.queue("kernel", partial(launch, kernel, *args, **kwargs), ())
        else:
            launch(kernel, *args, **kwargs)

    def is_capturing(device: torch.device) -> bool:
        found = devices.device_of(device)
        return isinstance(found, DeferredDevice) and found.mode.recording is not None

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(tables, "is_capturing", is_capturing)
