"""A person's recording: what is read, in which order of axes, and that every broken file gives one clear line."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from spikemark.kernels import recording

RECORDED = Path(__file__).parents[2].parent / "shared" / "data" / "pilotnet-lif-conv0.npz"


class Exploit:
    """Unpickling this writes a file: the proof that nothing is unpickled is that the file is not there."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self):
        return (open, (self.target, "w"))


def save(path: Path, **arrays: object) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def npy_header(shape: tuple[int, ...], descr: str) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def raw_npz(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("spikes.npy", content)
    return path


def spikes(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).random(shape) < 0.2


@pytest.mark.parametrize("time_axis", [None, 0, 1, 2, 3])
def test_four_axes_become_one_sample_with_time_first(tmp_path: Path, time_axis: int | None) -> None:
    whole = spikes((3, 4, 5, 6))  # [C, T, H, W] with time at 1
    axis = 1 if time_axis is None else time_axis
    path = save(tmp_path / "a.npz", spikes=np.moveaxis(whole, 1, axis))
    got = recording.load(path, time_axis)
    assert list(got.shape) == [1, 4, 3, 5, 6]
    assert np.array_equal(got.numpy()[0], whole.transpose(1, 0, 2, 3))


@pytest.mark.parametrize("time_axis", [None, 0, 1, 4])
def test_five_axes_keep_the_batch(tmp_path: Path, time_axis: int | None) -> None:
    whole = spikes((2, 4, 3, 5, 6))  # [B, T, C, H, W]
    axis = 1 if time_axis is None else time_axis
    got = recording.read(save(tmp_path / "a.npz", spikes=np.moveaxis(whole, 1, axis)), time_axis)
    assert got.flags.c_contiguous and np.array_equal(got, whole)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_zeros_and_ones_of_any_dtype_and_order(tmp_path: Path, dtype: str, order: str) -> None:
    whole = spikes((3, 4, 5, 6))
    got = recording.read(save(tmp_path / "a.npz", spikes=np.asarray(whole.astype(dtype), order=order)))
    assert got.dtype == bool and np.array_equal(got[0], whole.transpose(1, 0, 2, 3))


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded driving-network spikes (shared/data) are not here")
def test_the_recorded_driving_network(tmp_path: Path) -> None:
    assert recording.header(RECORDED).shape == (24, 24, 32, 99)
    got = recording.load(RECORDED)
    assert list(got.shape) == [1, 24, 24, 32, 99]
    assert got.double().mean().item() == pytest.approx(0.0914620379)
    with np.load(RECORDED) as file:
        assert np.array_equal(got[0, 7, 3].numpy(), file["spikes"][3, 7])


def broken(folder: Path) -> dict[str, tuple[Path, str]]:
    good = save(folder / "good.npz", spikes=spikes((3, 40, 50, 60))).read_bytes()
    (folder / "half.npz").write_bytes(good[: len(good) // 2])
    flipped = bytearray(good)
    flipped[len(good) // 3] ^= 0xFF
    (folder / "flipped.npz").write_bytes(flipped)
    (folder / "nothing.npz").write_bytes(b"")
    (folder / "text.npz").write_text("spikes\n0 1 0\n")
    np.save(folder / "plain.npy", spikes((3, 4, 5, 6)))
    (folder / "folder.npz").mkdir()
    nan, beyond, below, between, infinite = (np.zeros((3, 4, 5, 6), "float32") for _ in range(5))
    nan[1, 2, 3, 4], beyond[1, 2, 3, 4], below[0, 0, 0, 0], between[2, 0, 0, 0] = np.nan, 2, -1, 0.5
    infinite[1, 1, 1, 1] = np.inf
    objects = np.empty((1, 1, 1, 1), object)
    objects[0, 0, 0, 0] = Exploit(str(folder / "unpickled"))
    return {
        "missing": (folder / "missing.npz", "does not exist"),
        "truncated": (folder / "half.npz", "truncated"),
        "damaged": (folder / "flipped.npz", "damaged"),
        "no bytes": (folder / "nothing.npz", "truncated"),
        "text": (folder / "text.npz", "not a .npz"),
        "npy": (folder / "plain.npy", "not a .npz"),
        "folder": (folder / "folder.npz", "is not a plain file"),
        "no array": (save(folder / "other.npz", weights=np.ones(3)), "no array 'spikes'; it holds: 'weights'"),
        "rank 3": (save(folder / "rank.npz", spikes=spikes((3, 4, 5))), "shape [3, 4, 5]"),
        "scalar": (save(folder / "scalar.npz", spikes=np.bool_(True)), "shape []"),
        "empty": (save(folder / "empty.npz", spikes=spikes((3, 0, 5, 6))), "is empty"),
        "NaN": (save(folder / "nan.npz", spikes=nan), "NaN"),
        "two": (save(folder / "two.npz", spikes=beyond), "values from 0 to 2"),
        "minus": (save(folder / "minus.npz", spikes=below), "values from -1 to 0"),
        "infinite": (save(folder / "inf.npz", spikes=infinite), "values from 0 to inf"),
        "half a spike": (save(folder / "between.npz", spikes=between), "holds 0.5"),
        "complex": (save(folder / "complex.npz", spikes=between.astype(complex)), "complex128"),
        "strings": (save(folder / "strings.npz", spikes=between.astype(str)), "bool or 0/1"),
        "objects": (save(folder / "objects.npz", spikes=objects), "never unpickled"),
        "bool of 7": (raw_npz(folder / "seven.npz", npy_header((1, 1, 1, 2), "|b1") + b"\x07\x01"), "from 1 to 7"),
        "short": (raw_npz(folder / "short.npz", npy_header((3, 4, 5, 6), "|b1") + bytes(10)), "is truncated"),
        "long": (raw_npz(folder / "long.npz", npy_header((1, 1, 1, 2), "|b1") + bytes(10)), "holds more"),
        "huge": (raw_npz(folder / "huge.npz", npy_header((9999, 9999, 999, 999), "<f8")), "GiB"),
        "negative": (raw_npz(folder / "negative.npz", npy_header((-1, 4, 5, 6), "|b1")), "shape is [-1, 4, 5, 6]"),
        "a bool for a size": (raw_npz(folder / "true.npz", npy_header((True, 1, 1, 2), "|b1") + bytes(2)), "[True, 1"),
        "long header": (
            raw_npz(folder / "header.npz", b"\x93NUMPY\x02\x00" + (2**32 - 1).to_bytes(4, "little") + b"{"),
            "its header says that it has 4294967295 bytes",
        ),
        "device": (Path("/dev/null"), "is not a"),
        "bad header": (raw_npz(folder / "magic.npz", b"\x93NUMPY\x01\x00\x06\x00{}}}} \n"), "damaged array"),
        "not an array": (raw_npz(folder / "noarray.npz", b"hello"), "damaged array"),
    }


def test_every_broken_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    for label, (path, expected) in broken(tmp_path).items():
        with pytest.raises(ValueError) as caught:
            recording.load(path)
        message = str(caught.value)
        assert str(path) in message and expected in message and "\n" not in message, (label, message)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("time_axis", [4, -1])
def test_a_time_axis_that_is_not_there(tmp_path: Path, time_axis: int) -> None:
    path = save(tmp_path / "a.npz", spikes=spikes((3, 4, 5, 6)))
    with pytest.raises(ValueError, match=rf"time axis must be 0 to 3, got {time_axis}"):
        recording.load(path, time_axis)


def test_a_claim_beyond_the_limit_is_refused_before_the_data_is_read(tmp_path: Path, monkeypatch) -> None:
    path = save(tmp_path / "a.npz", spikes=spikes((3, 4, 5, 6)))
    monkeypatch.setattr(recording, "BYTES_LIMIT", 359)
    with pytest.raises(ValueError, match="at most"):
        recording.header(path)
    monkeypatch.setattr(recording, "BYTES_LIMIT", 360)
    assert recording.header(path).bytes == 360


def test_a_long_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A few bytes of a compressed file can say and hold gigabytes of header."""
    path = raw_npz(tmp_path / "a.npz", b"\x93NUMPY\x02\x00" + (2**24).to_bytes(4, "little") + b" " * 2**24)
    with recording._opened(path) as (stream, size):
        with pytest.raises(ValueError, match="its header says"):
            recording._header(path, stream, size, None)
        assert stream.tell() < 100


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="is not a plain file"):
        recording.read(tmp_path / "a.npz")


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", spikes=spikes((3, 4, 5, 6)))
    code = (
        "import sys; from spikemark.kernels import recording as r; r.read(sys.argv[1]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_a_negative_zero_is_written_as_zero(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", spikes=np.array([-1.0, -0.0]).reshape(1, 2, 1, 1))
    with pytest.raises(ValueError, match=r"holds values from -1 to 0 in 'spikes'"):
        recording.read(path)
