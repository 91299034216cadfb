"""The kernels of an engine, and the attention sites that it computes by fused kernels."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto, NodeProto

from export.graph.weights import module_of_node, readers_by_value
from ground.errors import BadInput
from ground.precision import BFLOAT16, FLOAT16, FLOAT32, HALVES

_FUSED_NAME = re.compile(r"gem[mv]_mha|kgen_mha|fmha")
_FUSED_KIND = ("Attention", "MultiHeadAttention", "kgen_mha")
_NO_KERNEL = ("signal", "wait")  # layers that synchronise streams and launch nothing
_LOG_LINE = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>\w+), Inputs: \[(?P<inputs>.*?)\], Constants: \[.*?\], "
    r"Outputs: \[(?P<outputs>.*?)\], TacticName: (?P<tactic>.*?), StreamId: -?\d+(?:, Metadata: (?P<metadata>.*))?$",
    re.MULTILINE,
)
_ONNX_NODE = re.compile(r"\[ONNX Layer: (.*?)\]")
_LOG_TYPE = re.compile(r"Datatype: (\w+)")
_TYPE_WORDS = (
    (FLOAT16, re.compile(r"\b(Half|FP16)\b")),
    (BFLOAT16, re.compile(r"\b(BFloat16|BF16)\b")),
    (FLOAT32, re.compile(r"\b(Float|FP32)\b")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel of an engine; `types` are those of its tensors, None if it has none."""

    name: str
    kind: str
    tactic: str
    types: frozenset[str] | None
    nodes: tuple[str, ...]

    @property
    def is_fused_attention(self) -> bool:
        """True for fused attention, which TensorRT names _gemm_mha_v2 or fmha; ONNX Runtime has operators for it."""
        return self.kind in _FUSED_KIND or any(_FUSED_NAME.search(text) for text in (self.name, self.tactic))


def fusion_fields(kernels: Sequence[Kernel], attention_sites: tuple[str, ...], profiles: int = 1) -> dict[str, Any]:
    """Return a record's fields on kernels and fused attention, empty ones where the library listed no kernels.

    A site counts as fused if it has a fused kernel in every profile. Shares are of the kernels that have tensors.
    """
    if not kernels:
        unknown = dict.fromkeys(("kernels", "half_kernel_share", "fused_attention_sites"))
        return {**unknown, "kernel_kinds": {}, "attention_sites": ()}
    typed = [kernel.types for kernel in kernels if kernel.types is not None]
    counts, halves = Counter(name for types in typed for name in types), {each.name for each in HALVES}
    fused = Counter(
        site
        for kernel in kernels
        if kernel.is_fused_attention
        for site in {node.rpartition("/")[0] for node in kernel.nodes}
    )
    return {
        "kernels": len(kernels),
        "kernel_kinds": dict(sorted(Counter(kernel.kind for kernel in kernels).items())),
        "kernel_types": {name: count / len(typed) for name, count in sorted(counts.items())},
        "half_kernel_share": sum(bool(types & halves) for types in typed) / len(typed) if typed else 0.0,
        "attention_sites": attention_sites,
        "fused_attention_sites": tuple(site for site in attention_sites if fused[site] >= profiles),
    }


def attention_sites(proto: ModelProto) -> tuple[str, ...]:
    """Return the sites of Attention and softmax in graph order, except softmaxes that only rank tokens for merging."""
    readers = readers_by_value(proto.graph)

    def is_averaged(node: NodeProto) -> bool:
        users = readers[node.output[0]]
        return any(user.op_type == "ReduceMean" or (user.op_type == "Cast" and is_averaged(user)) for user in users)

    nodes = [node for node in proto.graph.node if node.op_type in ("Softmax", "Attention")]
    return tuple(dict.fromkeys(module_of_node(node) for node in nodes if not is_averaged(node)))


def kernels_from_log(text: str) -> tuple[Kernel, ...]:
    return tuple(
        Kernel(
            name=match["name"],
            kind=match["kind"],
            tactic=match["tactic"],
            types=_types(_LOG_TYPE.findall(match["inputs"] + match["outputs"])),
            nodes=tuple(_ONNX_NODE.findall(match["metadata"] or "")),
        )
        for match in _LOG_LINE.finditer(text)
        if match["kind"] not in _NO_KERNEL
    )


def kernels_from_inspector(text: str) -> tuple[Kernel, ...]:
    try:
        layers = json.loads(text)["Layers"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise BadInput(f"the engine inspector's text is no JSON object with Layers ({error})") from error
    if any(not isinstance(layer, dict) for layer in layers):
        raise BadInput("the engine lists layer names only; build it with detailed profiling verbosity")
    return tuple(
        Kernel(
            name=layer["Name"],
            kind=layer["LayerType"],
            tactic=layer.get("TacticName", ""),
            types=_types(
                [
                    tensor.get("Datatype") or tensor.get("Format/Datatype", "")
                    for key in ("Inputs", "Outputs")
                    for tensor in layer.get(key, ())
                ]
            ),
            nodes=tuple(_ONNX_NODE.findall(layer.get("Metadata", ""))),
        )
        for layer in layers
        if layer["LayerType"] not in _NO_KERNEL
    )


def _types(type_names: list[str]) -> frozenset[str] | None:
    if not type_names:
        return None
    return frozenset(
        float_type.name for float_type, pattern in _TYPE_WORDS if any(pattern.search(text) for text in type_names)
    )
