"""A model as it is named on the command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.families.outputs import Outputs
from corp_deploy.families.preprocessing import CROP_MODES, INTERPOLATIONS, Preprocessing
from corp_deploy.invocation.values import ListOf
from corp_deploy.views.console import Output
from ground.quantities import DEVIATION, MEAN, SHARE_KEPT
from ground.quantity import Quantity

from .options import FILE, JSON, OUTPUT_NAMES, Command, trust_option, value_options
from .value import Value

if TYPE_CHECKING:
    from corp_deploy.store.checkpoint import Checkpoint


def _by_channel(quantity: Quantity) -> Value:
    return Value(ListOf(quantity, "0.485,0.456,0.406", different=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model, what goes with a name of timm's (weights, arguments, preprocessing), and its outputs by name."""

    model: str
    weights: Path | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ema: bool | None = None
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    outputs: Outputs | None = None

    def look(self, out: Output) -> "Checkpoint":
        """The model to be looked at and not run: of a bare name of timm's without any weights."""
        from corp_deploy.store.dense_model import is_bare_name, without_weights

        if self.weights is not None or not is_bare_name(self.model):
            return self.load(out)
        out.note(f"{self.model}: without weights, as none are given")
        return without_weights(self.model, self.kwargs, self.preprocessing, self.outputs)

    def load(self, out: Output) -> "Checkpoint":
        """The model, after what there is to say about its weights."""
        from corp_deploy.store.dense_model import load_dense

        checkpoint = load_dense(
            self.model,
            weights=self.weights,
            kwargs=self.kwargs,
            ema=self.ema,
            preprocessing=self.preprocessing,
            outputs=self.outputs,
        )
        for note in checkpoint.notes:
            out.note(note)
        return checkpoint


def _model_choice(
    model: str,
    weights: Path | None,
    model_kwargs: dict[str, Any] | None,
    ema: bool | None,
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
    crop_pct: float | None,
    interpolation: str | None,
    crop_mode: str | None,
    outputs: Outputs | None,
) -> ModelChoice:
    return ModelChoice(
        model=model,
        weights=weights,
        kwargs=model_kwargs or {},
        ema=ema,
        preprocessing=Preprocessing(
            mean=mean, std=std, crop_pct=crop_pct, interpolation=interpolation, crop_mode=crop_mode
        ),
        outputs=outputs,
    )


_choice_options = value_options(
    "model",
    _model_choice,
    click.option("--weights", type=FILE, help="Trained weights: .safetensors, .pth, .pt, .pth.tar, .bin, .ckpt."),
    click.option("--model-kwargs", type=JSON, default=None, help="Arguments for timm's model, a JSON object."),
    click.option("--ema/--no-ema", default=None, help="Moving-average weights or raw ones; default: as timm does."),
    click.option("--mean", type=_by_channel(MEAN), default=None, help="Mean pixel of the training; default: timm's."),
    click.option("--std", type=_by_channel(DEVIATION), default=None, help="Deviation of its pixels; default: timm's."),
    click.option("--crop-pct", type=Value(SHARE_KEPT), default=None, help="Share of a side that the crop keeps."),
    click.option("--interpolation", type=click.Choice(INTERPOLATIONS), default=None, help="How images are resized."),
    click.option("--crop-mode", type=click.Choice(CROP_MODES), default=None, help="How what is not square is cropped."),
    click.option(
        "--outputs",
        type=OUTPUT_NAMES,
        default=None,
        help="What the model gives, such as class,patches,block8; default: its own output.",
    ),
    argument="model",
)


def dense_options(command: Command) -> Command:
    """Add what a model's name needs beside it, and hand the command a `ModelChoice` as `model` in place of the name."""
    return trust_option(_choice_options(command))


MODEL_HELP = (
    "A timm name (with --weights), a directory written by corp-deploy, a snapshot of a timm repository, hf:DIR, a "
    "vision transformer, text encoder or decoder of transformers, torchvision:vit_b_16 and its like "
    "(with --weights), or module:PATH.py:FUNCTION (with --trust-code)."
)


def model_options(command: Command) -> Command:
    """Add --model and what goes with it, and hand the command a `ModelChoice` as `model`."""
    return click.option("--model", required=True, help=MODEL_HELP)(dense_options(command))
