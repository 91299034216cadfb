"""Which layers of a stored model are k:n sparse, held against their weights."""

from collections.abc import Mapping

from torch import Tensor, nn

from corp_deploy.algebra.sparse_patterns import holds
from corp_deploy.algebra.sparsity import Sparsity, sparsity_from_text
from ground.errors import BadInput

from .model_config import REMEDY


def rows_of_weight(weight: Tensor) -> Tensor:
    """The weights a row for each output, those that a group is taken of side by side: inputs of a linear layer, input
    channels at each place of a kernel.
    """
    weight = weight.detach()
    return weight if weight.ndim == 2 else weight.flatten(2).transpose(1, 2)


def is_sparse(weight: Tensor, sparsity: Sparsity) -> bool:
    """Whether the weights hold the pattern, every place of a kernel by itself."""
    rows = rows_of_weight(weight)
    return not rows.shape[-1] % sparsity.of and holds(rows.flatten(0, -2), sparsity)


def require_sparse(model: nn.Module, patterns: Mapping[str, str], where: str) -> None:
    """Raise BadInput for a layer that is not as sparse as it is recorded to be. A weight that is no module's own has
    its whole name.
    """
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
