"""The torch dtypes that structures take, and carriers for unpicklable ones.

A carrier is a dtype that holds the bits of one that torch cannot pickle.
"""

from __future__ import annotations

from typing import Any

import torch

from rlstructs.errors import SpecError

SUPPORTED = "bool, integers of 8 to 64 bits, floats of 8 to 64 bits and complex numbers"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _existing(*names: str) -> list[torch.dtype]:
    """The dtypes with these names that the installed torch has."""
    found = (getattr(torch, name, None) for name in names)
    return [dtype for dtype in found if isinstance(dtype, torch.dtype)]


# Floats of one byte.
FLOAT8 = _existing("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
QUANTISED = frozenset(_existing("qint8", "quint8", "qint32", "quint4x2", "quint2x4"))
# Dtypes that torch defines without supporting all of copying, comparing and indexing.
UNSUPPORTED = QUANTISED | frozenset(
    _existing(
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        "bits8",
        "bits16",
        "bits1x8",
        "bits2x4",
        "bits4x2",
        "float4_e2m1fn_x2",
    )
)
# Unsigned dtypes, which torch cannot write to by index -> signed dtypes of the same size.
SIGNED = dict(zip(_existing("uint16", "uint32", "uint64"), (torch.int16, torch.int32, torch.int64), strict=True))
# Dtypes that torch cannot pickle -> dtypes of the same size that hold their bits.
CARRIERS = {**SIGNED, **dict.fromkeys(FLOAT8, torch.uint8), torch.complex32: torch.int32}


def dtype_error(owner: str, key: str, dtype: torch.dtype) -> SpecError:
    """The error for a tensor of an `UNSUPPORTED` dtype."""
    why = "which is quantised; dequantize it first"
    if dtype not in QUANTISED:
        why = "whose values torch cannot copy; convert it first"
    return SpecError(f"{owner}: {key!r} is {dtype_name(dtype)}, {why}. Supported are {SUPPORTED}")


def to_picklable(tensor: torch.Tensor) -> Any:
    """Returns a tensor, or its bits and dtype if torch cannot pickle it."""
    carrier = CARRIERS.get(tensor.dtype)
    return tensor if carrier is None else (tensor.view(carrier), tensor.dtype)


def from_picklable(leaf: Any) -> torch.Tensor:
    """Returns the tensor that `to_picklable` was given."""
    if not isinstance(leaf, tuple):
        tensor: torch.Tensor = leaf
        return tensor
    numbers, dtype = leaf
    return numbers.view(dtype)  # type: ignore[no-any-return]
