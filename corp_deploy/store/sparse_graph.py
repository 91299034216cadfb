"""Whether a graph holds what it says of the k:n sparsity of its model's layers."""

from pathlib import Path

from onnx import ModelProto

from corp_deploy.algebra.sparsity import sparsity_from_text
from export.graph.weights import sparse_matrices
from ground.errors import BadInput
from ground.records import record_from_text

PREFIX = "corp_deploy."
SPARSITY = "sparsity"


def _patterns(proto: ModelProto, path: Path) -> dict[str, str]:
    """By layer, as the graph carries them."""
    carried = {entry.key: entry.value for entry in proto.metadata_props}
    return record_from_text(carried.get(f"{PREFIX}{SPARSITY}", "{}"), dict[str, str], where=f"{path}: its {SPARSITY}")


def require_sparse_graph(proto: ModelProto, path: Path) -> None:
    """Raise BadInput for a graph whose matrices, as they are stored in whatever type, are not as sparse as the layers.

    Matrices are known by the layer that their node is of; where a graph has other names, as many must be sparse.
    """
    patterns = _patterns(proto, path)
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
