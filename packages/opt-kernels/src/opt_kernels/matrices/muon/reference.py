"""The reference version of Muon: the formula as torch operations, with `newton_schulz.reference` in between."""

from opt_kernels.matrices.muon.torch_native import muon_ as muon_
