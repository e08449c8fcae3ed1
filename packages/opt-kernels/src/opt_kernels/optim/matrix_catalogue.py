"""The drop-in optimizers of matrix rules. Type checkers read their signatures from `matrix_catalogue.pyi`, which
`python -m opt_kernels.optim.stubs` generates."""

from opt_kernels.optim.adaptive_muon import NAMO, AdaptiveMuon, NorMuon
from opt_kernels.optim.muon import Muon, MuonH
from opt_kernels.optim.soap import SOAP, SOAPMuon

__all__ = ["NAMO", "SOAP", "AdaptiveMuon", "Muon", "MuonH", "NorMuon", "SOAPMuon"]
