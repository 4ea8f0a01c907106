"""Which dtypes of torch a structure takes, and as which other ones those travel that files and pickles have not."""

from __future__ import annotations

from typing import Any

import torch

from rlstructs.errors import SpecError

KEPT = "bool, integers of 8 to 64 bits, floats of 8 to 64 bits and complex numbers"


def _those(*names: str) -> list[torch.dtype]:
    """The dtypes of these names that this version of torch has."""
    found = (getattr(torch, name, None) for name in names)
    return [dtype for dtype in found if isinstance(dtype, torch.dtype)]


# Of a byte each.
FLOAT8 = _those("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
QUANTISED = frozenset(_those("qint8", "quint8", "qint32", "quint4x2", "quint2x4"))
# Of which torch has the name, but can neither copy, compare nor index values; and those of which it can only some.
UNFIT = QUANTISED | frozenset(
    _those(
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2",
    )
)  # fmt: skip
# Unsigned integers, that torch cannot write to by index, as signed ones.
SIGNED = dict(zip(_those("uint16", "uint32", "uint64"), (torch.int16, torch.int32, torch.int64), strict=True))
# What torch does not pickle as what it does.
CARRIERS = {**SIGNED, **dict.fromkeys(FLOAT8, torch.uint8), torch.complex32: torch.int32}


def refuse(owner: str, key: str, dtype: torch.dtype) -> SpecError:
    """The error for a tensor of a dtype that is `UNFIT`."""
    name, why = str(dtype).removeprefix("torch."), "which is quantised; dequantize it first"
    if dtype not in QUANTISED:
        why = "whose values torch cannot copy; convert it first"
    return SpecError(f"{owner}: {key!r} is {name}, {why}. Kept are {KEPT}")


def portable(tensor: torch.Tensor) -> Any:
    """A tensor as what can be pickled; `restored` makes it what it was."""
    carrier = CARRIERS.get(tensor.dtype)
    return tensor if carrier is None else (tensor.view(carrier), tensor.dtype)


def restored(leaf: Any) -> torch.Tensor:
    """What `portable` was given."""
    if not isinstance(leaf, tuple):
        tensor: torch.Tensor = leaf
        return tensor
    numbers, dtype = leaf
    return numbers.view(dtype)  # type: ignore[no-any-return]
