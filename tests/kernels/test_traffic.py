"""The cost model's bytes against bytes that a simulated cache sees move: the native neurons under cachegrind.

The simulated last cache is far smaller than a tensor and holds the state of a tile, as real ones do. A miss moves one
line of 64 bytes; a written line counts once, as the streaming stores of the real kernels do.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from spikemark import kernels
from spikemark.kernels import Problem

SOURCES = Path(kernels.__file__).parent
DRIVER = Path(__file__).parent / "traffic" / "driver.cpp"
# valgrind knows AVX2 but not AVX-512. The flags that change no traffic (OpenMP, -fPIC) are left out.
FLAGS = ("-std=c++17", "-O3", "-march=x86-64-v3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
BATCH, STEPS, NEURONS = 2, 6, 1 << 15
TENSOR = BATCH * STEPS * NEURONS * 4
LAST_CACHE = 1 << 19
CASES = [(name, phase) for name in ("native", "native_compact") for phase in ("forward", "backward")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("valgrind", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}: install it")
    flags = subprocess.run(["g++", "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=True)
    if not re.search(r"-mavx2\s+\[enabled\]", flags.stdout):
        pytest.skip("this processor has no AVX2")
    out = tmp_path_factory.mktemp("traffic") / "driver"
    sources = [DRIVER, SOURCES / "srm_neuron" / "srm.cpp", SOURCES / "srm_neuron" / "srm_compact.cpp"]
    includes = [f"-I{SOURCES}", f"-I{SOURCES / 'srm_neuron'}"]
    subprocess.run(["g++", *FLAGS, *includes, *map(str, sources), "-o", str(out), "-pthread"], check=True)
    return out


def lines_moved(program: Path, kernel: str, calls: int, tmp_path: Path) -> tuple[int, float]:
    """Lines that miss the last cache, reads and writes, in the whole program; and the firing rate it reports."""
    done = subprocess.run(
        ["valgrind", "--tool=cachegrind", "--cache-sim=yes", f"--LL={LAST_CACHE},16,64", "--D1=32768,8,64",
         "--I1=32768,8,64", f"--cachegrind-out-file={tmp_path / 'out'}", str(program), kernel, str(calls),
         *map(str, (BATCH, STEPS, NEURONS))],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.search(r"LLd misses:\s+([\d,]+)", done.stderr)
    assert found, done.stderr
    return int(found[1].replace(",", "")), float(done.stdout)


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_the_cost_model_says_what_moves(program: Path, tmp_path: Path, name: str, phase: str) -> None:
    one, rate = lines_moved(program, f"{name} {phase}", 1, tmp_path)
    two, _ = lines_moved(program, f"{name} {phase}", 2, tmp_path)
    measured = 64 * (two - one)
    problem = Problem("traffic", "neuron", BATCH, STEPS, (NEURONS,), (NEURONS,), spike_rate=rate)
    model = kernels.get("srm_neuron", name).moved_bytes(problem, phase, "float32", rate)
    assert model is not None
    assert measured == pytest.approx(model, rel=0.05), f"{measured / TENSOR:.3f} tensors against {model / TENSOR:.3f}"
    # A model that forgot a tensor, or counted one twice, would be off by a sixth at least.
    assert abs(measured - model) < TENSOR / 4
