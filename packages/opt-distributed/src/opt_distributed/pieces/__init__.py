"""What a step updates: pieces of parameters, with the sources of their gradients, their main values and exchanges.

For packages that build the units of a step.
"""

from opt_distributed.pieces.dtensor import is_dtensor, is_first_replica, local, mesh_comms
from opt_distributed.pieces.exchange import ComputeStage, init_state
from opt_distributed.pieces.mains import FP16, CodedMain, Main, Numbers, make_main
from opt_distributed.pieces.offload import HostMain, HostSide, StepNumbers
from opt_distributed.pieces.piece import OwnedPiece, Ready, Update
from opt_distributed.pieces.quantized import QuantizedMain, QuantizedSource
from opt_distributed.pieces.sources import (
    BufferedGrads,
    LaidOutGrads,
    OwnGrads,
    PeerSums,
    ReducedMainGrads,
    Source,
    check_dense,
    check_marks,
    marked_ids,
)

__all__ = [
    "FP16", "BufferedGrads", "CodedMain", "ComputeStage", "HostMain", "HostSide", "LaidOutGrads", "Main", "Numbers",
    "OwnGrads", "OwnedPiece", "PeerSums", "QuantizedMain", "QuantizedSource", "Ready", "ReducedMainGrads", "Source",
    "StepNumbers", "Update", "check_dense", "check_marks", "init_state", "is_dtensor", "is_first_replica", "local",
    "make_main", "marked_ids", "mesh_comms",
]  # fmt: skip
