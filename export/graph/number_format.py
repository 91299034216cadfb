"""The number formats that weights and activations are quantised to, symmetric around zero. PURE."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ground.precision import FLOAT8, INT8, FloatType


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """`name` is the precision's word, `dtype` numpy's type of the stored numbers, `bits` how many of it are used."""

    name: str
    float_type: FloatType
    dtype: np.dtype[Any]
    bits: int = 8

    @property
    def largest(self) -> float:
        """What the end of a range becomes."""
        return self.float_type.largest if self.bits == 8 else 2.0 ** (self.bits - 1) - 1

    @property
    def onnx_type(self) -> int:
        return self.float_type.onnx

    def stored(self, values: NDArray[np.floating[Any]], scale: NDArray[Any] | float) -> NDArray[Any]:
        """The numbers that stand for `values`, which are those times the scale: rounded to even and clipped."""
        ratio = np.clip(np.asarray(values, dtype=np.float32) / np.asarray(scale, np.float32), *self.ends)
        return (np.rint(ratio) if self.dtype == np.int8 else ratio).astype(self.dtype)

    def rounded(self, values: NDArray[np.floating[Any]], scale: NDArray[Any] | float) -> NDArray[np.float32]:
        """What is left of `values`."""
        kept: NDArray[np.float32] = self.stored(values, scale).astype(np.float32) * np.asarray(scale, np.float32)
        return kept

    @property
    def ends(self) -> tuple[float, float]:
        return -self.largest, self.largest


FORMATS: Mapping[str, NumberFormat] = MappingProxyType(
    {
        "int8": NumberFormat(name="int8", float_type=INT8, dtype=np.dtype(np.int8)),
        "fp8": NumberFormat(name="fp8", float_type=FLOAT8, dtype=np.dtype(ml_dtypes.float8_e4m3fn)),
    }
)

# CPUs without VNNI add two products of an activation (0 to 255) and a weight in sixteen bits, which end at 32767. Of
# weights up to 63 no two products pass it, 255 * 63 * 2 = 32130; of weights up to 127 they do.
WEIGHT_BITS = (8, 7)


def format_of_weights(form: NumberFormat, bits: int) -> NumberFormat:
    """What weights beside activations of `form` are stored in; FP8 has no such sums and keeps its range."""
    assert bits in WEIGHT_BITS, bits
    return replace(form, bits=bits) if form.float_type is INT8 else form
