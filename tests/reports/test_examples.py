"""The examples of ``reports.load``, run as a person runs them and against runs whose answers are known."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import synthetic
from spikemark import reports

LAYERS = {"net/conv1": ((64, 32, 32), 10), "net/conv2": ((128, 32, 32), 10)}
EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of one network at three batches; the compiled neuron saves a third of what the others do."""
    records = []
    for case in synthetic.cases(workloads=LAYERS, batches=(1, 4, 16), operators=("srm_neuron",)):
        for p in range(2):
            record = synthetic.record(case, p, samples=5, noise=0.0)
            if case.implementation == "torch_compile":
                record.memory["saved_bytes"] //= 3
            records.append(record)
    return synthetic.write(tmp_path_factory.mktemp("example") / "run", records)


def test_the_fastest_within_the_memory_allowed(run: Path) -> None:
    found = example("reports_frame").fastest_within_memory(reports.load(run))
    assert len(found) == 2 * 3 * 2 and set(found["implementation"]) == {"torch_compile"}
    assert (found["saved_bytes"] <= found["allowed_bytes"]).all()
    everything = example("reports_frame").fastest_within_memory(reports.load(run), share=1.0)
    assert set(everything["implementation"]) == {"native"}


def test_the_time_of_a_network_is_the_sum_of_its_layers(run: Path) -> None:
    rows = example("reports_frame").network_time(reports.load(run)).to_dict("records")
    assert [(r["network"], r["phase"], r["batch"]) for r in rows] == [
        ("net", phase, batch) for phase in ("backward", "forward") for batch in (1, 4, 16)
    ]
    cases = list(synthetic.cases(workloads=LAYERS, batches=(1, 4, 16), operators=("srm_neuron",)))
    for row in rows:
        of_row = [c for c in cases if (c.phase, c.problem.batch) == (row["phase"], row["batch"])]
        for name, column in (("torch_eager", "baseline_s"), ("native", "best_s")):
            wanted = sum(synthetic.true_time(c) for c in of_row if c.implementation == name)
            assert row[column] == pytest.approx(wanted, rel=1e-6)
        assert row["speedup"] == pytest.approx(row["baseline_s"] / row["best_s"])


def test_a_layer_at_several_rates_counts_once(tmp_path: Path) -> None:
    every = synthetic.cases(workloads={"net/c": ((64, 32, 32), 10)}, operators=("conv_backward",), rates=(0.1, 0.3))
    records = [synthetic.record(c, 0, samples=5, noise=0.0) for c in every if c.problem.batch == 8]
    rows = example("reports_frame").network_time(reports.load(synthetic.write(tmp_path / "r", records, passes=1)))
    base = next(synthetic.true_time(r.case) for r in records if r.case.implementation == "torch_autograd")
    assert list(rows["baseline_s"]) == pytest.approx([base, base], rel=1e-6)
    # aten wins at the lower rate with (0.2 + 0.8) / 2.1 of the work, the baseline at the higher.
    low = next(synthetic.true_time(r.case) for r in records if r.case.implementation == "aten")
    assert list(rows["best_s"]) == pytest.approx([(low + base) / 2] * 2, rel=1e-6)


def test_the_exponent_of_a_known_growth(run: Path) -> None:
    """Times are 5 µs and a work that grows with the batch: big layers of the slowest have an exponent near 1."""
    module = example("reports_scaling")
    found = module.exponents(reports.load(run)).set_index(["workload", "phase", "implementation"])
    assert len(found) == 2 * 2 * 4
    slow = found.loc[("net/conv2", "forward", "torch_eager")]
    assert slow["exponent"] == pytest.approx(1.0, abs=0.01) and slow["one_s"] == pytest.approx(1.3e-3, rel=0.02)
    assert 0.9 < found.loc[("net/conv1", "forward", "native")]["exponent"] < slow["exponent"]


@pytest.mark.parametrize("name", ["reports_frame", "reports_scaling"])
def test_examples_run_as_scripts(name: str, run: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(run)]
    if name == "reports_scaling":
        command.append(str(tmp_path / "scaling.svg"))
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "torch_compile" in done.stdout or "net" in done.stdout
    if name == "reports_scaling":
        assert "torch_eager" in done.stdout and (tmp_path / "scaling.svg").read_text().startswith("<?xml")
    wrong = subprocess.run([*command[:2], str(tmp_path)], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "is no run folder" in wrong.stderr and wrong.stderr.count("\n") == 1
