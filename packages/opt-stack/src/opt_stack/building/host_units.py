"""Units on the host: where their state is allocated, and how they are split to overlap copies with updates."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from opt_config import OnHost, Placement
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.host import HostComm
from opt_distributed.step.coded_main import CodedMain
from opt_distributed.step.compute import init_state
from opt_distributed.step.host_main import HostMain
from opt_distributed.step.host_side import HostSide, StepNumbers
from opt_distributed.step.mains import Main, Numbers, make_main
from opt_distributed.step.pieces import OwnedPiece
from opt_distributed.step.unit import Unit
from opt_kernels.hooks import HookedUpdate
from opt_kernels.rules.base import Needs, Rule
from opt_paramgroups import ParamId
from opt_stack.building.matrices import PlacedMatrix

PART_NUMEL = 1 << 24
"""Minimum number of elements of a part of a unit. One part is copied while the host updates another: at 1 << 24
elements, an update takes about 10 ms and a copy 2 ms."""


class HostBuilder:
    """Allocates main values and state on the device or the host. On a CPU these are the same place."""

    def __init__(self, placement: Placement, device: torch.device):
        self.placement = placement
        self.device = devices.device_of(device)
        self._numbers = StepNumbers(self.device)

    def comm(self, comm: Comm) -> Comm:
        """Return the same group for tensors on the host."""
        return HostComm(comm, self.device) if self.device.is_asynchronous and comm.size > 1 else comm

    def kept(
        self, numbers: Numbers, target: Tensor, rule: Rule, id: ParamId, placed: PlacedMatrix, *, on_host: bool
    ) -> tuple[Main | CodedMain | HostMain, dict[str, Tensor]]:
        """Return the main values of `target`, and the rule's state before the first step."""
        if not on_host or not self.device.is_asynchronous:
            near = _make(numbers, target)
            return near, init_state(rule, near.value(), id=id, matrix=placed.spec, stage=placed.stage)
        main = HostMain.of(numbers, target, self.device, _make)
        with self.device.on_host():
            return main, init_state(rule, main.moved.value(), id=id, matrix=placed.spec, stage=placed.stage)

    def parts(self, unit: Unit) -> Iterator[Unit]:
        """Split `unit` into parts with separate copies: while one part is updated, the next is copied.

        Yields one part if the unit's update is collective, if copies do not overlap, or if this rank has no pieces.
        """
        assert isinstance(self.placement, OnHost)
        placement = self.placement
        if not self.device.is_asynchronous:
            yield unit
            return
        meets = isinstance(unit.rule, HookedUpdate) or unit.rule.needs is Needs.MATRICES
        cuts = list(_cuts(unit, PART_NUMEL)) if placement.overlap and not meets else [unit.pieces]
        for number, pieces in enumerate(cuts):
            side = HostSide(
                pieces,
                self.device,
                self._numbers,
                overlap=placement.overlap,
                pin_grads=placement.pin_grads,
                pin_params=placement.pin_params,
            )
            is_last = number == len(cuts) - 1
            yield replace(unit, pieces=pieces, host=side, completes=unit.completes if is_last else ())


def _make(numbers: Numbers, target: Tensor) -> Main | CodedMain:
    return CodedMain.of(target) if numbers is Numbers.FP16_SCALED else make_main(numbers, target)


def _cuts(unit: Unit, part_numel: int) -> Iterator[list[OwnedPiece]]:
    pieces: list[OwnedPiece] = []
    for piece in unit.pieces:
        pieces.append(piece)
        if sum(one.main.shape.numel() for one in pieces) >= part_numel:
            yield pieces
            pieces = []
    if pieces or not unit.pieces:
        yield pieces
