"""Whether layers of a stored model and matrices of its graph are as k:n sparse as they are said to be."""

from collections.abc import Mapping
from pathlib import Path

from onnx import ModelProto
from torch import Tensor, nn

from corp_deploy.algebra.sparse_patterns import holds
from corp_deploy.algebra.sparsity import Sparsity, sparsity_from_text
from export.graph.weights import sparse_matrices
from ground.errors import BadInput
from ground.records import record_from_text

from .model_config import REMEDY


def rows_of_weight(weight: Tensor) -> Tensor:
    """A row for each output, of what groups are taken of: inputs, or input channels at each place of a kernel."""
    weight = weight.detach()
    return weight if weight.ndim == 2 else weight.flatten(2).transpose(1, 2)


def is_sparse(weight: Tensor, sparsity: Sparsity) -> bool:
    """Whether the weights hold the pattern, every place of a kernel by itself."""
    rows = rows_of_weight(weight)
    return not rows.shape[-1] % sparsity.of and holds(rows.flatten(0, -2), sparsity)


def require_sparse(model: nn.Module, patterns: Mapping[str, str], where: str) -> None:
    """Raise BadInput for a layer (or whole name of a weight that is no module's) not as sparse as recorded."""
    state = model.state_dict() if patterns else {}
    for name, text in patterns.items():
        weight, sparsity = state.get(f"{name}.weight", state.get(name)), sparsity_from_text(text)
        if weight is None or weight.ndim < 2:
            raise BadInput(f"{where}: sparsity: the model has no layer {name[:100]!r}; {REMEDY}")
        if not is_sparse(weight, sparsity):
            raise BadInput(
                f"{where}: sparsity: {name} is not {sparsity}: some {sparsity.of} neighbouring weights have more than "
                f"{sparsity.kept} that are not zero; {REMEDY}"
            )


PREFIX = "corp_deploy."
SPARSITY = "sparsity"


def require_sparse_graph(proto: ModelProto, path: Path) -> None:
    """Raise BadInput for a graph whose matrices, as they are stored in whatever type, are not as sparse as the layers.

    Matrices are known by the layer that their node is of; where a graph has other names, as many must be sparse.
    """
    carried = {entry.key: entry.value for entry in proto.metadata_props}.get(f"{PREFIX}{SPARSITY}", "{}")
    patterns = record_from_text(carried, dict[str, str], where=f"{path}: its {SPARSITY}")
    for text in dict.fromkeys(patterns.values()):
        sparsity, layers = sparsity_from_text(text), [name for name, each in patterns.items() if each == text]
        holds_by_node = sparse_matrices(proto, sparsity.kept, sparsity.of)
        of_layer = {name: [node for node in holds_by_node if node.rpartition("/")[0] == name] for name in layers}
        dense = [name for name, nodes in of_layer.items() if not all(holds_by_node[node] for node in nodes)]
        named = {node for nodes in of_layer.values() for node in nodes}
        others = sum(holds for node, holds in holds_by_node.items() if node not in named)
        unnamed = [name for name, nodes in of_layer.items() if not nodes]
        if dense or len(unnamed) > others:
            raise BadInput(
                f"{path}: {(dense or unnamed)[0]} is {text} in the model, but not in the graph ({len(dense)} of "
                f"{len(layers)} layers are dense there, {max(len(unnamed) - others, 0)} are missing)"
            )
