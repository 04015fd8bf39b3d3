"""Pickled numpy arrays as bytes: numpy's own unpickling would allocate whatever a file claims.

The authors' Gamma files hold one. `STAND_INS` takes the place of numpy's names while a file is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from optcov.checkpoints.errors import CheckpointError

_DTYPES = {"f4": torch.float32, "f8": torch.float64}


@final
@dataclass
class _StoredType:
    """What a pickle says about the numbers of an array."""

    name: str = ""
    order: str = "<"

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", "=", "|", ">"):
            self.order = state[1]
        else:
            raise CheckpointError("it holds an array of a structured type, not plain numbers")


@final
class StoredArray:
    """An array as the pickle describes it; everything in it is a claim until `tensor` has checked it."""

    shape: Any = ()
    kind: Any = _StoredType()
    by_columns: Any = False
    content: Any = b""

    def __setstate__(self, state: Any) -> None:
        if not (isinstance(state, tuple) and len(state) == 5):
            raise CheckpointError("it holds an array that numpy did not write")
        _, self.shape, self.kind, self.by_columns, self.content = state

    def tensor(self) -> Tensor:
        """The numbers, if they are floats in this machine's order."""
        dtype = _DTYPES.get(getattr(self.kind, "name", ""))
        if dtype is None or self.kind.order == ">" or not isinstance(self.content, bytes):
            raise CheckpointError("it holds an array of something other than 32 or 64 bit floats")
        if not isinstance(self.shape, tuple) or not all(type(length) is int and length > 0 for length in self.shape):
            raise CheckpointError("it holds an array whose shape is not made of positive numbers")
        if math.prod(self.shape) * dtype.itemsize != len(self.content):
            raise CheckpointError(f"an array of shape {self.shape} does not have {len(self.content)} bytes")
        values = torch.frombuffer(bytearray(self.content), dtype=dtype)
        if self.by_columns:
            return values.reshape(self.shape[::-1]).permute(*range(len(self.shape))[::-1])
        return values.reshape(self.shape)


def _stored_array(*_: Any) -> StoredArray:
    return StoredArray()


def _stored_type(name: str, *_: Any) -> _StoredType:
    return _StoredType(str(name).lstrip("<=|"))


STAND_INS: list[Any] = [
    _StoredType,
    (StoredArray, "numpy.ndarray"),
    (_stored_type, "numpy.dtype"),
    (_stored_array, "numpy.core.multiarray._reconstruct"),
    (_stored_array, "numpy._core.multiarray._reconstruct"),
]
