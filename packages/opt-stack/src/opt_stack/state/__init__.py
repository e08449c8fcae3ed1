"""The state of an optimizer: saved, loaded, read while it trains, moved to the host."""

from collections.abc import Mapping
from typing import Any

AnyState = Mapping[str, Any]  # the state of an optimizer or a model, or a part of one, in any form
