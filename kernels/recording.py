"""A person's own spike trains: a ``.npz`` file with the array ``spikes``, checked before anything is measured.

Only ``load`` imports torch. The header is read and judged before the data, so a file that claims to be huge costs
nothing, and an array of Python objects is refused without being unpickled.
"""

from __future__ import annotations

import io
import math
import stat
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

if TYPE_CHECKING:
    from torch import Tensor

ARRAY = "spikes"
TIME_AXIS = 1
BYTES_LIMIT = 2**32  # of the array as stored: more would not fit beside its copy on the machines we know
HEADER_LIMIT = 10_000  # bytes, as numpy's own; a boolean array's has about a hundred


@dataclass(frozen=True)
class Header:
    """What a recording says of itself: the array's ``shape`` as stored, its dtype and whether it is column-major."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool

    @property
    def bytes(self) -> int:
        """Size of the array's data."""
        return math.prod(self.shape) * self.dtype.itemsize


def header(path: str | Path, time_axis: int | None = None) -> Header:
    """The header of the recording's array, without its data. ``ValueError`` as ``read``."""
    with _opened(path) as (stream, size):
        return _header(path, stream, size, time_axis)


def read(path: str | Path, time_axis: int | None = None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The spikes as a bool array [B, T, C, H, W] (B = 1 for a recording [C, T, H, W]).

    ``time_axis`` is the axis of time in the stored array (default 1); the other axes keep their order, [C, H, W] or
    [B, C, H, W]. Raises ``ValueError`` with one line that names the file and its fault: it is missing, no ``.npz``,
    truncated, without an array ``spikes``, of another rank, empty, larger than ``BYTES_LIMIT``, an array of objects
    or text, or holds anything but 0 and 1.
    """
    with _opened(path) as (stream, size):
        head = _header(path, stream, size, time_axis)
        data = bytearray()
        while block := stream.read(min(2**24, max(1, head.bytes - len(data)))):
            data += block
            if len(data) >= head.bytes:
                break
        if len(data) != head.bytes:
            raise _fault(path, f"is truncated: {len(data)} of {head.bytes} bytes of {ARRAY!r}")
        if stream.read(1):  # reading to the end also makes zipfile check the sum
            raise _fault(path, f"holds more than the {head.bytes} bytes that the header of {ARRAY!r} says")
    order: Any = "F" if head.fortran_order else "C"
    values = np.frombuffer(data, dtype=head.dtype).reshape(head.shape, order=order)
    _check_values(path, values)
    spikes = np.moveaxis(values.astype(bool), TIME_AXIS if time_axis is None else time_axis, values.ndim - 3 - 1)
    if spikes.ndim == 4:
        spikes = spikes[None]
    return np.ascontiguousarray(spikes)


def load(path: str | Path, time_axis: int | None = None) -> Tensor:
    """The spikes as a torch bool tensor [B, T, C, H, W] on the CPU; see ``read``."""
    import torch

    return torch.from_numpy(read(path, time_axis))


def _fault(path: str | Path, text: str) -> ValueError:
    return ValueError(f"spike file {path} {text}")


class _opened:
    """Context: (stream, size) of the array's entry in the zip file; turns every way of being broken into one line."""

    def __init__(self, path: str | Path) -> None:
        self.path = path

    def __enter__(self) -> tuple[IO[bytes], int]:
        try:
            plain = stat.S_ISREG(Path(self.path).stat().st_mode)
            if plain:  # a pipe would be waited for, a device read for ever
                self.zip = zipfile.ZipFile(self.path)
        except FileNotFoundError:
            raise _fault(self.path, "does not exist") from None
        except OSError as error:
            raise _fault(self.path, f"cannot be read: {error.strerror or error}") from None
        except (zipfile.BadZipFile, ValueError) as error:
            raise _fault(self.path, f"is not a .npz file, or is truncated ({error})") from None
        if not plain:
            raise _fault(self.path, "is not a plain file")
        names = self.zip.namelist()
        if f"{ARRAY}.npy" not in names:
            held = ", ".join(sorted(n.removesuffix(".npy") for n in names)[:5]) or "nothing"
            self.zip.close()
            raise _fault(self.path, f"has no array {ARRAY!r}; it holds: {held!a}")
        entry = self.zip.getinfo(f"{ARRAY}.npy")
        try:
            self.stream = self.zip.open(entry)
        except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
            self.zip.close()
            raise _fault(self.path, f"is damaged: {error}") from None
        return self.stream, entry.file_size

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.stream.close()
        self.zip.close()
        if isinstance(error, (zipfile.BadZipFile, zlib.error, EOFError, OSError)):
            raise _fault(self.path, f"is truncated or damaged: {error or 'its data ends early'}") from None


def _header(path: str | Path, stream: IO[bytes], size: int, time_axis: int | None) -> Header:
    try:
        version = npy.read_magic(stream)
        readers: dict[Any, Any] = {(1, 0): (2, npy.read_array_header_1_0), (2, 0): (4, npy.read_array_header_2_0)}
        if version not in readers:
            raise ValueError(f"format version {version} is not read")
        width, reader = readers[version]
        prefix = stream.read(width)
        length = int.from_bytes(prefix, "little")
        if length > HEADER_LIMIT:  # numpy would read all of it before it refuses
            raise ValueError(f"its header says that it has {length} bytes")
        shape, fortran_order, dtype = reader(io.BytesIO(prefix + stream.read(length)))
        if not all(type(n) is int for n in shape):  # numpy takes True for a size
            raise ValueError(f"its shape is {list(shape)}")
        if min(shape, default=0) < 0:
            raise ValueError(f"its shape is {list(shape)}")
    except (ValueError, SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
        why = str(error).splitlines()[:1] or [type(error).__name__]
        raise _fault(path, f"has a damaged array {ARRAY!r}: {why[0]}") from None
    head = Header(shape, dtype, fortran_order)
    if dtype.hasobject:
        raise _fault(path, f"has {ARRAY!r} as an array of Python objects, which is never unpickled: store bool or 0/1")
    if dtype.kind not in "biuf":
        raise _fault(path, f"has {ARRAY!r} of dtype {dtype}: bool or 0/1 is needed")
    if len(shape) not in (4, 5):
        raise _fault(path, f"has {ARRAY!r} of shape {list(shape)}: [C, T, H, W] or [B, T, C, H, W] is needed")
    if time_axis is not None and not 0 <= time_axis < len(shape):
        raise _fault(path, f"has {len(shape)} axes, so the time axis must be 0 to {len(shape) - 1}, got {time_axis}")
    if 0 in shape:
        raise _fault(path, f"is empty: {ARRAY!r} has shape {list(shape)}")
    if head.bytes > BYTES_LIMIT:
        raise _fault(path, f"has {head.bytes / 2**30:.3g} GiB in {ARRAY!r}; at most {BYTES_LIMIT / 2**30:.3g} are read")
    if size < head.bytes:
        raise _fault(path, f"is truncated: {size} of {head.bytes} bytes of {ARRAY!r}")
    return head


def _check_values(path: str | Path, values: np.ndarray[Any, Any]) -> None:
    if values.dtype.kind == "b":
        # A bool is one byte, and a damaged file may hold others than 0 and 1.
        values = values.view(np.uint8)
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise _fault(path, f"holds NaN in {ARRAY!r}: spikes are 0 or 1")
    low, high = float(values.min()) + 0.0, float(values.max()) + 0.0  # -0 is written as 0
    if low < 0 or high > 1:
        raise _fault(path, f"holds values from {low:g} to {high:g} in {ARRAY!r}: spikes are 0 or 1")
    between = (values != 0) & (values != 1)
    if between.any():
        raise _fault(path, f"holds {values[between][0]:g} in {ARRAY!r}: spikes are 0 or 1")
