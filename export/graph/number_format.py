"""Symmetric number formats, histograms of |x| that widen with the values, and the choice of clipping ranges.

A histogram's range is a power of two and widens by joining bins two by two, so that any batching gives equal counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.precision import FLOAT8, INT8, FloatType


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """A number format: the precision's name, its stored type, and how many of its bits are used."""

    name: str
    float_type: FloatType
    dtype: np.dtype[Any]
    bits: int = 8

    @property
    def largest(self) -> float:
        return self.float_type.largest if self.bits == 8 else 2.0 ** (self.bits - 1) - 1

    def stored(self, values: NDArray[np.floating[Any]], scale: NDArray[Any] | float) -> NDArray[Any]:
        """Return values / scale, clipped to the format's range and rounded to even, in the stored type."""
        ratio = np.asarray(values, dtype=np.float32) / np.asarray(scale, np.float32)
        ratio = np.clip(ratio, -self.largest, self.largest)
        return (np.rint(ratio) if self.dtype == np.int8 else ratio).astype(self.dtype)

    def rounded(self, values: NDArray[np.floating[Any]], scale: NDArray[Any] | float) -> NDArray[np.float32]:
        kept: NDArray[np.float32] = self.stored(values, scale).astype(np.float32) * np.asarray(scale, np.float32)
        return kept


FORMATS: Mapping[str, NumberFormat] = {
    "int8": NumberFormat(name="int8", float_type=INT8, dtype=np.dtype(np.int8)),
    "fp8": NumberFormat(name="fp8", float_type=FLOAT8, dtype=np.dtype(ml_dtypes.float8_e4m3fn)),
}

# CPUs without VNNI add two products of an activation (0 to 255) and a weight in sixteen bits, which end at 32767.
# Weights of seven bits can't exceed that, 255 * 63 * 2 = 32130; weights of eight bits can.
WEIGHT_BITS = (8, 7)


def weight_format(form: NumberFormat, bits: int) -> NumberFormat:
    assert bits in WEIGHT_BITS, bits
    return replace(form, bits=bits) if form.float_type is INT8 else form


Clipping = Literal["max", "mse", "entropy"]
CLIPPINGS: tuple[Clipping, ...] = get_args(Clipping)
BINS = 4096
_SHARES = np.linspace(0.02, 1.0, 99)
# ONNX Runtime tries every bin in turn, so it gets fewer.
_ENTROPY_LEVELS, _ENTROPY_BINS = 128, 512


@dataclass(slots=True)
class Histogram:
    """A histogram of |x|: counts [BINS] over [0, `end`), and the largest |x|."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    end: float = 0.0
    largest: float = 0.0

    def add(self, values: NDArray[np.floating[Any]], where: str) -> None:
        """Count more values. Raises BadInput for NaN and Inf."""
        sizes = np.abs(values, dtype=np.float32).ravel()
        largest = float(sizes.max(initial=0.0))
        if not math.isfinite(largest):
            raise BadInput(f"{where}: the model gives NaN or Inf on these inputs, so no range can be measured")
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
        middles: NDArray[np.float64] = (np.arange(BINS, dtype=np.float64) + 0.5) * (self.end / BINS)
        return middles


def clipping_range(histogram: Histogram, form: NumberFormat, choice: Clipping) -> float:
    """Return the |x| that becomes the format's largest number; 1 for a tensor of zeros.

    `mse` minimises the mean square error of rounding and clipping, `entropy` the divergence of the counts at 128 levels
    (TensorRT's calibration, Migacz, GTC 2017, by ONNX Runtime's function).
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
