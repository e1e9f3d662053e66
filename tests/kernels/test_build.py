"""Native builds: compiled once, cached by content, safe beside other processes, a clear line when not possible."""

import ctypes
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from spikemark.kernels import _build
from spikemark.kernels._build import BuildError, NativeLibrary

SOURCE = '#include "_parallel.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'

pytestmark = pytest.mark.skipif(
    _build.shutil.which("g++") is None and _build.shutil.which("clang++") is None, reason="needs a C++ compiler"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "spikemark" / "native"


def write(folder: Path, answer: int = 42, source: str = SOURCE) -> NativeLibrary:
    folder.mkdir(exist_ok=True)
    (folder / "code.cpp").write_text(source % answer if "%d" in source else source)
    return NativeLibrary(folder, ("code.cpp",))


def test_builds_once_and_loads_from_the_cache(tmp_path, cache, monkeypatch):
    library = write(tmp_path / "src")
    assert library.unavailable() is None
    assert library.load().answer() == 42
    assert len(list(cache.iterdir())) == 1, "one library and no left-over"
    _build._load.cache_clear()
    monkeypatch.setattr(_build, "_compile", lambda *_: pytest.fail("compiled again although nothing changed"))
    assert library.load().answer() == 42


def test_changed_source_or_flags_build_anew(tmp_path, cache):
    library = write(tmp_path / "src")
    assert library.load().answer() == 42
    _build._load.cache_clear()
    assert write(tmp_path / "src", 43).load().answer() == 43
    paths = {
        NativeLibrary(library.folder, library.sources, flags=flags).path(_build.compiler(), cache)
        for flags in ((), ("-DX",))
    }
    assert len(paths) == 2


def test_header_and_compiler_are_part_of_the_name(tmp_path, cache):
    write(tmp_path / "src")
    (tmp_path / "src" / "own.h").write_text("// one")
    library = NativeLibrary(tmp_path / "src", ("code.cpp",), ("own.h",))
    before = library.path(_build.compiler(), cache)
    (tmp_path / "src" / "own.h").write_text("// two")
    after = library.path(_build.compiler(), cache)
    other = _build.Compiler(_build.compiler().command, "other", "other processor")
    assert len({before, after, library.path(other, cache)}) == 3


def test_compile_error_is_one_line_with_the_first_error(tmp_path, cache):
    library = write(tmp_path / "src", source="int broken( { return 1; }\nint worse() { return nothing; }\n")
    reason = library.unavailable()
    assert reason is not None
    assert "\n" not in reason
    assert "code.cpp:1" in reason and "error" in reason
    assert str(tmp_path) not in reason
    with pytest.raises(BuildError):
        library.load()
    assert not list(cache.iterdir()), "a failed build leaves nothing behind"


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert write(tmp_path / "src").unavailable() == "no C++ compiler found: install g++"


def test_cxx_is_honoured_and_a_wrong_one_is_named(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    reason = write(tmp_path / "src").unavailable()
    assert reason is not None and "no-such-compiler" in reason
    wrapper = tmp_path / "my-c++"
    real = _build.shutil.which("g++") or _build.shutil.which("clang++")
    wrapper.write_text(f'#!/bin/sh\necho used >> "{tmp_path}/log"\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"{wrapper} -DEXTRA=1")
    assert write(tmp_path / "src").load().answer() == 42
    assert (tmp_path / "log").read_text().count("used") == 2
    assert _build.compiler().command == (str(wrapper), "-DEXTRA=1")


def test_compiler_without_openmp_still_builds_with_threads(tmp_path, cache, monkeypatch):
    wrapper = tmp_path / "c++"
    real = _build.shutil.which("g++") or _build.shutil.which("clang++")
    wrapper.write_text(
        '#!/bin/sh\nfor a in "$@"; do [ "$a" = -fopenmp ] && { echo "error: no -fopenmp" >&2; exit 1; }; done\n'
        f'exec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    loaded = write(tmp_path / "src").load()
    assert loaded.spikemark_uses_openmp() == 0
    assert loaded.spikemark_threads_used(3) == 3


def test_the_asked_number_of_threads_is_used(tmp_path, cache):
    loaded = write(tmp_path / "src").load()
    assert [loaded.spikemark_threads_used(n) for n in (1, 2, 3)] == [1, 2, 3]


def test_damaged_cache_entry_is_built_again(tmp_path, cache):
    library = write(tmp_path / "src")
    path = library.path(_build.compiler(), _build.cache_folder())
    path.write_bytes(b"not a library")
    assert library.load().answer() == 42


def test_cache_that_is_not_writable_falls_back_to_a_private_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # a file, so not even root can make a folder in it
    monkeypatch.setattr(_build.tempfile, "gettempdir", lambda: str(tmp_path))
    _build._temporary_folder.cache_clear()
    try:
        folder = _build.cache_folder()
        assert folder.parent == tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
        _build._temporary_folder.cache_clear()
        folder.chmod(0o777)  # anybody could have put a library there
        monkeypatch.setattr(_build.tempfile, "mkdtemp", lambda prefix: str(tmp_path / (prefix + "own")))
        assert _build.cache_folder() == tmp_path / "spikemark-native-own"
    finally:
        _build._temporary_folder.cache_clear()


def test_processes_that_build_at_the_same_time(tmp_path, cache):
    """New processes, as the harness's workers are: a fork of this one would inherit torch's threads' locks."""
    library = write(tmp_path / "src")
    code = (
        "import pathlib, sys; from spikemark.kernels._build import NativeLibrary; sys.stdin.readline()\n"
        "print(NativeLibrary(pathlib.Path(sys.argv[1]), ('code.cpp',)).load().answer())"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(library.folder)], stdin=-1, stdout=-1, stderr=-1, text=True)
        for _ in range(4)
    ]
    for process in started:  # all have started: they begin together
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120) for process in started]
    assert [out.strip() for out, _ in said] == ["42"] * 4, [err for _, err in said]
    assert [p.suffix for p in cache.iterdir()] == [".so"]


def test_build_imports_no_torch():
    code = "import sys, spikemark.kernels._build as b; assert 'torch' not in sys.modules; print(b.compiler().version)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip()


def test_calls_take_64_bit_arguments(tmp_path, cache):
    source = (
        '#include <cstdint>\nextern "C" __attribute__((visibility("default")))\n'
        "int64_t twice(int64_t n) { return 2 * n; }\n"
    )
    loaded = write(tmp_path / "src", source=source).load()
    loaded.twice.argtypes, loaded.twice.restype = [ctypes.c_int64], ctypes.c_int64
    assert loaded.twice(2**40) == 2**41
