"""Native code: compiled on first use by the machine's C++ compiler, cached, loaded with ctypes.

Torch-free, and free of torch's headers: sources have a plain C interface (pointers, int64, doubles), so building one
takes seconds. Names that begin with ``_`` are shared plumbing, no implementation.

The cache is ``$XDG_CACHE_HOME/spikemark/native`` (``~/.cache/...`` where unset), or a private folder of the temporary
directory where that is not writable. A library's name is a hash of the sources, the headers, the flags and the macros
the compiler predefines (its version and, with ``-march=native``, what the processor has), so a change of any of them
builds anew and machines that share a home folder do not share a build. A library appears by one atomic rename:
processes that build at the same time do not disturb each other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BASE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    # No errno from mathematics and no floating-point exceptions that anybody reads: what lets a compiler turn a
    # comparison into a vector select. Both keep every value, NaN, infinity and signed zero as they are.
    "-fno-math-errno",
    "-fno-trapping-math",
    # Not -ffast-math (it assumes away the NaN and infinity that operators.md defines), and no silent fused
    # multiply-add: whether an element falls into a vector body or a scalar tail must not change its bits.
    # A kernel that wants FMA asks for it in its code or its own flags.
    "-ffp-contract=off",
)
TUNING_FLAGS = ("-march=native", "-fopenmp")
WITHOUT_TUNING: tuple[tuple[str, ...], ...] = ((), ("-fopenmp",), ("-fopenmp", "-march=native"))
SHARED_FOLDER = Path(__file__).resolve().parent
SHARED_HEADERS = ("_caches.h", "_parallel.h", "_vectors.h")
COMPILE_TIMEOUT_S = 300


class BuildError(RuntimeError):
    """Native code cannot be built here. The message is one line that says why and what to do."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the ``command`` that starts it, its ``version``, and a hash of what it is and builds for."""

    command: tuple[str, ...]
    version: str
    identity: str


def compiler() -> Compiler:
    """The compiler that ``$CXX`` names, else g++, clang++ or c++ of ``$PATH``. Raises ``BuildError``."""
    return _find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # A fixed language: the first line that says "error" must be found in any locale.
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMPILE_TIMEOUT_S,
        check=False,
        env=os.environ | {"LC_ALL": "C"},
    )


@functools.lru_cache(maxsize=8)
def _find_compiler(cxx: str, path: str) -> Compiler:
    command: list[str] | None
    if cxx.strip():
        command = shlex.split(cxx)
        if shutil.which(command[0], path=path) is None:
            raise BuildError(f"no C++ compiler found: CXX names {cxx!r}, which is no executable; correct or unset it")
    else:
        command = next(([name] for name in ("g++", "clang++", "c++") if shutil.which(name, path=path)), None)
        if command is None:
            raise BuildError("no C++ compiler found: install g++")
    try:
        for tuning in (["-march=native"], []):
            macros = _run([*command, *tuning, "-x", "c++", "-dM", "-E", os.devnull])
            if macros.returncode == 0:
                break
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler {command[0]} does not start: {error}") from error
    if macros.returncode:
        raise BuildError(f"the C++ compiler {command[0]} does not work: {first_error(macros.stderr)}")
    found = re.search(r'#define __VERSION__ "(.*)"', macros.stdout)
    version = f"{Path(command[0]).name} {found.group(1) if found else 'of unknown version'}"
    return Compiler(tuple(command), version, hashlib.sha256(macros.stdout.encode()).hexdigest())


def first_error(messages: str) -> str:
    """The first line of a compiler's output that is an error, else its first line, without folders."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    line = next((x for x in lines if "error" in x.lower()), lines[0] if lines else "no message")
    return re.sub(r"(?<![\w.])/\S*/", "", line)


def cache_folder() -> Path:
    """Where built libraries lie: a folder of this user that is writable, made if missing."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spikemark" / "native"
    return folder if _writable(folder) else _temporary_folder()


@functools.cache  # asked before every native call, and trying to write costs more than a small kernel
def _writable(folder: Path) -> bool:
    """Whether files can be made in ``folder``, which is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@functools.cache
def _temporary_folder() -> Path:
    """A folder for builds below the temporary directory, never one that another user could have filled."""
    folder = Path(tempfile.gettempdir()) / f"spikemark-native-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            with tempfile.TemporaryFile(dir=folder):
                return folder
    except OSError:
        pass  # somebody else's, or not a folder: a new one for this process alone
    return Path(tempfile.mkdtemp(prefix="spikemark-native-"))


@dataclass(frozen=True)
class NativeLibrary:
    """C++ sources that make one shared library, built and loaded when first asked for.

    ``folder`` holds ``sources`` and ``headers`` (all headers that are included and may change); ``flags`` are added
    to ``BASE_FLAGS``. The headers of ``SHARED_HEADERS`` may be included by their name. ``-march=native`` and
    ``-fopenmp`` are used where the compiler takes them.
    """

    folder: Path
    sources: tuple[str, ...]
    headers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def load(self) -> ctypes.CDLL:
        """The loaded library; calls release Python's lock. Raises ``BuildError``."""
        return _load(self, compiler(), cache_folder())

    def unavailable(self) -> str | None:
        """One line that says why it cannot be built or loaded here (this builds it if it is not yet), or None."""
        try:
            self.load()
        except BuildError as error:
            return str(error)
        return None

    def path(self, compiler: Compiler, cache: Path) -> Path:
        """Where ``compiler``'s build of the present sources lies."""
        key = hashlib.sha256(compiler.identity.encode())
        key.update("\0".join((*compiler.command, *BASE_FLAGS, *TUNING_FLAGS, *self.flags)).encode())
        shared = [SHARED_FOLDER / name for name in SHARED_HEADERS]
        for file in [self.folder / name for name in self.sources + self.headers] + shared:
            key.update(f"\0{file.name}\0".encode() + file.read_bytes())
        return cache / f"{Path(self.sources[0]).stem}-{key.hexdigest()[:32]}.so"


@functools.cache
def _load(library: NativeLibrary, compiler: Compiler, cache: Path) -> ctypes.CDLL:
    path = library.path(compiler, cache)
    if path.is_file():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink(missing_ok=True)  # damaged or made for another system: build it again
    _compile(library, compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the built library of {library.sources[0]} cannot be loaded: {error}") from error


def _compile(library: NativeLibrary, compiler: Compiler, path: Path) -> None:
    """Build ``library`` at ``path``: with all tuning flags, or without those that this compiler does not take."""
    sources = [str(library.folder / name) for name in library.sources]
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix="building-", suffix=".so")
    os.close(handle)
    problem = ""
    try:
        for dropped in WITHOUT_TUNING:
            tuning = [flag for flag in TUNING_FLAGS if flag not in dropped]
            flags = [*BASE_FLAGS, *tuning, *library.flags, f"-I{SHARED_FOLDER}", f"-I{library.folder}"]
            done = _run([*compiler.command, *flags, *sources, "-o", unfinished])
            if done.returncode == 0:
                Path(unfinished).replace(path)
                return
            problem = problem or first_error(done.stderr)
    except subprocess.TimeoutExpired:
        problem = f"not done after {COMPILE_TIMEOUT_S} s"
    except OSError as error:
        problem = str(error)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    raise BuildError(f"{compiler.command[0]} cannot build {library.sources[0]}: {problem}")
