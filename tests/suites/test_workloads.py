"""The named workloads: what is written down fits together, means what torch means, and bad entries are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from spikemark.harness.errors import UsageError
from spikemark.kernels.types import ConvGeometry, Problem, SrmParams
from spikemark.suites import workloads
from spikemark.suites.workloads import Workload

NETWORKS: dict[str, list[Workload]] = {}
for each in workloads.built_in().values():
    NETWORKS.setdefault(each.name.split("/")[0], []).append(each)

# The table of the specification: T, batch, tau_m, tau_s, tau_g, v_th, firing rate, layers, last output.
PUBLISHED = {
    "mnist": (5, 50, 5, 3, 2.5, 1, 0.12, 6, 10),
    "fashion-mnist": (5, 50, 5, 3, 2.5, 1, 0.12, 6, 10),
    "n-mnist": (30, 50, 8, 4, 3, 1, 0.08, 5, 10),
    "cifar10-vgg": (12, 50, 7, 4, 3.5, 1, 0.10, 14, 10),
    "cifar100-vgg": (16, 50, 10, 6, 5.5, 1, 0.09, 14, 100),
    "cifar10-resnet": (12, 50, 7, 4, 3.5, 1, 0.10, 18, 10),
    "cifar10-dvs": (20, 16, 8, 4.5, 4, 1, 0.05, 15, 10),
    "dvs128-gesture": (20, 16, 7.5, 4, 3.5, 1, 0.05, 13, 11),
}


@pytest.mark.parametrize("network", PUBLISHED)
def test_a_network_is_the_published_one(network: str) -> None:
    steps, batch, tau_m, tau_s, tau_g, v_th, rate, layers, classes = PUBLISHED[network]
    assert len(NETWORKS[network]) == layers
    assert NETWORKS[network][-1].out_shape == (classes,)
    for workload in NETWORKS[network]:
        assert (workload.time_steps, workload.batch, workload.spike_rate) == (steps, batch, rate)
        assert workload.params == SrmParams(tau_m, tau_s, tau_g, v_th)


def test_nothing_but_the_published_networks_and_the_public_shapes() -> None:
    assert set(NETWORKS) == {*PUBLISHED, "snn-libraries", "neuron-layer"}
    shapes = {w.name: (w.kind, w.time_steps, w.batch, w.in_shape) for n in NETWORKS.values() for w in n}
    for n in (4096, 8192, 16384):
        assert shapes[f"snn-libraries/linear-{n}"] == ("linear", 500, 16, (n,))
    for steps in (4, 16, 32):
        assert shapes[f"neuron-layer/t{steps}"] == ("neuron", steps, 64, (65536,))


@pytest.mark.parametrize("network", PUBLISHED)
def test_each_layer_takes_what_the_one_before_gives(network: str) -> None:
    """Follow the written sizes through the network, with torch's own shapes, from its input to its classes."""
    import torch

    outputs = {}
    for workload in NETWORKS[network]:
        if workload.source != "input":
            given = outputs[workload.source]
            flat = (int(np.prod(given)),) if workload.kind == "linear" else given
            assert flat == workload.in_shape, (
                f"{workload.name} takes {workload.in_shape}, {workload.source} gives {given}"
            )
        x = torch.empty(1, *workload.in_shape, device="meta")
        if workload.kind == "conv":
            g = workload.geometry
            assert workload.kernel is not None
            weight = torch.empty(
                workload.out_shape[0], workload.in_shape[0] // g.groups, *workload.kernel, device="meta"
            )
            y = torch.nn.functional.conv2d(x, weight, None, g.stride, g.padding, g.dilation, g.groups)
        elif workload.kind == "pool":
            y = torch.nn.functional.avg_pool2d(x, workload.kernel)
        else:
            y = torch.nn.functional.linear(x, torch.empty(*workload.out_shape, *workload.in_shape, device="meta"))
        assert tuple(y.shape[1:]) == workload.out_shape, workload.name
        outputs[workload.name.split("/")[1]] = workload.out_shape
    sources = {w.source for w in NETWORKS[network]}
    unused = set(outputs) - sources - {NETWORKS[network][-1].name.split("/")[1]}
    assert all("shortcut" in name for name in unused), "a shortcut joins its block's output; all others feed a layer"


def test_kinds_give_their_operators() -> None:
    by_name = workloads.built_in()
    assert set(by_name["cifar10-vgg/conv2"].operators) == {"srm_neuron", "conv_backward", "srm_conv2d", "clamped_sign"}
    assert set(by_name["mnist/linear1"].operators) == {"srm_neuron", "srm_linear", "clamped_sign"}
    assert set(by_name["n-mnist/pool1"].operators) == {"adjusted_avg_pool2d"}
    assert set(by_name["neuron-layer/t4"].operators) == {"srm_neuron", "clamped_sign"}


def test_a_problem_is_the_workload_at_a_batch_and_rate() -> None:
    workload = workloads.built_in()["cifar10-resnet/stage2-block1-shortcut"]
    assert workload.summary == "128>256 k1/2/0 @16x16"
    problem = workload.problem(batch=2, spike_rate=0.02, seed=3)
    assert (problem.batch, problem.spike_rate, problem.seed, problem.time_steps) == (2, 0.02, 3, 12)
    assert (problem.in_shape, problem.out_shape, problem.kernel) == ((128, 16, 16), (256, 8, 8), (1, 1))
    assert problem.geometry == ConvGeometry(stride=2)
    assert Problem.from_json(problem.to_json()) == problem
    assert (workload.problem().batch, workload.problem().spike_rate) == (50, 0.10)


def test_a_recording_becomes_a_convolution_and_a_pool(tmp_path: Path) -> None:
    spikes = np.zeros((2, 4, 3, 5, 7), bool)
    spikes[:, 1] = True
    path = tmp_path / "my <run> [1].npz"
    np.savez(path, spikes=spikes)
    conv, pool = workloads.from_recording(path)
    assert conv.name == "recording:my_run_1_/conv" and pool.name == "recording:my_run_1_/pool"
    assert conv.summary == "3>3 k3/1/1 @5x7"
    assert set(conv.operators) == {"conv_backward", "srm_conv2d"} and pool.operators == ("adjusted_avg_pool2d",)
    problem = conv.problem(batch=50, spike_rate=0.9)
    assert (problem.batch, problem.time_steps, problem.spike_rate) == (2, 4, 0.25)
    assert problem.in_shape == problem.out_shape == (3, 5, 7) and pool.out_shape == (3, 2, 3)
    assert problem.recording is not None and problem.recording.time_axis == 1


def test_a_recording_too_small_for_a_pool_has_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "row.npz", spikes=np.ones((3, 4, 1, 7), bool))
    assert [w.kind for w in workloads.from_recording(tmp_path / "row.npz")] == ["conv"]


def test_a_broken_recording_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.npz does not exist"):
        workloads.from_recording(tmp_path / "none.npz")


GOOD = """
[mine]
time_steps = 8
batch = 4
spike_rate = 0.05
neuron_params = { tau_m = 9, tau_s = 4, tau_g = 2 }
layers = [
    { name = "deep", conv = [8, 16], size = [9, 12], kernel = [3, 5], stride = [2, 1], padding = [1, 2], groups = 4 },
    { name = "wide", conv = [8, 16], size = 9, kernel = 3, dilation = 2, from = "input", batch = 1 },
]
"""


def test_a_file_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    deep, wide = workloads.load(path).values()
    assert deep.summary == "8>16 k3x5/2x1/1x2 @9x12" and deep.out_shape == (16, 5, 12)
    assert deep.params == SrmParams(9, 4, 2) and deep.geometry.groups == 4
    assert (wide.out_shape, wide.batch, wide.source, wide.geometry.dilation) == ((16, 5, 5), 1, "input", (2, 2))


@pytest.mark.parametrize(
    ("was", "becomes", "named"),
    [
        ("tau_m = 9", "tau_m = 0.5", "mine/deep: SrmParams: tau_m must be at least 1 time step, got 0.5"),
        ("tau_s = 4", "tau_s = 9", "tau_m must be different from tau_s=9, got 9"),
        ("tau_g = 2", "v_th = -1", "v_th must be greater than 0, got -1"),
        ("tau_g = 2", "tau_x = 2", "tau_x"),
        ("batch = 4", "batch = 0", "`batch` must be an integer from 1 to 1000000000, got 0"),
        ("batch = 4", "", "`batch` is missing"),
        ("0.05", "5", "`spike_rate` must be a number from 0 to 1, got 5"),
        ("time_steps = 8", "time_steps = 8.5", "`time_steps` must be an integer from 1 to 1000000000, got 8.5"),
        ('"wide"', '"deep"', "the name is used twice"),
        ('"wide"', '"wi/de"', "'wi/de'"),
        ("kernel = 3,", "kernel = 30,", "a kernel of 30 does not fit an input of 9x9"),
        ("kernel = 3,", "", "mine/wide: `kernel` is missing"),
        ("groups = 4", "groups = 3", "`groups` = 3 does not divide the channels 8 and 16"),
        ("stride = [2, 1]", "stride = 0", "stride"),
        ("size = 9,", "size = 9, pool = 3,", "needs exactly one of conv, pool, linear, neuron"),
        ("size = 9,", "sise = 9,", "unknown field 'sise'"),
        ("[8, 16], size = 9,", "8, size = 9,", "`conv` must be two integers, got 8"),
        ("batch = 4", "batch = ", "is not valid TOML"),
        ("[mine]", "[mine]\ncolour = 1", "unknown field 'colour'"),
        ("layers = [", "layers = []\nrest = [", "needs a list `layers`"),
        (GOOD, "", "holds no network"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_entry(tmp_path: Path, was: str, becomes: str, named: str) -> None:
    assert was in GOOD
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(was, becomes))
    with pytest.raises(UsageError) as caught:
        workloads.load(path)
    message = str(caught.value)
    assert "mine.toml" in message and named in message and "\n" not in message, message


def test_a_file_saved_by_a_windows_editor(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert [w.name for w in workloads.load(path).values()] == ["mine/deep", "mine/wide"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: No such file"):
        workloads.load(tmp_path / "none.toml")
