"""From C++ sources to a loaded library. Compiled once per machine and kept on disk, found again by all that went in.

The compiler is `$CXX`, which may have arguments, or else `c++`, `g++` or `clang++`, whichever of these the PATH has.
`OPT_KERNELS_CPP=0` turns it off; `OPT_KERNELS_CACHE` names another folder than `$XDG_CACHE_HOME/opt-kernels`.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
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
        command = shlex.join(_compiler() or ())
        _LOG.warning("%s cannot compile the CPU sweeps, torch's operations run instead: %s", command, error)
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
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # half a file, after a crash or on a full disk: it would be found again for ever
            pass
    _compile(text, dict(macros), path)
    return ctypes.CDLL(str(path))


def _compile(text: str, macros: Mapping[str, str], path: Path) -> None:
    """Ranks that start together may all compile: each writes a file of its own, and one rename decides."""
    _make(path.parent)  # anew where somebody cleared the cache meanwhile
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        defined = [f"-D{name}={value}" for name, value in macros.items()]
        command = [*_command(), *FLAGS, "-shared", "-fPIC", *defined, "-x", "c++", "-", "-o", str(made)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            raise CompilerError(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
        made.replace(path)


def _digest(text: str, macros: Mapping[str, str]) -> str:
    defined = [f"{name}={value}" for name, value in macros.items()]
    parts = (text, *FLAGS, *defined, *_command()[1:], _compiler_version(), _processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


@cache
def _compiler() -> tuple[str, ...] | None:
    """The command, or None where there is none."""
    if sys.platform == "win32" or os.environ.get("OPT_KERNELS_CPP") == "0":
        return None
    named = shlex.split(os.environ.get("CXX", ""))
    for name, *options in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if found := shutil.which(name):
            return (found, *options)
    if named:
        _LOG.warning("CXX=%s is not found, torch's operations run instead", named[0])
    return None


def _command() -> tuple[str, ...]:
    command = _compiler()
    if command is None:
        raise CompilerError("no C++ compiler is found; install one, or name it in CXX")
    return command


@cache
def _compiler_version() -> str:
    command = [*_command(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout


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
        _make(folder)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="opt-kernels-"))
        atexit.register(_remove, folder, os.getpid())
        return folder


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _remove(folder: Path, process: int) -> None:
    """At the end of the process that made it, not of one that it forked."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
