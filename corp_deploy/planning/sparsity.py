"""A reduction whose weights are set to zero where that was asked for: the last thing that is done to it."""

from collections.abc import Callable
from dataclasses import replace

from calib.input_set import InputSet
from corp_deploy.invocation.sparsity import SparseChoice
from corp_deploy.reduction.model import Reduction
from corp_deploy.reduction.sparsify import Sparsifying, sparsified


def with_sparsity(
    reduction: Reduction, choice: SparseChoice, inputs: InputSet | None, *, done: Callable[[int], None] | None = None
) -> Reduction:
    """The reduction with its model's layers sparse, and a sentence on what became of them; itself where none are
    asked for.
    """
    if not choice.patterns:
        return reduction
    assert inputs is not None, choice
    how = Sparsifying(kinds=choice.patterns, rule=choice.sparse_pattern, permute=choice.sparse_permute)
    model, report = sparsified(reduction.model, inputs, how, done=done)
    return replace(reduction, model=model, sparsity=report, said=(*reduction.said, *report.sentences()))
