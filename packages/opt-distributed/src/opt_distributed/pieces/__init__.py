"""What a step updates: pieces of parameters, with the sources of their gradients, their main values and exchanges.

For packages that build the units of a step.
"""

from opt_distributed.pieces.coded_main import FP16, CodedMain
from opt_distributed.pieces.dtensor import is_dtensor, is_first_replica, local, mesh_comms
from opt_distributed.pieces.exchange import ComputeStage, init_state
from opt_distributed.pieces.mains import Main, Numbers, make_main
from opt_distributed.pieces.offload import HostMain, HostSide, StepNumbers
from opt_distributed.pieces.piece import OwnedPiece, Ready
from opt_distributed.pieces.quantized import QuantizedMain, QuantizedSource
from opt_distributed.pieces.sources import BufferedGrads, LaidOutGrads, OwnGrads, ReducedMainGrads, Source, check_dense

__all__ = [
    "FP16", "BufferedGrads", "CodedMain", "ComputeStage", "HostMain", "HostSide", "LaidOutGrads", "Main", "Numbers",
    "OwnGrads", "OwnedPiece", "QuantizedMain", "QuantizedSource", "Ready", "ReducedMainGrads", "Source", "StepNumbers",
    "check_dense", "init_state", "is_dtensor", "is_first_replica", "local", "make_main", "mesh_comms",
]  # fmt: skip
