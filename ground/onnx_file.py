"""Reader of untrusted ONNX files, which refuses a file before a runtime opens it.

Accepted files keep external weights below their own directory, without links and within the bounds of their files. No
tensor has fewer numbers than its shape needs, all element types are known, functions don't recurse, and no operator
holds an engine or code. What a graph computes is not checked.
"""

import graphlib
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BadInput
from .file_kinds import ONNX, require_kind
from .files import path_inside, regular_file
from .onnx_types import TEXT, bits_of, require_type, types_of_node, types_of_value

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto

# The limit of a protocol buffer; larger models have external weights.
MOST_BYTES = 2**31 - 1
MOST_NODES = 1_000_000
MOST_NUMBERS = 2**40  # of an input or an output
LATEST_OPSET = 10_000  # of any domain; those of ONNX itself are two dozen
# Operators that hold a whole engine or call a Python function.
FOREIGN = ("EPContext", "PyOp", "PythonOp", "PythonOpGrad")
_KEYS = ("location", "offset", "length", "checksum")
_NATURAL = re.compile(r"[0-9]{1,18}")
_EXTERNAL = 1
_FunctionKey = tuple[str, str, str]


def read_onnx(path: Path, *, weights: bool = True) -> "ModelProto":
    """Return the model in `path`, with its external weights unless `weights` is False.

    Call it before a runtime opens the same path. Raises BadInput for a missing, empty, cut or invalid file, and for all
    that this module refuses.
    """
    import onnx

    proto = _parse(path)
    where = str(path)
    _refuse_invalid_utf8(proto, where)
    _refuse_unknown_types(proto, where)
    _refuse_versions(proto, where)
    _refuse_sizes(proto, where)
    _refuse_foreign(proto, where)
    _refuse_recursive_functions(proto, where)
    outside = [tensor for tensor in iter_tensors(proto) if _check_tensor(tensor, path)]
    if outside and weights:
        onnx.load_external_data_for_model(proto, str(path.parent))
    return proto


_NO_TEXT = "it is not valid, and one of its names is no text in UTF-8"


def checker_error(graph: "ModelProto | Path", *, full: bool = False) -> str:
    """Return the error of onnx.checker for a graph, empty if it is valid; `full` checks types and shapes too."""
    import onnx

    try:
        onnx.checker.check_model(str(graph) if isinstance(graph, Path) else graph, full_check=full)
    except UnicodeDecodeError:  # the checker's message would name a node or a type that is not valid UTF-8
        return _NO_TEXT
    # ValueError is raised for unknown element types.
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        return " ".join(str(error).split()) or _NO_TEXT  # some versions of Python drop a message that is not UTF-8
    return ""


def _parse(path: Path) -> "ModelProto":
    import onnx
    from google.protobuf.message import DecodeError

    if not regular_file(path).is_file():
        raise BadInput(f"{path}: no such ONNX file")
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise BadInput(f"{path}: {size} bytes, an ONNX file has {MOST_BYTES} at most")
    if not size:
        raise BadInput(f"{path}: the file is empty; export the model again")
    try:
        return onnx.load_model_from_string(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: can't be read ({error.strerror})") from error
    except (DecodeError, ValueError, RecursionError):
        require_kind(path, ONNX, "export the model to ONNX")
        raise BadInput(f"{path}: not an ONNX file, or cut short ({size} bytes); export it again") from None


def _refuse_invalid_utf8(message: "Message", where: str) -> None:
    """Raise BadInput for a string field that is not valid UTF-8, because libraries crash on the bytes they get."""
    for field in message.DESCRIPTOR.fields:
        if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        value = getattr(message, field.name)
        each = value if field.is_repeated else (value,) if message.HasField(field.name) else ()
        for one in each:
            if field.type == field.TYPE_MESSAGE:
                _refuse_invalid_utf8(one, where)
            elif not isinstance(one, str):
                field_name = f"{message.DESCRIPTOR.name}.{field.name}"
                raise BadInput(f"{where}: {field_name} holds {one[:40]!r}, which is no text in UTF-8; export it again")


def _refuse_unknown_types(proto: "ModelProto", where: str) -> None:
    """Raise BadInput for an unknown element type anywhere, because libraries crash when they look up its name."""
    for value in _values(proto):
        for number in types_of_value(value.type):
            require_type(number, f"{where}: the tensor {value.name[:100]!r}")
    for tensor in iter_tensors(proto):
        require_type(tensor.data_type, f"{where}: weight {tensor.name[:100]!r}", require_name=tensor.ByteSize() > 0)
    for node in _every_node(proto):
        for name, number in types_of_node(node):
            require_type(number, f"{where}: {name[:40]!r} of the node {node.name[:100]!r} ({node.op_type[:40]})")


def _values(proto: "ModelProto") -> "Iterator[ValueInfoProto]":
    for graph in _graphs(proto):
        yield from (*graph.input, *graph.output, *graph.value_info)
    for function in proto.functions:
        yield from function.value_info


def _nodes(nodes: "Iterable[NodeProto]") -> "Iterator[NodeProto]":
    """Yield nodes, each followed by those of its subgraphs."""
    for node in nodes:
        yield node
        for graph in _subgraphs(node):
            yield from _nodes(graph.node)


def _subgraphs(node: "NodeProto") -> "Iterator[GraphProto]":
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _graphs(proto: "ModelProto") -> "Iterator[GraphProto]":
    yield proto.graph
    for info in proto.training_info:
        yield from (info.initialization, info.algorithm)
    for node in _every_node(proto):
        yield from _subgraphs(node)


def _every_node(proto: "ModelProto") -> "Iterator[NodeProto]":
    yield from _nodes(proto.graph.node)
    for info in proto.training_info:
        yield from _nodes((*info.initialization.node, *info.algorithm.node))
    for function in proto.functions:
        yield from _nodes(function.node)


def iter_tensors(proto: "ModelProto") -> "Iterator[TensorProto]":
    """Yield all tensors of a model: weights, parts of sparse weights, and attributes of nodes."""
    for graph in _graphs(proto):
        yield from graph.initializer
        yield from _sparse_parts(graph.sparse_initializer)
    for node in _every_node(proto):
        for attribute in node.attribute:
            yield from (*((attribute.t,) if attribute.HasField("t") else ()), *attribute.tensors)
            sparse = (attribute.sparse_tensor,) if attribute.HasField("sparse_tensor") else ()
            yield from _sparse_parts((*sparse, *attribute.sparse_tensors))


def _sparse_parts(sparse: "Iterable[SparseTensorProto]") -> "Iterator[TensorProto]":
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def _refuse_sizes(proto: "ModelProto", where: str) -> None:
    """Raise BadInput for an input or output too large for any memory, because a runtime allocates it or crashes."""
    for value in (*proto.graph.input, *proto.graph.output):
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if math.prod(size for size in sizes if size > 0) > MOST_NUMBERS:
            raise BadInput(
                f"{where}: the tensor {value.name[:100]!r} is {sizes[:8]}, {MOST_NUMBERS} numbers at most are taken; "
                "export it again"
            )


def _refuse_versions(proto: "ModelProto", where: str) -> None:
    """Raise BadInput for an impossible opset version, because a runtime iterates over all earlier versions."""
    for entry in (*proto.opset_import, *(each for function in proto.functions for each in function.opset_import)):
        if not 0 <= entry.version <= LATEST_OPSET:
            operators = f"the operators {entry.domain[:100] or 'ai.onnx'!r} of version {entry.version}"
            raise BadInput(f"{where}: imports {operators}, expected 0 to {LATEST_OPSET}; export it again")


def _refuse_foreign(proto: "ModelProto", where: str) -> None:
    foreign = next((node for node in _every_node(proto) if node.op_type in FOREIGN), None)
    if foreign is not None:
        raise BadInput(
            f"{where}: its node {foreign.name[:100]!r} is of {foreign.op_type}, which holds compiled code and no layers"
            "; give the graph that it was compiled from"
        )


def _refuse_recursive_functions(proto: "ModelProto", where: str) -> None:
    """Raise BadInput for functions that call themselves or unfold to more than MOST_NODES nodes."""
    functions = {(each.domain, each.name, each.overload): each for each in proto.functions}
    calls = {key: [_function_key(node) for node in _nodes(function.node)] for key, function in functions.items()}
    called = {key: [name for name in names if name in functions] for key, names in calls.items()}
    try:
        order = list(graphlib.TopologicalSorter(called).static_order())
    except graphlib.CycleError:
        raise BadInput(f"{where}: its functions call one another in a circle, so that it never ends") from None
    sizes: dict[_FunctionKey, int] = {}
    for key in order:
        sizes[key] = sum(sizes.get(name, 1) for name in calls[key])
    unfolded = sum(sizes.get(_function_key(node), 1) for node in _nodes(proto.graph.node))
    if unfolded > MOST_NODES:
        raise BadInput(f"{where}: unfolds to {unfolded:.3g} nodes, {MOST_NODES} at most are read")


def _function_key(node: "NodeProto") -> _FunctionKey:
    return node.domain, node.op_type, node.overload


def _check_tensor(tensor: "TensorProto", path: Path) -> bool:
    """Return whether a tensor is external. Raises BadInput unless it has as many numbers as its shape needs."""
    where = f"{path}: weight {tensor.name[:100]!r}"
    outside = tensor.data_location == _EXTERNAL
    size_bytes = _external_bytes(tensor, path, where) if outside else len(tensor.raw_data)
    if min(tensor.dims, default=0) < 0:
        raise BadInput(f"{where} is {list(tensor.dims)[:8]}, which is not a valid shape")
    if tensor.HasField("segment"):
        raise BadInput(f"{where} is a segment of a larger one, which is not supported; export it again")
    numbers, bits = math.prod(tensor.dims), bits_of(tensor.data_type)
    needed = -(-numbers * (bits or 1) // 8)
    if tensor.data_type == TEXT:
        fits = outside or numbers <= len(tensor.string_data)
    elif outside or tensor.HasField("raw_data"):
        fits = needed <= size_bytes
    else:
        lists = tensor.float_data, tensor.int32_data, tensor.int64_data, tensor.double_data, tensor.uint64_data
        fits = numbers <= 8 * sum(map(len, lists))  # each number may hold several narrow ones
    if not fits:
        raise BadInput(f"{where} is {list(tensor.dims)[:8]}, and some of its numbers are missing; export it again")
    if tensor.HasField("raw_data") and bits is not None and size_bytes != needed:
        raise BadInput(
            f"{where} is {list(tensor.dims)[:8]}, {needed} bytes, and {size_bytes} are there; export it again"
        )
    return outside


def _external_bytes(tensor: "TensorProto", path: Path, where: str) -> int:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if unknown := [key for key in entries if key not in _KEYS]:
        raise BadInput(
            f"{where} lies in another file with the unknown key {unknown[0][:100]!r}; expected {', '.join(_KEYS)}"
        )
    file = path_inside(path.parent, entries.get("location", ""), where=f"{where} lies in another file")
    if not file.is_file():
        raise BadInput(f"{where} lies in {file.name[:100]}, and there is no such file beside it")
    stat = file.stat()
    if stat.st_nlink > 1:
        raise BadInput(f"{where} lies in {file.name[:100]}, which has other names (hard links); expected its own file")
    offset, length = (_parse_natural(entries, key, where) for key in ("offset", "length"))
    start = offset or 0
    size_bytes = stat.st_size - start if length is None else length
    if start > stat.st_size or start + size_bytes > stat.st_size:
        span = f"{start} to {start + size_bytes}"
        raise BadInput(f"{where} lies at {span} of {file.name[:100]}, which has {stat.st_size} bytes")
    return size_bytes


def _parse_natural(entries: dict[str, str], key: str, where: str) -> int | None:
    text = entries.get(key)
    if text is not None and not _NATURAL.fullmatch(text):
        raise BadInput(f"{where} lies in another file with {key} {text[:100]!r}, expected a whole number")
    return None if text is None else int(text)
