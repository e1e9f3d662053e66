"""Bad input on the command line: one line on stderr that names it, the exit code of the design, nothing on stdout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from spikemark import runner
from spikemark.harness.runfolder import RunFolder, new_meta

COMMAND = [sys.executable, "-m", "spikemark"]


LAYER = "[n]\ntime_steps = 2\nbatch = 1\nspike_rate = 0.1\nlayers = [{ name = 'l', neuron = 8 }]\n"
WRONG_LAYERS = {
    "ok": LAYER,
    "clash": LAYER.replace("[n]", "[mnist]").replace("'l'", "'conv1'"),
    "field": LAYER.replace("batch", "bach"),
    "tau_x": LAYER.replace("batch", "neuron_params = { tau_x = 3 }\nbatch"),
    "many": LAYER.replace("8", "9" * 30),
    "long": LAYER.replace("'l'", f"'{'l' * 65}'"),
    "from": LAYER.replace("8 }", "8, from = 'later' }"),
    "deep": "a = " + "[" * 100_000,
    "large": "#" * (2**20 + 1),
}


WRONG_PLUGINS = {
    "nothing": "",
    "int8": "'clamped_sign', dtypes=('int8',)",
    "nodtype": "'clamped_sign', dtypes=()",
    "tpu": "'clamped_sign', device='tpu'",
    "operator": "'clamped_sgn'",
    "taken": "'clamped_sign', name='native'",
    "escape": "'clamped_sign', name='\\x1b[31m'",
    "star": "'clamped_sign', name='*'",
    "second": "'clamped_sign', baseline=True",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with every file that is wrong in one way."""
    monkeypatch.chdir(tmp_path)
    good = np.zeros((2, 3, 4, 4), np.float32)
    bad = {"nan": np.nan, "two": 2, "minus": -1, "half": 0.5}
    for name, value in bad.items():
        values = good.copy()
        values[1, 1, 1, 1] = value
        np.savez(f"{name}.npz", spikes=values)
    np.savez("good.npz", spikes=good)
    np.savez("rank.npz", spikes=good[0])
    np.savez("empty.npz", spikes=good[:, :0])
    np.savez("object.npz", spikes=np.array([[[[None]]]], object))
    np.savez("other.npz", weights=good)
    Path("cut.npz").write_bytes(Path("good.npz").read_bytes()[:200])
    layer = "[n]\ntime_steps = 2\nbatch = 1\nspike_rate = 0.1\n{}\nlayers = [{{ name = 'l', neuron = 8 }}]\n"
    for name, line in {
        "tau": "neuron_params = { tau_m = 0.5 }",
        "equal": "neuron_params = { tau_m = 4, tau_s = 4 }",
        "threshold": "neuron_params = { v_th = -1 }",
    }.items():
        Path(f"{name}.toml").write_text(layer.format(line))
    for name, text in WRONG_LAYERS.items():
        Path(f"{name}.toml").write_text(text)
    Path("broken.py").write_text("import nothing_of_this_name\n")
    Path("leaves.py").write_text("import sys\nsys.exit(0)\n")
    for name, call in WRONG_PLUGINS.items():
        head = "from spikemark.kernels import implementation\n"
        Path(f"{name}.py").write_text(f"{head}@implementation({call})\nclass A:\n    pass\n" if call else head)
    Path("syntax.py").write_text("def f(:\n")
    Path("file").write_text("")
    Path("full").mkdir()
    Path("full/letter.txt").write_text("dear")
    RunFolder.create("run", new_meta([], seed=0, preset="quick", passes=1, planned=0)).close()
    return tmp_path


USAGE = [
    ("lst", "unknown command 'lst' (did you mean 'list'?)"),
    ("list operator", "unknown kind 'operator' (did you mean 'operators'?)"),
    ("list --json", "list --json needs one of operators"),
    ("run --opertor x", "unrecognized argument '--opertor' (did you mean '--operator'?)"),
    ("run --operator", "argument --operator: expected one argument"),
    ("run extra", "unrecognized argument 'extra'"),
    ("run --preset quik", "unknown preset 'quik' (did you mean 'quick'?)"),
    ("run --operator srm_neurom", "unknown operator 'srm_neurom' (did you mean 'srm_neuron'?)"),
    ("run --phase bakward", "unknown phase 'bakward' (did you mean 'backward'?)"),
    ("run --implementation NATIVE", "unknown implementation 'NATIVE' (did you mean 'native'?)"),
    ("run --implementation natve", "unknown implementation 'natve' (did you mean 'native'?)"),
    ("run --workload mnist/cnv1", "unknown workload 'mnist/cnv1' (did you mean 'mnist/conv1'?)"),
    ("run --workload mnist", "unknown workload 'mnist' (did you mean 'mnist/*'?)"),
    ("run --workload mnist/", "unknown workload 'mnist/' (did you mean 'mnist/*'?)"),
    ("run --workload recording:*", "workload 'recording:*' needs a recording: --spikes FILE"),
    ("verify --workload mnist/cnv1", "unknown workload 'mnist/cnv1' (did you mean 'mnist/conv1'?)"),
    ("run --device gpu", "unknown device 'gpu' (did you mean 'cuda'?)"),
    ("env --device gpu", "unknown device 'gpu' (did you mean 'cuda'?)"),
    ("run --device cuda:77", "device 'cuda:77': "),
    ("run --device cpu:\u0662", "unknown device 'cpu:\u0662'"),
    ("run --device CPU", "unknown device 'CPU' (did you mean 'cpu'?)"),
    ("run --device cpu:0", "device 'cpu:0': threads must be from 1 to"),
    ("run --dtype int8", "unknown dtype 'int8'; known: float32, float16, bfloat16, float64"),
    ("run --dtype float23", "unknown dtype 'float23' (did you mean 'float32'?)"),
    ("run --batch 0", "argument --batch: a whole number of at least 1 is needed, got '0'"),
    ("run --batch 1e3", "argument --batch: a whole number of at least 1 is needed, got '1e3'"),
    ("run --batch 99999999999999999999", "a whole number of at least 1 and at most 999999999 is needed"),
    ("run --batch -3", "argument --batch: a whole number of at least 1 is needed, got '-3'"),
    ("run --passes -1", "argument --passes: "),
    ("run --seed ten", "argument --seed: a whole number of at least 0 is needed, got 'ten'"),
    ("run --spike-rate -5%", "spike rate must be from 0 to 1 (or 0% to 100%), got -0.05"),
    ("run --spike-rate 150%", "spike rate must be from 0 to 1 (or 0% to 100%), got 1.5"),
    ("run --spike-rate 12", "spike rate must be from 0 to 1 (or 0% to 100%), got 12"),
    ("run --spike-rate nan%", "spike rate must be from 0 to 1"),
    ("run --spike-rate much", "argument --spike-rate: a firing rate such as 0.05 or 5% is needed, got 'much'"),
    ("run --time-limit -5s", "argument --time-limit: a time such as 90, 90s, 5m or 2h is needed, got '-5s'"),
    ("run --time-limit 999999999h", "a time such as 90, 90s, 5m or 2h is needed, at most 10 days, got"),
    ("run --time-limit 0", "argument --time-limit: a time such as 90, 90s, 5m or 2h is needed, got '0'"),
    ("run --time-axis 1", "--time-axis says where time is in a recording: it needs --spikes FILE"),
    ("run --workload-file tau.toml", "tau.toml: n/l: SrmParams: tau_m must be at least 1 time step, got 0.5"),
    ("run --workload-file equal.toml", "equal.toml: n/l: SrmParams: tau_m must be different from tau_s=4, got 4"),
    ("run --workload-file threshold.toml", "threshold.toml: n/l: SrmParams: v_th must be greater than 0, got -1"),
    ("run --workload-file none.toml", "workload file none.toml: No such file"),
    ("run --workload-file clash.toml", "clash.toml: there is already a workload 'mnist/conv1'"),
    ("list workloads --workload-file clash.toml", "clash.toml: there is already a workload 'mnist/conv1'"),
    ("list workloads --workload-file ok.toml --workload-file ok.toml", "there is already a workload 'n/l'"),
    ("list workloads --workload-file field.toml", "field.toml: n/l: unknown field 'bach'"),
    ("list workloads --workload-file tau_x.toml", "tau_x.toml: n/l: unknown field 'tau_x' of `neuron_params`"),
    ("list workloads --workload-file many.toml", "many.toml: n/l: `neuron` must be an integer from 1 to 1000000000"),
    ("list workloads --workload-file long.toml", "the name has 65 characters; at most 64 are allowed"),
    ("list workloads --workload-file from.toml", '`from` must be "input" or an earlier layer of the network'),
    ("list workloads --workload-file deep.toml", "workload file deep.toml is nested too deeply"),
    ("list workloads --workload-file large.toml", "workload file large.toml has more than 1048576 bytes"),
    ("list operators --workload-file ok.toml", "--workload-file is for `spikemark list workloads`"),
    ("list --plugin leaves.py", "--plugin is for `spikemark list implementations`"),
    ("list workloads --all", "--all is for `spikemark list implementations`"),
    ("list workloads --workload-file file", "workload file file holds no network"),
    ("run --spikes none.npz", "spike file none.npz does not exist"),
    ("run --spikes /dev/null", "spike file /dev/null is not a"),
    ("run --spikes cut.npz", "spike file cut.npz is not a .npz file, or is truncated"),
    ("run --spikes file", "spike file file is not a .npz file"),
    ("run --spikes rank.npz", "spike file rank.npz has 'spikes' of shape [3, 4, 4]: [C, T, H, W] or"),
    ("run --spikes two.npz", "spike file two.npz holds values from 0 to 2"),
    ("run --spikes minus.npz", "spike file minus.npz holds values from -1 to 0"),
    ("run --spikes half.npz", "spike file half.npz holds 0.5"),
    ("run --spikes nan.npz", "spike file nan.npz holds NaN"),
    ("run --spikes object.npz", "spike file object.npz has 'spikes' as an array of Python objects"),
    ("run --spikes empty.npz", "spike file empty.npz is empty"),
    ("run --spikes other.npz", "spike file other.npz has no array 'spikes'; it holds: 'weights'"),
    ("run --spikes good.npz --time-axis 4", "spike file good.npz has 4 axes, so the time axis must be 0 to 3, got 4"),
    ("run --spikes good.npz --spikes good.npz", "already a workload 'recording:good/conv'"),
    ("run --plugin none.py", "plug-in none.py is not a file"),
    ("run --plugin broken.py", "plug-in broken.py failed to import: ModuleNotFoundError"),
    ("run --plugin leaves.py", "plug-in leaves.py failed to import: SystemExit"),
    ("run --plugin nothing.py", "plug-in nothing.py registers no implementation"),
    ("run --plugin int8.py", "dtypes must be some of float32, float16, bfloat16, float64, got int8"),
    ("run --plugin nodtype.py", "dtypes must be some of float32, float16, bfloat16, float64, got none"),
    ("run --plugin tpu.py", "device must be 'any', 'cpu' or 'cuda', got 'tpu'"),
    ("run --plugin operator.py", "unknown operator 'clamped_sgn' (did you mean 'clamped_sign'?)"),
    ("run --plugin taken.py", "clamped_sign already has an implementation named 'native' (from spikemark)"),
    ("run --plugin escape.py", "the name '\\x1b[31m' may hold only letters"),
    ("run --plugin star.py", "the name '*' may hold only letters"),
    ("run --plugin second.py", "clamped_sign already has a baseline"),
    ("run --plugin syntax.py", "plug-in syntax.py failed to import: SyntaxError"),
    ("run --plugin full", "plug-in full is not a file"),
    ("list implementations --plugin none.py", "plug-in none.py is not a file"),
    ("run --resume", "--resume needs --out DIR"),
    ("run --resume --out nowhere", "run folder nowhere does not exist"),
    ("run --resume --out full", "full is no run folder"),
    ("run --resume --out run", "run was not made by `spikemark run`"),
    ("run --out full", "full exists and is no run folder"),
    ("run --out run", "run already holds a run"),
    ("run --out file", "file is a file, not a folder"),
    ("run --out file/inner", "file/inner"),
    (f"run --resume --out {'o' * 300}", "File name too long"),
    (f"report {'o' * 300}", "File name too long"),
    (f"run --plugin {'p' * 300}", "File name too long"),
    ("report", "the following arguments are required: RUN"),
    ("report nowhere", "run folder nowhere does not exist"),
    ("report full", "full is no run folder"),
    ("report run -o nowhere/page.html", "cannot write nowhere/page.html"),
]


@pytest.mark.parametrize(("line", "message"), USAGE, ids=[line for line, _ in USAGE])
def test_bad_input_is_one_line_and_exit_2(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    code = runner.main(line.split())
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.startswith("spikemark: ") and err.count("\n") == 1 and err.endswith("\n")
    assert message in err
    left = {p.name for p in folder.iterdir() if p.is_dir()}
    assert left == {"full", "run"}, "nothing is left behind"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--device", ""], "an empty argument after --device: is a variable not set?"),
        (["run", "--out="], "an empty argument after --out: is a variable not set?"),
        (["run", "--spikes", "", "--preset", "smoke"], "an empty argument after --spikes"),
        (["report", ""], "an empty argument after report"),
        ([""], "an empty argument: is a variable not set?"),
        (["run", "--out", "a\0b"], "a NUL character in 'a\\x00b'"),
        (["run", "--operator", "\udcff"], "unknown operator '\\udcff'"),
    ],
)
def test_words_that_a_script_gets_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """An empty one would else mean "not given" and measure what nobody asked for."""
    code = runner.main(words)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run --operator srm_neuron --workload mnist/pool1", "--workload mnist/conv1 or"),
        ("run --workload cifar11*", "no workload matches 'cifar11*' (did you mean"),
        ("verify --operator conv_backward --phase step", "--phase input or weight"),
        ("verify --implementation cupy_raw --device cpu", "--implementation torch_eager or"),
    ],
)
def test_a_selection_that_matches_nothing_is_exit_4(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    code = runner.main(line.split())
    out, err = capsys.readouterr()
    assert (code, out) == (4, "") and message in err and err.count("\n") == 1, err


def test_names_are_shown_inert(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["run", "--operator", "\x1b[31mred\n\x07\u202egnp"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.isascii() and all(c.isprintable() for c in err[:-1])


def test_the_real_command_has_no_traceback_and_the_codes(folder: Path) -> None:
    """What the shell sees: exit codes, one line on stderr, also where the error comes after torch is imported."""
    for line, code in (("run --preset quik", 2), ("run --operator srm_neuron --workload mnist/pool1", 4), ("lst", 2)):
        done = subprocess.run([*COMMAND, *line.split()], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc here")
def test_a_folder_that_cannot_be_written_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/proc refuses new folders even to the super-user."""
    assert runner.main(["run", "--preset", "smoke", "--out", "/proc/run"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "/proc/run" in err and err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_standard_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "list", "operators"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space left" in done.stderr


def test_verify_counts_only_what_was_compared() -> None:
    """Without a compiler "2 of 4 are right" read as two wrong results."""
    from spikemark.commands import verify

    assert (
        verify._verdict(["ok", "unavailable", "ok", "unavailable"])
        == "2 of 2 cases are right; not compared: 2 unavailable"
    )
    assert verify._verdict(["ok", "incorrect", "error"]) == "1 of 2 cases are right; not compared: 1 error"
    assert verify._verdict(["crashed", "unavailable"]) == "nothing was compared: 1 crashed, 1 unavailable"
    assert verify._verdict(["ok"]) == "1 of 1 case is right"


def test_what_matches_no_case_beside_what_does_is_said() -> None:
    """`torch` is an implementation, of other operators: dropping it without a word left the speed-ups empty."""
    command = [sys.executable, "-m", "spikemark", "verify", "--operator", "srm_neuron", "--phase", "forward"]
    names = ["--implementation", "torch", "--implementation", "torch_vectorized", "--implementation", "torch_v*"]
    done = subprocess.run([*command, *names, "--batch", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("spikemark:")]
    assert said == ["spikemark: --implementation torch matches none of the selected cases"]
