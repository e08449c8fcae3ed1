"""From C++ sources to a loaded library. Compiled once per machine and kept on disk (see `cache`).

The key is the source, the flags, the compiler's version and the processor.

The compiler is `$CXX`, which may have arguments, or else `c++`, `g++` or `clang++`, whichever of these the PATH has.
`OPT_KERNELS_CPP=0` turns it off; `OPT_KERNELS_CACHE` names another folder than `$XDG_CACHE_HOME/opt-kernels`.
"""

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
from typing import NamedTuple

from opt_kernels.backends.cpp import cache as on_disk

ELEMENTS = Path(__file__).with_name("elements.h")
PROBE = Path(__file__).with_name("probe.cpp")
# Contraction is off so that an element's bits do not depend on where the compiler found room for a fused product; the
# next two let loops with roots and comparisons be vectorised, and change no result.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-std=c++17")
# By default compilers use half of what AVX-512 has; sweeps of 8-bit states take a tenth longer with that.
X86_FLAGS = ("-mprefer-vector-width=512",)
TIMEOUT = 120  # seconds; a sweep takes a fraction of one

_LOG = logging.getLogger(__name__)


class CompilerError(RuntimeError):
    """The compiler did not take a source; the message is its own."""


@cache
def usable() -> bool:
    """Whether there is a compiler here that works. Where there is none that does, a warning is logged once."""
    if sys.platform == "win32" or os.environ.get("OPT_KERNELS_CPP") == "0":
        return False
    return attempt(PROBE) is not None


class Source(NamedTuple):
    """A source by the name that its libraries get."""

    name: str
    text: str


def attempt(source: Path | Source, **macros: str | int) -> ctypes.CDLL | None:
    """What `library` returns; None where it cannot be compiled, kept or loaded, which is logged as a warning once.

    A step that needs it runs on torch's operations instead: a full disk or a failing compiler does not stop training.
    """
    return _attempt(source, _sorted(macros))


def library(source: Path | Source, **macros: str | int) -> ctypes.CDLL:
    """`source` compiled after `elements.h` with these macros, and loaded.

    Raises CompilerError with the compiler's message.
    """
    return _library(source, _sorted(macros))


@cache
def _attempt(source: Path | Source, macros: tuple[tuple[str, str], ...]) -> ctypes.CDLL | None:
    try:
        return _library(source, macros)
    except (CompilerError, OSError, subprocess.SubprocessError) as error:
        _warn_once(str(error))
        return None


@cache
def _warned() -> list[str]:
    """The warnings of this process."""
    return []


def _warn_once(reason: str) -> None:
    log = _LOG.info if _warned() else _LOG.warning
    log(
        "CPU steps run on torch's operations instead of compiled sweeps, two to three times as slow: %s (set "
        "OPT_KERNELS_CPP=0 to choose that)",
        reason,
    )
    _warned().append(reason)


@cache
def _library(source: Path | Source, macros: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    name, content = source if isinstance(source, Source) else Source(source.stem, source.read_text())
    text = f"{ELEMENTS.read_text()}\n{content}"
    stem = f"{name}-{_digest(text, dict(macros))}"
    return ctypes.CDLL(str(on_disk.find(stem) or _compile(text, dict(macros), stem)))


def _sorted(macros: Mapping[str, str | int]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, str(value)) for name, value in macros.items()))


def _compile(text: str, macros: Mapping[str, str], stem: str) -> Path:
    """Ranks that start together may all compile: each writes a file of its own, and one rename decides."""
    on_disk.make(on_disk.folder())  # again, where somebody cleared the cache meanwhile
    with tempfile.TemporaryDirectory(dir=on_disk.folder()) as folder:
        made = Path(folder) / f"{stem}.so"
        defined = [f"-D{name}={value}" for name, value in macros.items()]
        command = [*_command(), *_flags(), "-shared", "-fPIC", *defined, "-x", "c++", "-", "-o", str(made)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            raise CompilerError(f"{shlex.join(_command())}: {done.stderr.strip() or f'status {done.returncode}'}")
        return on_disk.keep(stem, made)


def _digest(text: str, macros: Mapping[str, str]) -> str:
    defined = [f"{name}={value}" for name, value in macros.items()]
    parts = (text, *_flags(), *defined, *_command()[1:], _compiler_version(), _processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *X86_FLAGS) if platform.machine() in ("x86_64", "AMD64") else FLAGS


@cache
def _compiler() -> tuple[str, ...] | None:
    """The command, or None where there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    for name, *options in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if found := shutil.which(name):
            return (found, *options)
    return None


def _command() -> tuple[str, ...]:
    command = _compiler()
    if command is None:
        given = os.environ.get("CXX")
        reason = f"CXX={given} is not found" if given else "no C++ compiler is found (c++, g++, clang++)"
        raise CompilerError(f"{reason}; install one, or name it in CXX")
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
