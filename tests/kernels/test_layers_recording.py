"""``examples/record_digits.py``: a recording of trained activity in the form that ``--spikes`` reads."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from spikemark.kernels import recording

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "record_digits.py"


@pytest.fixture
def example():
    """The example as a module; on one thread, because its tensors are small."""
    spec = importlib.util.spec_from_file_location("record_digits", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(before)


def needs_digits() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install spikemark[digits]")


def test_records_a_trained_first_layer(example, tmp_path, capsys):
    needs_digits()
    out = tmp_path / "digits.npz"
    assert example.main([str(out), "--images", "5", "--steps", "8", "--epochs", "3"]) == 0
    right = int(re.search(r"(\d+)% of 773 unseen digits right", capsys.readouterr().out).group(1))
    assert right >= 50  # a guess gets 10: the spikes come from a network that has learnt
    with np.load(out, allow_pickle=False) as file:
        assert list(file) == ["spikes"] and file["spikes"].dtype == bool
        stored = file["spikes"]
    spikes = recording.load(out)
    assert tuple(spikes.shape) == stored.shape == (5, 8, 16, 8, 8)
    assert np.array_equal(spikes.numpy(), stored) and 0.01 < stored.mean() < 0.6


def test_the_same_seed_records_the_same(example, tmp_path):
    needs_digits()
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        options = ["--images", "2", "--steps", "3", "--epochs", "0", "--seed", str(seed)]
        assert example.main([str(tmp_path / name), *options]) == 0
        found.append(recording.load(tmp_path / name))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_errors_are_one_line(example, tmp_path, capsys, monkeypatch):
    needs_digits()
    assert example.main([str(tmp_path / "no" / "digits.npz"), "--epochs", "0"]) == 2
    assert re.fullmatch(r".*/no is no folder to write digits\.npz into\n", capsys.readouterr().err)
    assert example.main([str(tmp_path), "--epochs", "0", "--steps", "2"]) == 2
    assert re.fullmatch(r"cannot write .*: Is a directory\n", capsys.readouterr().err)
    with pytest.raises(SystemExit, match="2"):
        example.main([str(tmp_path / "x.npz"), "--images", "0"])
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert example.main([str(tmp_path / "x.npz")]) == 2
    assert capsys.readouterr().err == "scikit-learn is not installed: pip install spikemark[digits]\n"
    assert not (tmp_path / "x.npz").exists()
