"""From C++ sources to a loaded library. Compiled once per machine and kept on disk, found again by all that went in.

The compiler is `$CXX`, or `c++`, `g++`, `clang++`, whichever the PATH has first. `OPT_KERNELS_CPP=0` turns it off;
`OPT_KERNELS_CACHE` names another folder than `$XDG_CACHE_HOME/opt-kernels`.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ELEMENTS = Path(__file__).with_name("elements.h")
PROBE = Path(__file__).with_name("probe.cpp")
# Contraction is off so that an element's bits do not depend on where the compiler found room for a fused product; the
# next two let loops with roots and comparisons be vectorised, and change no result.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-std=c++17")
TIMEOUT = 120  # seconds; a sweep takes a fraction of one

_LOG = logging.getLogger(__name__)


class CompilerError(RuntimeError):
    """The compiler did not take a source; the message is its own."""


@cache
def usable() -> bool:
    """Whether there is a compiler here that works; what it says against it is logged once."""
    if _compiler() is None:
        return False
    try:
        library(PROBE)
    except (CompilerError, OSError, subprocess.SubprocessError) as error:
        _LOG.warning("%s cannot compile the CPU sweeps, torch's operations run instead: %s", _compiler(), error)
        return False
    return True


def library(source: Path, **macros: str | int) -> ctypes.CDLL:
    """`source` compiled behind `elements.h` with these macros, and loaded.

    Raises CompilerError with the compiler's message.
    """
    return _library(source, tuple(sorted((name, str(value)) for name, value in macros.items())))


@cache
def _library(source: Path, macros: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    text = "\n".join(path.read_text() for path in (ELEMENTS, source))
    path = _folder() / f"{source.stem}-{_digest(text, dict(macros))}.so"
    if not path.exists():
        _compile(text, dict(macros), path)
    return ctypes.CDLL(str(path))


def _compile(text: str, macros: Mapping[str, str], path: Path) -> None:
    """Ranks that start together may all compile: each writes a file of its own, and one rename decides."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        defined = [f"-D{name}={value}" for name, value in macros.items()]
        command = [str(_compiler()), *FLAGS, "-shared", "-fPIC", *defined, "-x", "c++", "-", "-o", str(made)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            raise CompilerError(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
        made.replace(path)


def _digest(text: str, macros: Mapping[str, str]) -> str:
    parts = (text, *FLAGS, *(f"{name}={value}" for name, value in macros.items()), _compiler_version(), _processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


@cache
def _compiler() -> str | None:
    if sys.platform == "win32" or os.environ.get("OPT_KERNELS_CPP") == "0":
        return None
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@cache
def _compiler_version() -> str:
    done = subprocess.run([str(_compiler()), "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    return done.stdout


@cache
def _processor() -> str:
    """What `-march=native` depends on: machines that share a home folder do not share libraries by accident."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    told = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join((sys.platform, platform.machine(), platform.processor(), *sorted(told)))


@cache
def _folder() -> Path:
    """Where libraries are kept; for this process alone where that folder cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("OPT_KERNELS_CACHE") or Path(home) / "opt-kernels")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="opt-kernels-"))
