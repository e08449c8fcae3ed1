"""What a step updates: pieces of parameters, with the sources of their gradients, their main values and exchanges.

For packages that build the units of a step.
"""

from opt_distributed.pieces.averages import AVERAGES, NO_AVERAGES, WeightAverages
from opt_distributed.pieces.dtensor import DTensorGrads, FullySharded, is_first_replica, local, mesh_comms
from opt_distributed.pieces.exchange import ComputeStage
from opt_distributed.pieces.offload import HostMain, HostSide
from opt_distributed.pieces.piece import OwnedPiece, Ready, Update, init_state
from opt_distributed.pieces.quantized import QuantizedMain, QuantizedSource
from opt_distributed.pieces.sources import (
    BufferedGrads,
    ParamGrads,
    PeerSums,
    Publisher,
    ReducedMainGrads,
    Source,
    check_dense,
    check_marks,
    check_unfused,
    is_sparse,
    marked_ids,
)
from opt_distributed.pieces.streamed import Streamed

__all__ = [
    "AVERAGES", "NO_AVERAGES", "BufferedGrads", "ComputeStage", "DTensorGrads", "FullySharded", "HostMain",
    "HostSide", "OwnedPiece", "ParamGrads", "PeerSums", "Publisher", "QuantizedMain", "QuantizedSource", "Ready",
    "ReducedMainGrads", "Source", "Streamed", "Update", "WeightAverages", "check_dense", "check_marks", "check_unfused",
    "init_state", "is_first_replica", "is_sparse", "local", "marked_ids", "mesh_comms",
]  # fmt: skip
