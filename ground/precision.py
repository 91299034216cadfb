"""Number types, and the named precisions of graphs and engines. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatType:
    """A type of numbers, floating-point or quantised: its names, size, rounding error and range."""

    name: str
    """The name in torch, numpy (with ml_dtypes) and ONNX."""
    label: str
    onnx: int
    """The number in TensorProto.DataType."""
    size_bytes: int
    unit_roundoff: float
    largest: float
    """The largest finite value."""

    def __post_init__(self) -> None:
        assert 0 < self.unit_roundoff < 1 < self.largest, self


FLOAT32 = FloatType(
    name="float32", label="FP32", onnx=1, size_bytes=4, unit_roundoff=2.0**-24, largest=(2.0 - 2.0**-23) * 2.0**127
)
FLOAT16 = FloatType(name="float16", label="FP16", onnx=10, size_bytes=2, unit_roundoff=2.0**-11, largest=65504.0)
BFLOAT16 = FloatType(
    name="bfloat16", label="BF16", onnx=16, size_bytes=2, unit_roundoff=2.0**-8, largest=(2.0 - 2.0**-7) * 2.0**127
)
HALVES = (FLOAT16, BFLOAT16)
# Types of quantised matrices, symmetric around zero; E4M3 is the variant without infinities, as in engines.
INT8 = FloatType(name="int8", label="INT8", onnx=3, size_bytes=1, unit_roundoff=2.0**-8, largest=127.0)
FLOAT8 = FloatType(name="float8_e4m3fn", label="FP8", onnx=17, size_bytes=1, unit_roundoff=2.0**-4, largest=448.0)
QUANTISED: Mapping[str, FloatType] = MappingProxyType({"int8": INT8, "fp8": FLOAT8})
BY_ONNX: Mapping[int, FloatType] = MappingProxyType(
    {each.onnx: each for each in (FLOAT32, *HALVES, *QUANTISED.values())}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A named precision of a graph or engine: its matrices are of one type or, if mixed, of that type and float32."""

    name: str
    type: FloatType
    mixed: bool = False

    @property
    def pure(self) -> str:
        """The name of the precision of the same type without float32."""
        return _precision_name(self.type, mixed=False)


_EVERY = (
    Precision(name="fp32", type=FLOAT32),
    Precision(name="fp16", type=FLOAT16),
    Precision(name="mixed", type=FLOAT16, mixed=True),
    Precision(name="bf16", type=BFLOAT16),
    Precision(name="mixed-bf16", type=BFLOAT16, mixed=True),
)
PRECISIONS: Mapping[str, Precision] = MappingProxyType({each.name: each for each in _EVERY})
WORDS = tuple(PRECISIONS)
EVERY_WORD = (*WORDS, *QUANTISED)
MIXED = tuple(each.name for each in _EVERY if each.mixed)


def type_by_name(name: str) -> FloatType:
    """Return the type of the matrices of a precision, float32 for an unknown name."""
    if name in QUANTISED:
        return QUANTISED[name]
    return PRECISIONS[name].type if name in PRECISIONS else FLOAT32


def precision_by_name(name: str) -> Precision:
    """Return the precision of a name. Raises BadInput for an unknown one."""
    if name not in PRECISIONS:
        raise BadInput(f"precision {name!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def mixed_with_float32(float_type: FloatType) -> Precision:
    return PRECISIONS[_precision_name(float_type, mixed=True)]


def _precision_name(float_type: FloatType, *, mixed: bool) -> str:
    return next(each.name for each in _EVERY if each.type is float_type and each.mixed == mixed)


def precision_of_shares(shares: Mapping[str, float]) -> str:
    """Return the name of a graph's precision from the shares of its matrices' elements by type name.

    It is fp32 without 16-bit and quantised matrices, and int8 or fp8 if any matrix is quantised. Raises BadInput for
    both 16-bit types or both quantised types in one graph, which has no name.
    """
    small = [word for word, each in QUANTISED.items() if shares.get(each.name, 0.0) > 0]
    if len(small) > 1:
        raise BadInput("its matrices are of INT8 and of FP8; export it in one of them")
    if small:
        return small[0]
    present = [each for each in HALVES if shares.get(each.name, 0.0) > 0]
    if len(present) > 1:
        raise BadInput("its matrices are of float16 and of bfloat16; export it in one of them")
    if not present:
        return "fp32"
    return _precision_name(present[0], mixed=shares.get(FLOAT32.name, 0.0) > 0)


def half_share(shares: Mapping[str, float]) -> float:
    """Return the share in [0, 1] of the matrices' elements that are of 16-bit types."""
    return min(1.0, sum(shares.get(each.name, 0.0) for each in HALVES))
