"""One optimizer step over any layout: replicated, ZeRO-1, layer-wise.

`public` lists the names that can be imported from here; it is imported at the first use of one of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from opt_distributed.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Import a public name at its first use. Raises AttributeError for other names."""
        if not name.startswith("_"):
            public = import_module(f"{__name__}.public")
            if name in public.__all__:
                return getattr(public, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module(f"{__name__}.public").__all__})
