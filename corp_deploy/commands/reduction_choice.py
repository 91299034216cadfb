"""A reduction as it is asked for on the command line."""

from typing import Any

import click

from corp_deploy.invocation.compositions import COMPOSITIONS, NAMES, with_implied
from corp_deploy.invocation.limit import EXPECTED, Limit, limit_from_text
from corp_deploy.invocation.method_choice import MethodChoice
from corp_deploy.invocation.reduction import ReductionChoice, reduction_from_options
from corp_deploy.invocation.reduction_table import LOOP, POLISH, PRESET
from corp_deploy.polish.options import POLISHES
from corp_deploy.polish.options import STEPS as DEFAULT_STEPS
from corp_deploy.reduction.method import DEFAULT_RIDGE_REL, LOOPS, QK_RECOVERIES
from ground.errors import BadInput
from ground.quantities import RIDGE, SECONDS, SHARE_KEPT, SHARE_REMOVED, STEPS
from ground.quantity import BATCH

from .by_kind import RANKING, REPAIR
from .merging_choice import merging_of_reduction
from .numbers import WIDTHS, Alignment, Number
from .options import ANY_PATH, DIRECTORY, FILE, explicit_options, usage_errors, value_options
from .passes import BUDGET, CLOSED_LOOP, cost
from .sparse_choice import sparse_of_reduction


class LimitType(click.ParamType[Limit]):
    """error 0.05, agreement 0.98 or accuracy -0.5, in one pair of quotes."""

    name = "measure number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Limit:
        if isinstance(value, Limit):
            return value
        try:
            return limit_from_text(str(value))
        except BadInput as error:
            self.fail(str(error), param, ctx)


method_options = (
    click.option(
        "--mlp",
        type=Number(SHARE_REMOVED),
        default=None,
        help="Share of MLP hidden channels to remove; 0 repairs at full width; default: MLPs are left alone.",
    ),
    click.option(
        "--attn",
        type=Number(SHARE_REMOVED),
        default=None,
        help="Share of query/key dimensions to remove; 0 repairs at full width; default: attention is left alone.",
    ),
    click.option(
        "--conv",
        type=Number(SHARE_REMOVED),
        default=None,
        help="Share of the channels between convolutions to remove; 0 repairs at full width; default: they are left "
        "alone.",
    ),
    click.option(
        "--residual",
        type=Number(SHARE_REMOVED),
        default=None,
        help="Share of the channels of residual streams of convolutions to remove, the same for all that write and "
        "read a stream. Moments of calibrate --patch-memory have to be of calibrate --residual too.",
    ),
    click.option(
        "--whole-heads",
        type=Number(SHARE_REMOVED),
        default=None,
        help="Share of the attention heads to remove whole, one at least stays; the output projection is refitted. "
        "--attn then narrows those left. " + PRESET.help("whole_heads"),
    ),
    click.option(
        "--preset",
        type=click.Choice(NAMES),
        default="best",
        show_default=True,
        help="How to choose and repair. "
        + "; ".join(f"{name}: {composition.words}" for name, composition in COMPOSITIONS.items())
        + ", where those options say nothing else, and a budget.",
    ),
    click.option(
        "--select",
        type=RANKING,
        default=None,
        help="Rank by something else than the preset does: energy, magnitude, combined, active, variance, wanda, obs, "
        "producer-l1 or producer-l2 of all channels, or by kind: mlp=producer-l2, head=magnitude (dimensions of "
        "heads), conv=wanda, heads=grail (whole heads).",
    ),
    click.option(
        "--repair",
        type=REPAIR,
        default=None,
        help="Repair by something else than the preset does: none, bias, gram or affine of all channels, or by kind: "
        "mlp=affine-v1, conv=im2col, heads=gram.",
    ),
    click.option(
        "--qk",
        type=click.Choice(QK_RECOVERIES),
        default=None,
        help="What becomes of queries and keys, otherwise than by the preset: dimensions selected and no more (select) "
        "or repaired by CORP's equations (logit, which needs moments of calibrate --attention-system; logit-v1), a "
        "basis of least loss (lowrank), or all kept (keep).",
    ),
    click.option(
        "--heads",
        type=click.Choice(["padded", "square", "ragged", "auto"]),
        default="padded",
        show_default=True,
        help="padded and square keep engines' fused attention, ragged loses it; auto takes the better at equal MACs.",
    ),
    click.option(
        "--rotate/--no-rotate",
        default=None,
        help="Give reduced heads in a basis of even ranges, by a Hadamard rotation of queries and keys, "
        "and of values, where their width is a power of two: the same outputs, less lost in INT8. Default: preset "
        "best does, the published ones keep their own.",
    ),
    click.option(
        "--align",
        type=Alignment(),
        default=WIDTHS,
        show_default=True,
        help="Multiples that widths are rounded to; at least 8.",
    ),
    click.option(
        "--ridge",
        type=Number(RIDGE),
        default=DEFAULT_RIDGE_REL,
        show_default=True,
        help="Regularisation, relative to the mean diagonal of the matrix it is added to.",
    ),
)
budget_options = (
    click.option(
        "--macs",
        type=Number(SHARE_KEPT),
        default=None,
        help=f"Share of the dense MACs to keep: widths differ by site; {cost(BUDGET)}.",
    ),
    click.option(
        "--params", type=Number(SHARE_KEPT), default=None, help="Share of the dense parameters to keep, likewise."
    ),
    click.option(
        "--latency", type=Number(SHARE_KEPT), default=None, help="Share of the dense latency to keep, on this machine."
    ),
    click.option(
        "--within",
        type=LimitType(),
        default=None,
        help=f"The smallest model (with --latency-tables: the fastest) that stays within {EXPECTED}, by bisection over "
        "the budget: up to 7 reductions, each judged on images held out of the calibration.",
    ),
    click.option(
        "--judge",
        type=ANY_PATH,
        default=None,
        help="Other images (texts) that judge --within; default: those of --images (--text) that calibrate left out.",
    ),
    click.option(
        "--labels", type=FILE, default=None, help="Class indices of the images that judge, for --within accuracy."
    ),
    click.option(
        "--latency-tables", type=DIRECTORY, default=None, help="Where --latency and --within keep latency tables."
    ),
    click.option("--batch", type=Number(BATCH), default=None, help="The batch size that latency is about; default 1."),
)
repair_options = (
    click.option("--allow-partial", is_flag=True, help="Go on where sites that were asked for can't be reduced."),
    click.option(
        "--closed-loop",
        type=click.Choice([*LOOPS, "none"]),
        is_flag=False,
        flag_value="asymmetric",
        default=None,
        help="Block by block on the model as reduced so far: alone or asymmetric, fitted to what the dense model's "
        f"stream has, {cost(CLOSED_LOOP)}; symmetric, as GRAIL publishes it, to what the dense weights would do there.",
    ),
    click.option(
        "--rescale",
        is_flag=True,
        help="Then rescale every convolution to the dense one's mean and variance of each channel on the images of "
        "--images, as REPAIR does: no labels, nothing at run time. " + LOOP.help("rescale"),
    ),
    click.option(
        "--polish",
        type=click.Choice(POLISHES),
        default=None,
        help="Then fit, without labels, on the calibration images: each reduced layer (by least squares) or block (by "
        "gradients) to the dense model's stream, or the whole model to its outputs and streams (by gradients). Images "
        "held out judge, and the model never ends worse on them than it began. Default: none.",
    ),
    click.option(
        "--polish-steps",
        type=Number(STEPS),
        default=None,
        help="Sweeps over each layer, steps of each block or of the model; default: "
        + ", ".join(f"{name} {steps}" for name, steps in DEFAULT_STEPS.items() if steps)
        + ". "
        + POLISH.help("polish_steps"),
    ),
    click.option(
        "--polish-time",
        type=Number(SECONDS),
        default=None,
        help="Seconds after which all polishing ends; without --polish-steps it is all that ends it. "
        + POLISH.help("polish_time"),
    ),
    click.option(
        "--reads",
        type=click.Choice(["all", "pooled"]),
        default=None,
        help="Tokens the last block is fitted to: all, or those the outputs read; default: all without a classifier. "
        + LOOP.help("reads"),
    ),
    click.option(
        "--save-as",
        type=click.Choice(["hf"]),
        default=None,
        help="hf: write OUTPUT/hf too, a plain directory of Hugging Face transformers that AutoModel loads, of a "
        "model that --model hf:DIR read; one MLP width for all layers, square heads where its class takes them.",
    ),
    click.option(
        "--held-out",
        type=FILE,
        default=None,
        help="Moments of other images (calibrate --hold-out): judges every site.",
    ),
)


def _reduction(**options: Any) -> ReductionChoice:
    explicit = explicit_options()
    POLISH.refuse([("", with_implied(options)["polish"] or "none")], explicit)
    with usage_errors():
        axis, way = MethodChoice(**{name: options[name] for name in ("preset", "select", "repair", "qk")}).of_preset
    axis.refuse([("", way)], explicit)
    with usage_errors():
        reduction = reduction_from_options(options)
    reduction.refuse_ignored(explicit)
    return reduction


reduction_options = value_options(
    "reduction",
    _reduction,
    *method_options,
    *budget_options,
    *repair_options,
    *merging_of_reduction,
    *sparse_of_reduction,
)
"""Adds what settles method, widths and tokens, and hands the command a `ReductionChoice` as `reduction`."""
