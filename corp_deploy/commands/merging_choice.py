"""Token merging as it is asked for on the command line."""

from typing import Any, get_args

import click

from corp_deploy.families.merging import How, Metric
from corp_deploy.invocation.merging import OUTPUTS, MergingChoice

from .options import explicit_options, usage_errors, value_options

_tokens = click.option(
    "--merge-tokens",
    default=None,
    metavar="R|SCHEDULE|auto",
    help="Tokens that each block merges away between attention and MLP (ToMe): 12 in each, grow:36 for 0 in the first "
    "to 36 in the last, a number for every block (0,4,8,...), or auto for --macs, --latency: by what the outputs lose.",
)
_metric = click.option(
    "--merge-metric",
    type=click.Choice(get_args(Metric)),
    default="ward",
    show_default=True,
    help="What tokens are compared by: what a merge changes in the stream behind the attention (Ward: sizes times "
    "squared distance), the cosine of that stream, or that of the keys of all heads side by side.",
)
_how = click.option(
    "--merge-how",
    type=click.Choice(get_args(How)),
    default="merge",
    show_default=True,
    help="Merge those that are alike, or drop those that the class token attends to least.",
)
_outputs = click.option(
    "--merge-outputs",
    type=click.Choice(OUTPUTS),
    default="merged",
    show_default=True,
    help="Of a model that gives tokens: those left, or one for every source token, with the value it was merged into.",
)


def _choice(**options: Any) -> MergingChoice:
    with usage_errors():
        choice = MergingChoice(**options)
    choice.refuse_ignored(explicit_options())
    return choice


merging_of_reduction = (_tokens, _metric, _how, _outputs)
merging_of_statistics = value_options("merging", _choice, _tokens, _metric, _how)
"""Adds what is merged while statistics are taken, and hands the command a `MergingChoice` as `merging`."""
