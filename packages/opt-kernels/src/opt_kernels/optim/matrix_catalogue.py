"""The drop-in optimizers of matrix rules. Type checkers read their signatures in `matrix_catalogue.pyi`."""

from opt_kernels.optim.adaptive_muon import NAMO, AdaptiveMuon, NorMuon
from opt_kernels.optim.muon import Muon, MuonH
from opt_kernels.optim.soap import SOAP, SOAPMuon

__all__ = ["NAMO", "SOAP", "AdaptiveMuon", "Muon", "MuonH", "NorMuon", "SOAPMuon"]
