"""Dtypes by the names that checkpoints store, and tensors as NumPy arrays over the same memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

# dtypes that NumPy lacks: the integers of their size, and ml_dtypes' type for them
_FOREIGN = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
}
_NATIVE = (
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*_NATIVE, *_FOREIGN)}


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in a checkpoint: torch's, which is NumPy's too."""
    return str(dtype).removeprefix("torch.")


def storable(dtype: torch.dtype) -> bool:
    """Whether checkpoints can hold tensors of this dtype."""
    return name_of(dtype) in _BY_NAME


def from_name(name: str) -> torch.dtype | None:
    """The dtype of that name; None where torch, or this module, knows none."""
    return _BY_NAME.get(name)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as a NumPy array over the same memory, strides included."""
    tensor = tensor.detach()
    if tensor.dtype in _FOREIGN:
        bits, kind = _FOREIGN[tensor.dtype]
        return tensor.view(bits).numpy().view(kind)
    return tensor.numpy()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of its own memory with the values of a NumPy array.

    Raises:
        ValueError: torch has no such dtype.
    """
    array = np.array(array)  # owned and writable
    dtype = from_name(array.dtype.name)
    if dtype is None:
        raise ValueError(f"got an array of {array.dtype.name}; wanted a dtype that torch has")
    if dtype in _FOREIGN:
        bits = np.int16 if array.dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)
