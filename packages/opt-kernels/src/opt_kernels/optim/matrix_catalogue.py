"""The drop-in optimizers of matrices. Their signatures for type checkers are in `matrix_catalogue.pyi`, which
`python -m opt_kernels.optim.stubs` writes."""

from opt_kernels.optim.adaptive_muon import NAMO, AdaptiveMuon, NorMuon
from opt_kernels.optim.muon import Muon, MuonH
from opt_kernels.optim.soap import SOAP, SOAPMuon

__all__ = ["NAMO", "SOAP", "AdaptiveMuon", "Muon", "MuonH", "NorMuon", "SOAPMuon"]
