# The signatures that type checkers and editors see. `tests/test_rules.py` compares them with the classes.
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from opt_kernels.hooks import GivenHooks
from opt_kernels.optim.base import Params
from opt_kernels.optim.matrix_rules import NAMO as _NAMO
from opt_kernels.optim.matrix_rules import SOAP as _SOAP
from opt_kernels.optim.matrix_rules import AdaptiveMuon as _AdaptiveMuon
from opt_kernels.optim.matrix_rules import Muon as _Muon
from opt_kernels.optim.matrix_rules import MuonH as _MuonH
from opt_kernels.optim.matrix_rules import Muown as _Muown
from opt_kernels.optim.matrix_rules import NorMuon as _NorMuon
from opt_kernels.optim.matrix_rules import Scion as _Scion
from opt_kernels.optim.matrix_rules import SOAPMuon as _SOAPMuon

__all__ = ["NAMO", "SOAP", "AdaptiveMuon", "Muon", "MuonH", "Muown", "NorMuon", "SOAPMuon", "Scion"]

# Options of every drop-in of this module; their defaults are in its signature.
class Common(TypedDict, total=False):
    scalar_optimizer: str | None
    scalar_options: Mapping[str, Any] | None
    mains: str
    max_norm: float | None
    backend: str | None
    capturable: bool
    hooks: GivenHooks

# Options that Muon and its relatives share, before the common ones.
class MuonOptions(Common, total=False):
    extra_scale_factor: float
    custom_coefficients: Sequence[tuple[float, float, float]]
    fp32_matmul_prec: str
    use_syrk: bool
    weight_decay_method: str
    pre_norm: str
    post_norm: str
    nuclear_scale: bool
    momentum_buffer_dtype: torch.dtype

class NAMO(_NAMO):
    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 0.0003,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        nesterov: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-08,
        *,
        scale_mode: str | None = "spectral",
        num_ns_steps: int = 5,
        coefficient_type: str | None = "quintic",
        **options: Unpack[MuonOptions],
    ) -> None: ...

class SOAP(_SOAP):
    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 0.003,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        *,
        shampoo_beta: float = 0.95,
        power_iterations: int = 1,
        max_precond_dim: int | None = 10000,
        one_sided: bool = False,
        use_kl_shampoo: bool = True,
        precondition_frequency: int = 1,
        order: str = "paper",
        **common: Unpack[Common],
    ) -> None: ...

class AdaptiveMuon(_AdaptiveMuon):
    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 0.0003,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        nesterov: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-08,
        *,
        moment2_method: str = "adamuon",
        lines: str = "rows",
        scale_mode: str | None = "spectral",
        num_ns_steps: int = 5,
        coefficient_type: str | None = "quintic",
        **options: Unpack[MuonOptions],
    ) -> None: ...

class Muon(_Muon):
    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 0.001,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-07,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        scalar_eps: float = 1e-08,
        *,
        scale_mode: str | None = None,
        coefficient_type: str | None = None,
        **options: Unpack[MuonOptions],
    ) -> None: ...

class MuonH(_MuonH):
    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 0.001,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-07,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        scalar_eps: float = 1e-08,
        *,
        scale_mode: str | None = None,
        coefficient_type: str | None = None,
        **options: Unpack[MuonOptions],
    ) -> None: ...

class Muown(_Muown):
    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 0.0003,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-08,
        *,
        scale_mode: str | None = "spectral",
        extra_scale_factor: float = 1.0,
        coefficient_type: str | None = "quintic",
        custom_coefficients: Sequence[tuple[float, float, float]] = (),
        num_ns_steps: int = 5,
        fp32_matmul_prec: str = "medium",
        use_syrk: bool = True,
        **common: Unpack[Common],
    ) -> None: ...

class NorMuon(_NorMuon):
    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 0.0003,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        nesterov: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-08,
        *,
        lines: str = "rows",
        scale_mode: str | None = "match_rms_adamw",
        num_ns_steps: int = 5,
        coefficient_type: str | None = "quintic",
        **options: Unpack[MuonOptions],
    ) -> None: ...

class SOAPMuon(_SOAPMuon):
    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 0.003,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        *,
        scale_mode: str | None = "shape_scaling",
        extra_scale_factor: float = 1.0,
        coefficient_type: str | None = "quintic",
        custom_coefficients: Sequence[tuple[float, float, float]] = (),
        num_ns_steps: int = 5,
        fp32_matmul_prec: str = "medium",
        use_syrk: bool = True,
        shampoo_beta: float = 0.9,
        power_iterations: int = 1,
        max_precond_dim: int | None = 10000,
        one_sided: bool = False,
        **common: Unpack[Common],
    ) -> None: ...

class Scion(_Scion):
    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 0.001,
        weight_decay: float = 1.0,
        momentum: float = 0.95,
        nesterov: bool = False,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-07,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        scalar_eps: float = 1e-08,
        *,
        scale_mode: str | None = "unit_rms_norm",
        coefficient_type: str | None = "quintic",
        **options: Unpack[MuonOptions],
    ) -> None: ...
