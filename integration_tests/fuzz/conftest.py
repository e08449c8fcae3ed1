"""Options of the composition fuzz."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("composition fuzz")
    group.addoption("--fuzz-seed", type=int, default=None, help="run the case of this seed only")
    group.addoption("--fuzz-cases", type=int, default=None, help="how many seeds, from 0; 48, at night 2,000")
