"""How weights are set to zero: words and defaults. No torch."""

from typing import Literal, get_args

from corp_deploy.algebra.sparsity import Rule

SparseKind = Literal["mlp", "head", "conv"]
"""Of which sites layers are."""
Permute = Literal["none", "inside", "stream"]
"""What is put into another order first: nothing, what a site's last layer reads by the rows that give it, and the
residual stream too.
"""
Target = Literal["reduced", "own"]
"""What a layer is fitted to: what it gave in the model without zeros, or what its weights without zeros give on the
stream as it is by then.
"""
KINDS: tuple[SparseKind, ...] = get_args(SparseKind)
DEFAULT_RULE: Rule = "obs"
DEFAULT_PERMUTE: Permute = "none"  # after the refit orders gain nothing, see benchmarks/quality/sparsity.py
RIDGE_REL = 1e-4
