"""The values that keys of a recipe may have, a type each; its description says in a refusal what was expected."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from msgspec import Meta

from corp_deploy.families.preprocessing import CROP_MODES, INTERPOLATIONS
from ground import quantities
from ground.quantity import BATCH, Count, Quantity


def _in(quantity: Quantity, kind: type[int] | type[float]) -> Meta:
    """The bounds of a quantity for numbers that are written as whole ones, or with a point."""
    low, high = kind(quantity.low), kind(quantity.high)
    assert (low, high) == (quantity.low, quantity.high), quantity
    if isinstance(quantity, Count):
        return Meta(ge=low, le=high, description=str(quantity))
    bounds: dict[str, Any] = {
        "gt" if quantity.low_open else "ge": low,
        "lt" if quantity.high_open else "le": high,
    }
    return Meta(**bounds, description=str(quantity))


def number_in(quantity: Quantity) -> Any:
    """The type of such a number; one that is written without a point stays as it is written."""
    whole = Annotated[int, _in(quantity, int)]
    return whole if isinstance(quantity, Count) else whole | Annotated[float, _in(quantity, float)]


def _one_of(*words: str) -> Meta:
    return Meta(pattern=rf"\A(?:{'|'.join(words)})\Z", description=f"one of {', '.join(words)}")


def _of(literal: Any) -> Meta:
    return Meta(description=f"one of {', '.join(get_args(literal))}")


def _list_of(words: str, *, least: int = 0, different: bool = True) -> Meta:
    """A list of at least so many values; uniqueItems is JSON Schema's word, and the reader holds to it."""
    return Meta(min_length=least, description=words, extra_json_schema={"uniqueItems": different})


_NOT_EMPTY = "a text that is not empty"

Text: TypeAlias = Annotated[str, Meta(pattern=r"\S", description=_NOT_EMPTY)]
Texts: TypeAlias = Annotated[tuple[Text, ...], _list_of("a list of different texts")]
OutputNames: TypeAlias = Annotated[
    tuple[Text, ...], _list_of('a list of names of outputs, such as ["class", "patches"]', least=1)
]
Location: TypeAlias = Annotated[Path, Meta(description=_NOT_EMPTY)]
"""A file or folder: written relative to the recipe, read as an absolute path."""
Locations: TypeAlias = Annotated[tuple[Path, ...], _list_of("a list of different files, such as ['head.onnx']")]
Flag: TypeAlias = Annotated[bool, Meta(description="true or false")]
Arguments: TypeAlias = Annotated[dict[str, Any], Meta(description="a table of arguments")]
ServedName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.-]*\Z",
        description="letters, digits, '_', '.' and '-', starting with a letter or digit",
    ),
]
Licence: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"\A\(*[A-Za-z0-9][A-Za-z0-9.+-]*\)*(?: (?:AND|OR|WITH) \(*[A-Za-z0-9][A-Za-z0-9.+-]*\)*)*\Z",
        max_length=500,
        description="an SPDX expression, such as 'Apache-2.0', 'CC-BY-4.0 AND MIT' or 'LicenseRef-ours'",
    ),
]

_Device = Literal["cpu", "cuda"]
_Precision = Literal["fp32", "fp16", "mixed", "bf16", "mixed-bf16", "int8", "fp8"]
_Rest = Literal["fp32", "fp16", "bf16"]
_Scales = Literal["auto", "max", "mse", "entropy"]
_GraphInput = Literal["float32", "uint8"]
_Groups = Literal["image", "folder", "file"]
_System = Literal["whole", "kept"]

Device: TypeAlias = Annotated[_Device, _of(_Device)]
Precision: TypeAlias = Annotated[_Precision, _of(_Precision)]
Rest: TypeAlias = Annotated[_Rest, _of(_Rest)]
GraphInput: TypeAlias = Annotated[_GraphInput, _of(_GraphInput)]
Scales: TypeAlias = Annotated[_Scales, _of(_Scales)]
WeightBits: TypeAlias = Annotated[Literal[7, 8], Meta(description="8 or 7")]
Precisions: TypeAlias = Annotated[
    tuple[Precision, ...], _list_of(f"a list of {', '.join(get_args(_Precision))}", least=1)
]
Groups: TypeAlias = Annotated[_Groups, _of(_Groups)]
AttentionSystem: TypeAlias = Annotated[_System, _of(_System)]
Interpolation: TypeAlias = Annotated[str, _one_of(*INTERPOLATIONS)]
CropMode: TypeAlias = Annotated[str, _one_of(*CROP_MODES)]

Batch: TypeAlias = Annotated[int, _in(BATCH, int)]
Batches: TypeAlias = Annotated[
    tuple[Batch, ...], _list_of(f"a list of different whole numbers from {BATCH.low} to {BATCH.high}", least=1)
]
Images: TypeAlias = Annotated[int, _in(quantities.IMAGES, int)]
Snapshots: TypeAlias = Annotated[
    tuple[Images, ...], _list_of("a list of ascending numbers of images, such as [100, 500]", least=1)
]
BadImages: TypeAlias = Annotated[int, _in(quantities.BAD_IMAGES, int)]
Seed: TypeAlias = Annotated[int, _in(quantities.SEED, int)]
Workers: TypeAlias = Annotated[int, _in(quantities.WORKERS, int)]
Threads: TypeAlias = Annotated[int, _in(quantities.THREADS, int)]
Rounds: TypeAlias = Annotated[int, _in(quantities.ROUNDS, int)]

Confidence: TypeAlias = Annotated[float, _in(quantities.CONFIDENCE, float)]
# A number that is written without a point stays as it is written, in commands and in stamps.
Share: TypeAlias = Annotated[int, _in(quantities.SHARE, int)] | Annotated[float, _in(quantities.SHARE, float)]
ShareKept: TypeAlias = (
    Annotated[int, _in(quantities.SHARE_KEPT, int)] | Annotated[float, _in(quantities.SHARE_KEPT, float)]
)
RelativeError: TypeAlias = Annotated[int, _in(quantities.ERROR, int)] | Annotated[float, _in(quantities.ERROR, float)]
Magnitude: TypeAlias = (
    Annotated[int, _in(quantities.MAGNITUDE, int)] | Annotated[float, _in(quantities.MAGNITUDE, float)]
)
Level: TypeAlias = Annotated[int, _in(quantities.LEVEL, int)] | Annotated[float, _in(quantities.LEVEL, float)]
Factor: TypeAlias = Annotated[int, _in(quantities.FACTOR, int)] | Annotated[float, _in(quantities.FACTOR, float)]
Seconds: TypeAlias = Annotated[int, _in(quantities.SECONDS, int)] | Annotated[float, _in(quantities.SECONDS, float)]
Milliseconds: TypeAlias = (
    Annotated[int, _in(quantities.MILLISECONDS, int)] | Annotated[float, _in(quantities.MILLISECONDS, float)]
)
_Mean: TypeAlias = Annotated[int, _in(quantities.MEAN, int)] | Annotated[float, _in(quantities.MEAN, float)]
_Std: TypeAlias = Annotated[int, _in(quantities.DEVIATION, int)] | Annotated[float, _in(quantities.DEVIATION, float)]


def _channels(quantity: Quantity) -> Meta:
    return _list_of(f"a list with {quantity} for all channels, or one for each", least=1, different=False)


Means: TypeAlias = Annotated[tuple[_Mean, ...], _channels(quantities.MEAN)]
Deviations: TypeAlias = Annotated[tuple[_Std, ...], _channels(quantities.DEVIATION)]
