"""What older builders were found not to build, said where their own words end in an internal error."""

from onnx import ModelProto, TensorProto

from ground.versions import version_numbers

from .libraries import Library

# 1.5.0.114 and 1.6.1.120 fail a check of types in each of them, for every GPU; 1.7.1.116 builds them.
_RTX_WITH_INT8_CONVOLUTIONS = (1, 7)


def int8_convolutions(proto: ModelProto) -> list[str]:
    """Modules whose convolution reads an INT8 weight, in the graph's order."""
    small = {tensor.name for tensor in proto.graph.initializer if tensor.data_type == TensorProto.INT8}
    read = {
        node.output[0] for node in proto.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in small
    }
    return [
        node.name.rpartition("/")[0] for node in proto.graph.node if node.op_type == "Conv" and node.input[1] in read
    ]


def remedies(library: Library, proto: ModelProto) -> list[str]:
    """What to do about what this version can't build in the graph."""
    if not library.is_rtx or version_numbers(library.version) >= _RTX_WITH_INT8_CONVOLUTIONS:
        return []
    modules = int8_convolutions(proto)
    if not modules:
        return []
    kept = " ".join(f"--keep-rest {module}" for module in modules) if len(modules) <= 3 else "--precision fp16"
    return [f"before 1.7 it builds no convolution in INT8: export with {kept}, or build with tensorrt-rtx 1.7"]
