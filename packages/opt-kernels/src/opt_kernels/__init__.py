"""Optimizer rules and the fused sweeps that run them, on GPU and CPU.

`public` lists the names that can be imported from here. It is imported at the first use of one of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from opt_kernels import fork as fork  # imported before anything forks

__version__ = "0.1.0"

if TYPE_CHECKING:
    # mypy reads `__all__` only where it is written out, as in these stubs.
    from opt_kernels.optim.catalogue import *  # noqa: F403
    from opt_kernels.optim.matrix_catalogue import *  # noqa: F403
    from opt_kernels.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Find a public name at its first use.

        Raises AttributeError for other names, and ImportError for optimizers of other libraries, with ours instead.
        """
        if not name.startswith("_"):
            public = import_module(f"{__name__}.public")
            if name in public.__all__:
                return getattr(public, name)
            if instead := import_module(f"{__name__}.foreign").CLASSES.get(name):
                raise ImportError(f"opt_kernels has no {name}; write {instead}", name=__name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module(f"{__name__}.public").__all__})
