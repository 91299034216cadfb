"""Element types of ONNX by their numbers: their names and sizes in bits, and where a graph refers to them."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from .errors import BadInput

if TYPE_CHECKING:
    from onnx import NodeProto, TypeProto, ValueInfoProto

UNNAMED, TEXT = 0, 8
_NUMPY_NAMES = {"float": "float32", "double": "float64"}  # the other types have the same names in ONNX and numpy
# Bits of one element by type number; strings and types newer than this table have no entry.
_BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16,
         17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2, 27: 6, 28: 6}  # fmt: skip
# Attributes of the standard operators that hold the number of an element type.
_OF_NODES = ("to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision")


def bits_of(number: int) -> int | None:
    """Return the bits of one element of a type, None if unknown."""
    return _BITS.get(number)


@cache
def _names() -> Mapping[int, str]:
    from onnx import TensorProto

    names = {number: name.lower() for name, number in TensorProto.DataType.items()}
    return {number: _NUMPY_NAMES.get(name, name) for number, name in names.items()}


def require_type(number: int, where: str, *, require_name: bool = False) -> None:
    """Raise BadInput for an unknown type number, and with `require_name` for that of an undefined type too."""
    names = _names()
    if number not in names or (require_name and number == UNNAMED):
        first, *_, last = (f"{each} ({name})" for each, name in sorted(names.items()) if each != UNNAMED)
        raise BadInput(
            f"{where} is of element type {number}, which ONNX lacks; expected {first} to {last}; export it again"
        )


def dtype_of(value: "ValueInfoProto") -> str:
    """Return numpy's name of the element type of an input or output, or its kind if no tensor, such as `sequence`."""
    kind = value.type.WhichOneof("value") or "tensor_type"
    return _names()[value.type.tensor_type.elem_type] if kind == "tensor_type" else kind.removesuffix("_type")


def types_of_value(kind: "TypeProto") -> Iterator[int]:
    """Yield the element types of a type: of a tensor, or of the contents of a sequence, an optional or a map."""
    match kind.WhichOneof("value"):
        case "tensor_type":
            yield kind.tensor_type.elem_type
        case "sparse_tensor_type":
            yield kind.sparse_tensor_type.elem_type
        case "sequence_type":
            yield from types_of_value(kind.sequence_type.elem_type)
        case "optional_type":
            yield from types_of_value(kind.optional_type.elem_type)
        case "map_type":
            yield kind.map_type.key_type
            yield from types_of_value(kind.map_type.value_type)


def types_of_node(node: "NodeProto") -> Iterator[tuple[str, int]]:
    """Yield the element types in a node's attributes, each with the attribute's name."""
    for attribute in node.attribute:
        if node.domain in ("", "ai.onnx") and attribute.name in _OF_NODES and attribute.HasField("i"):
            yield attribute.name, attribute.i
        for kind in (*((attribute.tp,) if attribute.HasField("tp") else ()), *attribute.type_protos):
            for number in types_of_value(kind):
                yield attribute.name, number
