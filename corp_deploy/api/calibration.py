"""corp_deploy.calibrate."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from calib.active import ACTIVE_EPS
from calib.collect import Precision
from calib.input_set import shuffled
from calib.moments import Moments
from calib.store import load as load_moments
from corp_deploy.invocation.merging import merging_from_options
from corp_deploy.planning.merging import merging_checkpoint
from corp_deploy.reduction.calibrate import Statistics
from corp_deploy.reduction.moments_files import (
    CalibrationRequest,
    CalibrationRun,
    Restriction,
    held_out_path,
    write_moments,
)
from ground.errors import BadInput
from ground.gpu import require_device

from .inputs import InputsLike, opened_inputs
from .source import ModelLike, PathLike, opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A file of moments: `path`, which `os.fspath` gives too; `held_out`, the moments of the inputs left out; how many
    `inputs` were fitted to; `record`, the same as `calibrate --json` prints of the file.
    """

    path: Path
    held_out: Path | None
    inputs: int
    record: Mapping[str, Any]

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    @property
    def moments(self) -> Moments:
        """The sums themselves, site by site, float64; each is read from the file when it is asked for."""
        return load_moments(self.path)


def calibrate(
    model: ModelLike,
    inputs: InputsLike,
    output: PathLike,
    *,
    samples: int | None = None,
    seed: int = 0,
    batch_size: int = 32,
    device: Literal["cpu", "cuda"] = "cpu",
    workers: int = 0,
    max_bad: int = 0,
    dtype: Precision = "float32",
    hold_out: int | None = None,
    groups: str | None = None,
    sites: Sequence[str] = (),
    attention: bool = True,
    attention_system: bool = False,
    attn: Sequence[float] = (),
    residual: bool = False,
    patch_memory: float | None = None,
    active_eps: float = ACTIVE_EPS,
    snapshots: Sequence[int] = (),
    merge_tokens: int | str | None = None,
    merge_metric: str | None = None,
    merge_how: str | None = None,
) -> Calibration:
    """Take a model's second-order statistics in one pass over unlabelled inputs, and write them to `output`.

    `inputs`: a folder of images, tar shards, .npy, .npz or .safetensors of [N,C,H,W] (float32, preprocessed, or uint8),
    an array or tensor of these in memory, a file of text, or token ids [S,N]. `samples` of them are drawn by `seed`;
    `hold_out` are left out, their moments written beside; `groups` as `calibrate --groups`. `sites` are patterns such
    as "blocks.3.*"; `attention` False takes MLPs alone, `attention_system` CORP's per-image system (eq. 15), in a
    second pass for what `reduce` keeps at the shares `attn` alone; `patch_memory` is in GB, `active_eps` the magnitude
    above which an entry is active, `snapshots` ascending numbers of inputs, `merge_tokens` the schedule under which the
    model is run. `device` is where the model runs, in `dtype`; sums are float64. For several processes, for going on
    after an interruption, and for decoders block by block there is the command.

    Raises BadInput for inputs that the model doesn't take, for damaged ones beyond `max_bad`, for activations that
    are not finite (naming the site), for too little memory, and where there is no site; Missing without the device.
    """
    require_device(device)
    if attn and not attention_system:
        raise BadInput("attn restricts the per-image system to what reduce keeps; give attention_system=True with it")
    path = Path(output)
    request = CalibrationRequest(
        statistics=Statistics(
            patterns=tuple(sites),
            attention=attention,
            attention_system=attention_system,
            precision=dtype,
            residual=residual,
            patch_bytes=None if patch_memory is None else int(patch_memory * 1e9),
            active_eps=active_eps,
        ),
        restriction=Restriction(sparsities=tuple(attn)) if attn else None,
        batch_size=batch_size,
        device=device,
        seed=seed,
        hold_out=hold_out,
        groups=groups,
    )
    run = CalibrationRun(
        unfinished=path,
        snapshots=tuple(snapshots),
        fitting=lambda share: f"calibrate --attention-system --attn {share:g}",
    )
    merging = {"merge_tokens": None if merge_tokens is None else str(merge_tokens)}
    merging = {
        name: value
        for name, value in (merging | {"merge_metric": merge_metric, "merge_how": merge_how}).items()
        if value is not None
    }
    with (
        opened(model) as loaded,
        opened_inputs(loaded.model, inputs, samples=samples, seed=seed, workers=workers, max_bad=max_bad) as opened_set,
    ):
        dense = merging_checkpoint(loaded, merging_from_options(merging))
        given = shuffled(opened_set, seed=seed) if snapshots and samples is not None else opened_set
        record, *_ = write_moments(dense, given, request, run, path)
    left_out = None if hold_out is None else held_out_path(path)
    return Calibration(path=path, held_out=left_out, inputs=int(record["images"]), record=record)
