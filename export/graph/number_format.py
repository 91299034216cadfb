"""The number formats that weights and activations are quantised to, symmetric around zero; and how large the values of
a tensor are: counts of |x| in bins that grow with what is seen, and where to clip. PURE.

A range is a power of two and widens by joining bins two by two, so one pass over batches in any cut gives the same
counts as all at once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
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

    def stored(self, values: NDArray[np.floating[Any]], scale: NDArray[Any] | float) -> NDArray[Any]:
        """The numbers that stand for `values`, which are those times the scale: rounded to even and clipped."""
        ratio = np.asarray(values, dtype=np.float32) / np.asarray(scale, np.float32)
        ratio = np.clip(ratio, -self.largest, self.largest)
        return (np.rint(ratio) if self.dtype == np.int8 else ratio).astype(self.dtype)

    def rounded(self, values: NDArray[np.floating[Any]], scale: NDArray[Any] | float) -> NDArray[np.float32]:
        """What is left of `values`."""
        kept: NDArray[np.float32] = self.stored(values, scale).astype(np.float32) * np.asarray(scale, np.float32)
        return kept


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


Clipping = Literal["max", "mse", "entropy"]
CLIPPINGS: tuple[Clipping, ...] = get_args(Clipping)
BINS = 4096
_SHARES = np.linspace(0.02, 1.0, 99)
# ONNX Runtime tries every bin in turn, so it is given fewer.
_ENTROPY_LEVELS, _ENTROPY_BINS = 128, 512


@dataclass(slots=True)
class Histogram:
    """Counts [BINS] of |x| over [0, `end`), the largest |x| seen, and how many values there were."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    end: float = 0.0
    largest: float = 0.0

    def add(self, values: NDArray[np.floating[Any]], where: str) -> None:
        """Count more values. Raises BadInput where one is NaN or Inf."""
        sizes = np.abs(values, dtype=np.float32).ravel()
        largest = float(sizes.max(initial=0.0))
        if not math.isfinite(largest):
            raise BadInput(f"{where}: the model gives NaN or Inf on these inputs, so that no range can be taken")
        self.largest = max(self.largest, largest)
        if self.largest >= self.end:
            end = 2.0 ** (math.frexp(self.largest)[1] if self.largest else 0)
            while self.end and self.end < end and self.counts.any():
                joined = self.counts.reshape(-1, 2).sum(axis=1)
                self.counts = np.concatenate([joined, np.zeros_like(joined)])
                self.end *= 2
            self.end = max(end, self.end)
        self.counts += np.bincount((sizes * np.float32(BINS / self.end)).astype(np.int64), minlength=BINS)

    @property
    def centres(self) -> NDArray[np.float64]:
        """The middle of each bin."""
        middles: NDArray[np.float64] = (np.arange(BINS, dtype=np.float64) + 0.5) * (self.end / BINS)
        return middles


def clipped_at(histogram: Histogram, form: NumberFormat, choice: Clipping) -> float:
    """The |x| that becomes the format's largest number: the largest seen, or less where that loses less.

    `mse`: least mean square of what rounding and clipping change. `entropy`: least divergence of the counts rounded to
    128 levels from the counts as they are (TensorRT's calibration, Migacz, GTC 2017, by ONNX Runtime's function).
    Of a tensor that is zero everywhere any size will do: 1.
    """
    if histogram.largest == 0.0:
        return 1.0
    if choice == "max":
        return histogram.largest
    if choice == "entropy":
        return _by_entropy(histogram)
    present = histogram.counts > 0
    counts, centres = histogram.counts[present], np.minimum(histogram.centres[present], histogram.largest)
    ends = histogram.largest * _SHARES
    losses = [float(counts @ np.square(centres - form.rounded(centres, end / form.largest))) for end in ends]
    return float(ends[int(np.argmin(losses))])


def _by_entropy(histogram: Histogram) -> float:
    from onnxruntime.quantization.calibrate import HistogramCollector

    counts = histogram.counts.reshape(_ENTROPY_BINS, -1).sum(axis=1)
    edges = np.linspace(-histogram.end, histogram.end, 2 * _ENTROPY_BINS + 1)
    ends = np.array(-histogram.largest), np.array(histogram.largest)
    collector = HistogramCollector("entropy", True, _ENTROPY_BINS, _ENTROPY_LEVELS, 99.99, "same")
    both_sides = (np.concatenate([counts[::-1], counts]), edges, *ends, histogram.end)
    low, high = collector.get_entropy_threshold(both_sides, _ENTROPY_LEVELS)
    return max(abs(float(low)), abs(float(high)))
