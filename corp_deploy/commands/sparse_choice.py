"""Sparse weights as they are asked for on the command line."""

from typing import Any

import click

from corp_deploy.algebra.sparsity import RULES, Sparsity
from corp_deploy.invocation.sparsity import sparsities_from_text
from corp_deploy.reduction.sparse_options import DEFAULT_PERMUTE, DEFAULT_RULE, PERMUTES, SparseKind
from ground.errors import BadInput


class Sparsities(click.ParamType[dict[SparseKind, Sparsity]]):
    """2:4, or mlp=2:4,head=2:4,conv=2:4; any may be left out."""

    name = "2:4|mlp=2:4,head=2:4,conv=2:4"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[SparseKind, Sparsity]:
        if isinstance(value, dict):
            return value
        try:
            return sparsities_from_text(str(value))
        except BadInput as error:
            self.fail(str(error), param, ctx)


sparse_of_reduction = (
    click.option(
        "--sparse",
        type=Sparsities(),
        default=None,
        help="Last of all, of every 4 neighbouring weights of the sites' layers keep 2 and refit those by least "
        "squares, alone or on reduced widths, by kind of site where that is said. Only 2:4 has kernels (build "
        "--sparse), which TensorRT picks where they are faster; other K:N are for analysis. Default: none.",
    ),
    click.option(
        "--sparse-pattern",
        type=click.Choice(RULES),
        default=DEFAULT_RULE,
        show_default=True,
        help="Which weights stay: obs, in SparseGPT's order by the exact cost of dropping them; cast, by CAST's cost "
        "of each group by itself; magnitude, the largest.",
    ),
    click.option(
        "--sparse-permute",
        type=click.Choice(PERMUTES),
        default=DEFAULT_PERMUTE,
        show_default=True,
        help="Put what a site's last layer reads into another order first, by the rows in front of it (inside), and "
        "the residual stream of a plain ViT with a classifier too (stream): nothing is permuted at run time.",
    ),
)
