"""Selections become cases; a name that does not exist gets the nearest one, an empty selection what was close."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from spikemark.harness.errors import NothingMeasured, UsageError
from spikemark.kernels import registry
from spikemark.kernels.catalog import OPERATORS
from spikemark.suites import selection
from spikemark.suites.presets import PRESETS


def pairs(cases):
    return {(case.operator, case.workload) for case in cases}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    spikes = np.zeros((3, 4, 6, 6), bool)
    spikes[0] = True
    path = tmp_path / "mine.npz"
    np.savez(path, spikes=spikes)
    return path


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_covers_every_operator_and_each_case_once(preset: str) -> None:
    cases = selection.build(preset)
    assert len({case.key for case in cases}) == len(cases)
    covered = {(case.operator, case.phase) for case in cases}
    wanted = {(o.name, p) for o in OPERATORS.values() for p in o.phases}
    assert covered == {pair for pair in wanted if preset != "quick" or pair[1] != "step"}  # it is the two others
    assert all(case.dtype == "float32" for case in cases)


def test_smoke_is_tiny_quick_has_eight_layers_and_full_has_all_as_published() -> None:
    assert all(case.problem.batch <= 2 for case in selection.build("smoke"))
    quick = {w for part in PRESETS["quick"].parts for w in part.workloads}
    assert len(quick) >= 8 and len({w.split("/")[0] for w in quick}) >= 5
    catalog = selection.workloads.built_in()
    assert quick <= set(catalog)
    full = selection.build("full", operators=["srm_neuron", "adjusted_avg_pool2d"])
    assert {c.workload for c in full} == {
        n for n, w in catalog.items() if {"srm_neuron", "adjusted_avg_pool2d"} & set(w.operators)
    }
    assert all(case.problem.batch == catalog[case.workload].batch for case in full)
    rates = {c.problem.spike_rate for c in full if c.workload == "cifar10-vgg/conv2"}
    assert rates == {0.0, 0.005, 0.02, 0.05, 0.1, 0.12, 0.2, 0.35, 1.0}


def test_default_implementations_run_unless_named() -> None:
    names = {c.implementation for c in selection.build("quick", operators=["srm_neuron"], devices=["cpu"])}
    default = {i.name for i in registry.implementations("srm_neuron", "cpu") if i.default}
    assert names == default - {"torch_compile"} and "torch_compile" in default
    for every in registry.implementations("srm_neuron", "cpu"):
        named = selection.build("quick", operators=["srm_neuron"], implementations=[every.name], devices=["cpu"])
        assert {c.implementation for c in named} == {every.name}


def test_globs_and_axes_multiply() -> None:
    assert {c.dtype for c in selection.build("smoke", dtypes=["*16"])} == {"float16", "bfloat16"}
    cases = selection.build(
        "quick",
        operators=["srm_neu*"],
        phases=["back?ard"],
        implementations=["torch_e*"],
        workloads=["mnist/conv?", "n-mnist/*1"],
        devices=["cpu", "cpu:1", "cpu"],
        dtypes=["float16", "float64"],
        batches=[1, 3],
        rates=[0.0, 0.05],
        seed=9,
    )
    assert {c.workload for c in cases} == {"mnist/conv1", "mnist/conv2", "n-mnist/conv1", "n-mnist/linear1"}
    assert len(cases) == 4 * 2 * 2 * 2 * 2
    assert {(c.operator, c.phase, c.implementation) for c in cases} == {("srm_neuron", "backward", "torch_eager")}
    assert {c.device for c in cases} == {"cpu", "cpu:1"} and {c.problem.seed for c in cases} == {9}


def test_a_named_workload_runs_everything_on_it_at_the_presets_batch() -> None:
    cases = selection.build("quick", workloads=["cifar10-vgg/conv2", "cifar100-vgg/conv2", "mnist/conv1"])
    assert {("conv_backward", "cifar10-vgg/conv2"), ("clamped_sign", "mnist/conv1")} <= pairs(cases)
    batches = {c.workload: c.problem.batch for c in cases}
    assert batches == {"cifar10-vgg/conv2": 3, "cifar100-vgg/conv2": PRESETS["quick"].batch, "mnist/conv1": 1}
    assert {c.problem.batch for c in selection.build("full", workloads=["mnist/conv1"])} == {50}


def test_a_pattern_is_no_regular_expression() -> None:
    assert selection.matches("a.b", ["a.b"]) and not selection.matches("axb", ["a.b"])
    assert not selection.matches("b", ["[ab]"]) and selection.matches("[ab]", ["[ab]"])
    assert selection.matches("net/conv1", ["net*"]) and not selection.matches("my-net/conv1", ["net*"])
    assert selection.matches("a\nb", ["a?b"]) and selection.matches("a", ["*a***"])
    assert not selection.matches("a" * 60, ["*a" * 40 + "b"]), "and in no time that grows with 2^stars"


def test_a_recording_runs_beside_the_preset_at_its_own_batch_and_rate(recorded: Path) -> None:
    cases = selection.build("smoke", recordings=[(str(recorded), 1)], batches=[2], rates=[0.5])
    spikes_rate = 1 / 3  # one channel of three always fires
    own = [c for c in cases if c.workload.startswith("recording:")]
    assert {c.workload for c in own} == {"recording:mine/conv", "recording:mine/pool"}
    assert {(c.problem.batch, c.problem.spike_rate) for c in own} == {(1, spikes_rate)}
    assert {(c.problem.batch, c.problem.spike_rate) for c in cases if c not in own} == {(2, 0.5)}
    assert len({c.key for c in cases}) == len(cases)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["recording:*"], {"recording:mine/conv", "recording:mine/pool"}),
        (["recording:mine/pool"], {"recording:mine/pool"}),
        (["mnist/pool1"], {"mnist/pool1", "recording:mine/conv", "recording:mine/pool"}),
    ],
)
def test_named_workloads_and_a_recording(recorded: Path, named: list[str], expected: set[str]) -> None:
    assert {c.workload for c in selection.build("smoke", recordings=[str(recorded)], workloads=named)} == expected


def test_two_recordings_of_one_name_are_refused(recorded: Path) -> None:
    with pytest.raises(UsageError, match=r"already a workload 'recording:mine/conv'"):
        selection.build("smoke", recordings=[str(recorded), str(recorded)])


def test_a_workload_file_adds_layers_and_may_not_replace_one(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    text = "[{}]\ntime_steps = 3\nbatch = 2\nspike_rate = 0.1\nlayers = [{{ name = 'conv1', neuron = 10 }}]\n"
    path.write_text(text.format("mine"))
    cases = selection.build("smoke", workload_files=[str(path)], operators=["srm_neuron"])
    assert ("srm_neuron", "mine/conv1") in pairs(cases) and ("srm_neuron", "mnist/conv2") in pairs(cases)
    path.write_text(text.format("mnist"))
    with pytest.raises(UsageError, match=r"w\.toml: there is already a workload 'mnist/conv1'"):
        selection.build("smoke", workload_files=[str(path)])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"preset": "quik"}, "unknown preset 'quik' (did you mean 'quick'?); known: smoke, quick, full"),
        ({"operators": ["srm_neurom"]}, "unknown operator 'srm_neurom' (did you mean 'srm_neuron'?)"),
        ({"phases": ["backwards"]}, "unknown phase 'backwards' (did you mean 'backward'?)"),
        ({"implementations": ["torch_eger"]}, "unknown implementation 'torch_eger' (did you mean 'torch_eager'?)"),
        (
            {"workloads": ["cifar10-vgg/cnv2"]},
            "unknown workload 'cifar10-vgg/cnv2' (did you mean 'cifar10-vgg/conv2'?)",
        ),
        ({"workloads": ["mnist"]}, "unknown workload 'mnist' (did you mean 'mnist/*'?)"),
        ({"devices": ["gpu"]}, "unknown device 'gpu' (did you mean 'cuda'?)"),
        ({"devices": ["cpu:0"]}, "device 'cpu:0': threads must be from 1 to"),
        ({"devices": ["cpu:9999"]}, "device 'cpu:9999': threads must be from 1 to"),
        ({"devices": ["cpu:x"]}, "unknown device 'cpu:x' (did you mean 'cpu'?)"),
        ({"devices": ["cuda:99"]}, "device 'cuda:99': "),
        ({"dtypes": ["int8"]}, "unknown dtype 'int8'"),
        ({"batches": [0]}, "batch must be at least 1, got 0"),
        ({"rates": [1.5]}, "spike rate must be from 0 to 1 (or 0% to 100%), got 1.5"),
        ({"rates": [float("nan")]}, "spike rate must be from 0 to 1 (or 0% to 100%), got nan"),
    ],
)
def test_what_does_not_exist_is_a_usage_error_that_names_the_nearest(asked: dict, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        selection.build(**({"preset": "smoke", "devices": ["cpu"]} | asked))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"workloads": ["cifr10*"]}, "no workload matches 'cifr10*'"),
        ({"operators": ["conv_bakward*"]}, "no operator matches 'conv_bakward*' (did you mean 'conv_backward'?)"),
        (
            {"operators": ["srm_neuron"], "workloads": ["mnist/pool1"]},
            "--workload mnist/conv1 or mnist/conv2 or mnist/linear1",
        ),
        ({"operators": ["srm_neuron"], "phases": ["weight"]}, "--phase forward or backward"),
    ],
)
def test_a_good_selection_without_a_case_says_what_was_close(asked: dict, message: str) -> None:
    with pytest.raises(NothingMeasured) as caught:
        selection.build("smoke", devices=["cpu"], **asked)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_gpus_are_chosen_first_and_all_is_everything(monkeypatch) -> None:
    monkeypatch.setattr(selection, "_gpus", lambda: 2)
    assert selection.resolve_devices([]) == ["cuda:0"]
    assert selection.resolve_devices(["all", "cuda", "cuda:1", "cpu:1"]) == ["cpu", "cuda:0", "cuda:1", "cpu:1"]
    with pytest.raises(UsageError, match="the GPUs here are cuda:0 to cuda:1"):
        selection.resolve_devices(["cuda:2"])
    monkeypatch.setattr(selection, "_gpus", lambda: 0)
    assert selection.resolve_devices([]) == selection.resolve_devices(["all"]) == ["cpu"]


def test_importing_selection_imports_no_torch() -> None:
    code = "import sys, spikemark.suites.selection; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
