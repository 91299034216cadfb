"""Options of a model: name, weights, arguments, preprocessing and outputs. Torch is imported when it is loaded."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corp_deploy.spec.architecture import CROP_MODES, INTERPOLATIONS, Preprocessing
from corp_deploy.spec.outputs import EXAMPLE, NamedOutputs, outputs_from_text
from ground.quantity import DEVIATION, MEAN, SHARE_KEPT, quoted
from ground.records import record_from_text

from .option import PathLike, Record, option
from .values import FILE, TEXT, ListOf, OneOf, ParsedText

if TYPE_CHECKING:
    from corp_deploy.store.checkpoint import Checkpoint


def _json_object(text: str) -> dict[str, Any]:
    return record_from_text(text, dict[str, Any], where=quoted(text), remedy="give one such as '{\"img_size\": 384}'")


CHANNELS = "0.485,0.456,0.406"
JSON = ParsedText(span="json", expected="a JSON object", kind=dict, read=_json_object)
OUTPUT_NAMES = ParsedText(
    span="name,name,...",
    expected=f"names of outputs, such as {EXAMPLE}",
    kind=tuple,
    read=lambda text: outputs_from_text(text).names,
)


@dataclass(frozen=True, kw_only=True)
class ModelSource(Record, heading="Model"):
    """A model's name, weights, arguments, preprocessing and outputs.

    `name`: a timm name (with `weights`), a directory written by corp-deploy or a snapshot of one of timm's
    repositories, `hf:DIR` of transformers, `torchvision:NAME` (with `weights`), `module:PATH.py:FUNCTION` (with
    `trust_code`), or a .toml file whose table [model] has all of this. `kwargs`: arguments for the model's library.
    `ema`: True for the moving average of the weights, False for the raw ones. `weights_key`: the key of the weights in
    their file, with dots between nested keys, and with a prefix of the weights' names after the last key. `mean`,
    `std` (one number, or one for each channel), `crop_pct` in (0, 1], `interpolation` and `crop_mode` replace the
    model's own preprocessing. `outputs`: names such as ("class", "patches", "block8"). Files are read when a function
    uses the model, and nothing is ever downloaded.
    """

    name: PathLike = field(kw_only=False)
    weights: PathLike | None = field(
        default=None,
        kw_only=False,
        metadata=option(FILE, help="Trained weights: .safetensors, .pth, .pt, .pth.tar, .bin, .ckpt.").metadata,
    )
    kwargs: Mapping[str, Any] | None = option(
        JSON, typed="model_kwargs", help="Arguments for timm's model, a JSON object."
    )
    ema: bool | None = option(help="Moving-average weights or raw ones; default: the average if there is one.")
    weights_key: str | None = option(
        TEXT, help="Key under which a checkpoint has the weights, such as model_ema or state_dict.net."
    )
    mean: Sequence[float] | None = option(
        ListOf(MEAN, CHANNELS, different=False), help="Mean pixel of the training; default: timm's."
    )
    std: Sequence[float] | None = option(
        ListOf(DEVIATION, CHANNELS, different=False),
        help="Standard deviation of the training's pixels; default: timm's.",
    )
    crop_pct: float | None = option(SHARE_KEPT, help="Share of a side that the crop keeps.")
    interpolation: str | None = option(OneOf(INTERPOLATIONS), help="How images are resized.")
    crop_mode: str | None = option(OneOf(CROP_MODES), help="How images that are not square are cropped.")
    outputs: Sequence[str] | None = option(
        OUTPUT_NAMES, help="Named outputs, such as class,patches,block8; default: the model's own output."
    )
    trust_code: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.named_outputs

    @property
    def named_outputs(self) -> NamedOutputs | None:
        """The named outputs to use, None for the model's own output. Raises BadInput for unknown names."""
        return None if self.outputs is None else NamedOutputs(tuple(self.outputs))

    @property
    def preprocessing(self) -> Preprocessing:
        of_images = ("mean", "std", "crop_pct", "interpolation", "crop_mode")
        return Preprocessing(**{name: self.values[name] for name in of_images})

    def opened(self) -> "Checkpoint":
        """Return the loaded model as a Checkpoint. Raises BadInput as load_dense does."""
        from corp_deploy.store.dense_model import load_dense

        return load_dense(
            os.fspath(self.name),
            weights=None if self.weights is None else Path(self.weights),
            kwargs=self.kwargs or {},
            ema=self.ema,
            key=self.weights_key,
            preprocessing=self.preprocessing,
            outputs=self.named_outputs,
        )
