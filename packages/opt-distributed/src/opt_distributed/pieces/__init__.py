"""What a step updates: pieces of parameters, with the sources of their gradients, their main values and exchanges.

For packages that build the units of a step.
"""

from opt_distributed.pieces.dtensor import FullySharded, LaidOutGrads, is_first_replica, local, mesh_comms
from opt_distributed.pieces.exchange import ComputeStage
from opt_distributed.pieces.offload import HostMain, HostSide
from opt_distributed.pieces.piece import (
    FP16,
    CodedMain,
    Main,
    Numbers,
    OwnedPiece,
    Ready,
    Update,
    init_state,
    make_main,
)
from opt_distributed.pieces.quantized import QuantizedMain, QuantizedSource
from opt_distributed.pieces.sources import (
    BufferedGrads,
    OwnGrads,
    PeerSums,
    ReducedMainGrads,
    Source,
    check_dense,
    check_marks,
    check_unfused,
    is_sparse,
    marked_ids,
)

__all__ = [
    "FP16", "BufferedGrads", "CodedMain", "ComputeStage", "FullySharded", "HostMain", "HostSide", "LaidOutGrads",
    "Main", "Numbers", "OwnGrads", "OwnedPiece", "PeerSums", "QuantizedMain", "QuantizedSource", "Ready",
    "ReducedMainGrads", "Source", "Update", "check_dense", "check_marks", "check_unfused", "init_state",
    "is_first_replica", "is_sparse", "local", "make_main", "marked_ids", "mesh_comms",
]  # fmt: skip
