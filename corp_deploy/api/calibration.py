"""The function corp_deploy.calibrate."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.moments import Moments
from calib.store import load_moments
from corp_deploy.invocation.calibration import CalibrateFiles, CalibrateOptions
from corp_deploy.invocation.input_choice import Decoded, Drawn
from corp_deploy.planning.request import apply_merging_choice
from corp_deploy.reduction.moments_files import CalibrationRun, held_out_path, write_moments
from ground.gpu import require_device

from .in_python import function_from_record
from .models import OnInputs, Written, open_inputs, open_model
from .values import given_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(Written):
    """A file of moments, by its `path`, which `os.fspath` returns too.

    `held_out` is the file with moments of the inputs held out, `inputs` the number of fitted inputs, and `record` what
    the command prints as JSON.
    """

    held_out: Path | None
    inputs: int
    record: Mapping[str, Any]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why a reduction by these moments is unsure: too few different inputs, or values of another scale."""
        return tuple(self.record.get("warnings", ()))

    @property
    def moments(self) -> Moments:
        """The sums, site by site, in float64; each is read from the file on use."""
        return load_moments(self.path)


@dataclass(frozen=True, kw_only=True)
class CalibrateCall(Decoded, Drawn, CalibrateOptions, CalibrateFiles, OnInputs):
    """The parameters of `calibrate`."""


@function_from_record(CalibrateCall)
def calibrate(call: CalibrateCall) -> Calibration:
    """Collect a model's second-order statistics in one pass over unlabelled inputs, and write them to `output`.

    `inputs`: a folder of images, tar shards, parquet files, a directory of datasets.save_to_disk, .npy, .npz or
    .safetensors of [N,C,H,W] (float32, preprocessed, or uint8), a URL of any of these, an array or tensor in memory, a
    file of text, token ids [S,N], or an iterable of batches, such as a DataLoader or a generator, which is read once
    unless images are held out, drawn or grouped. Sums are float64. The command `calibrate` also resumes, runs in
    several processes, and calibrates decoders block by block.

    Raises BadInput for inputs that the model doesn't take, for damaged ones beyond `max_bad`, for activations that
    are not finite (naming the site), for too little memory, and where there is no site; Missing without the device.
    """
    require_device(call.device)
    path = Path(call.output)
    run = CalibrationRun(
        unfinished=path,
        snapshots=tuple(call.snapshots),
        fitting=lambda share: f"calibrate --attention-system --attn {share:g}",
    )
    given = given_inputs(call.inputs)
    with open_model(call.model, given) as loaded:
        opened_set = open_inputs(loaded.model, given, **call.decoded, **call.drawn)
        dense, input_set = apply_merging_choice(loaded, call), call.order_for_snapshots(opened_set, **call.drawn)
        record, *_ = write_moments(dense, input_set, call.request(seed=call.seed), run, path)
    left_out = None if call.hold_out is None else held_out_path(path)
    return Calibration(path=path, held_out=left_out, inputs=int(record["images"]), record=record)
