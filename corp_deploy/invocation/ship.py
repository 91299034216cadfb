"""Options of `ship`. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ground.precision import EVERY_WORD

from .option import NEEDED, Record, option
from .values import FILE, PATH, ListOf, OneOf

TargetName = Literal["onnxruntime-cpu", "onnxruntime-cuda", "openvino", "tensorrt", "tensorrt-rtx"]
MOST_HELD_OUT = 256


@dataclass(frozen=True, kw_only=True)
class ShipOptions(Record, heading="What is made"):
    """On which images, for what."""

    images: Path = option(PATH, NEEDED, help="Unlabelled images like those the model will meet.")
    held_out: Path | None = option(
        PATH,
        help=f"Other images that prove the result; default: half of --images, at most {MOST_HELD_OUT}, which nothing "
        "is fitted to.",
    )
    labels: Path | None = option(
        FILE, help="Class indices of --held-out, without that of all --images: accuracy is told then."
    )
    target: TargetName | None = option(
        OneOf(get_args(TargetName)), unset="the fastest that is here", help="What the model is to run on."
    )
    precision: Sequence[str] = option(
        ListOf(OneOf(EVERY_WORD), "fp32,fp16"),
        ("fp32", "fp16"),
        help="Precisions of the graphs: a CPU runs the first, a GPU fp16 where it is among them.",
    )
