"""The drop-in optimizers of matrix rules. Type checkers read their signatures in `matrix_catalogue.pyi`."""

from opt_kernels.optim.matrix_rules import NAMO, SOAP, AdaptiveMuon, Muon, MuonH, Muown, NorMuon, Scion, SOAPMuon

__all__ = ["NAMO", "SOAP", "AdaptiveMuon", "Muon", "MuonH", "Muown", "NorMuon", "SOAPMuon", "Scion"]
