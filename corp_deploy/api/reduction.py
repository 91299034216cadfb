"""corp_deploy.reduce."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from torch import nn

from calib.input_set import InputSet
from calib.store import load as load_moments
from corp_deploy.families.model_cost import macs, parameters
from corp_deploy.invocation.reduction import ReductionChoice, reduction_from_options
from corp_deploy.planning.carry_out import reduce_checkpoint
from corp_deploy.planning.judging import Judges, judges_from_paths
from corp_deploy.planning.lineage import record_of_reduction
from corp_deploy.planning.request import request_from_choice
from corp_deploy.reduction.report import SiteReport
from corp_deploy.store.checkpoint import Checkpoint, on_device
from ground.gpu import require_device

from .inputs import InputsLike, opened_inputs, parted_inputs
from .source import ModelLike, PathLike, opened

ByKind = Mapping[str, str]


class ReduceOptions(TypedDict, total=False):
    """What `reduce` takes beside its inputs, by the names and with the meaning of the command's options.

    Shares to remove in [0, 1): `mlp`, `attn`, `conv`, `residual`, `whole_heads`. Or one budget, shares to keep in (0,
    1]: `macs`, `params`, `latency` (with `latency_tables`, a directory, and `batch`). Or `within`, the most that may be
    lost: "error 0.05", "agreement 0.98", "accuracy -0.5", judged on inputs that calibration left out or on those of
    `judge`, with `labels`. `select` and `repair` are words, or words by kind of site: {"mlp": "wanda", "conv": "obs"};
    `align` is the multiple that widths are rounded to, by kind.
    """

    preset: str
    mlp: float
    attn: float
    conv: float
    residual: float
    whole_heads: float
    macs: float
    params: float
    latency: float
    latency_tables: PathLike
    batch: int
    within: str
    judge: PathLike | None
    labels: PathLike | None
    select: str | ByKind
    repair: str | ByKind
    qk: str
    heads: Literal["padded", "square", "ragged", "auto"]
    rotate: bool
    align: Mapping[str, int]
    ridge: float
    allow_partial: bool
    closed_loop: bool | Literal["asymmetric", "symmetric", "none"]
    rescale: bool
    polish: Literal["none", "layer", "block", "model"]
    polish_steps: int
    polish_time: float
    reads: Literal["all", "pooled"]
    held_out: PathLike | None
    merge_tokens: int | str
    merge_metric: str
    merge_how: str
    merge_outputs: str
    sparse: str
    sparse_pattern: str
    sparse_permute: str
    save_as: Literal["hf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """A reduced model: its directory `path`, which `os.fspath` gives too, and `model`, an ordinary nn.Module in eval
    mode on the CPU. `sites` tell what was lost at each, `notes` what stayed as it is and why; `macs` and `parameters`
    are pairs, dense and reduced; `record` is what `reduce --json` prints.
    """

    path: Path
    model: nn.Module
    sites: tuple[SiteReport, ...]
    notes: tuple[str, ...]
    macs: tuple[int, int]
    parameters: tuple[int, int]
    record: Mapping[str, Any]

    def __fspath__(self) -> str:
        return os.fspath(self.path)


PATHS = ("latency_tables", "judge", "labels", "held_out")


def _choice(options: Mapping[str, Any]) -> ReductionChoice:
    """As the command and the recipe ask for it. Raises BadInput for what contradicts itself or would be ignored, and
    TypeError for what is no option, as a function does.
    """
    if unknown := sorted(options.keys() - ReduceOptions.__annotations__.keys()):
        known = ", ".join(ReduceOptions.__annotations__)
        raise TypeError(f"reduce() got an unexpected keyword argument {unknown[0]!r}; its options are {known}")
    given = {name: value for name, value in options.items() if value is not None}
    given |= {name: Path(given[name]) for name in PATHS if name in given}
    given |= {name: {"channels": given[name]} for name in ("select", "repair") if isinstance(given.get(name), str)}
    if "merge_tokens" in given:
        given["merge_tokens"] = str(given["merge_tokens"])
    choice = reduction_from_options(given)
    choice.refuse_ignored(given)
    return choice


def _judges(choice: ReductionChoice, dense: Checkpoint, inputs: InputSet | None) -> Judges | None:
    if choice.within is None or inputs is None:
        return None
    return judges_from_paths(dense.model, inputs, judge=choice.judge, labels=choice.labels)


def reduce(
    model: ModelLike,
    moments: PathLike,
    output: PathLike,
    *,
    inputs: InputsLike | None = None,
    samples: int | None = None,
    hold_out: int | None = None,
    groups: str | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    seed: int = 0,
    **options: Unpack[ReduceOptions],
) -> Reduced:
    """Remove channels, dimensions and heads of a model, repair the loss in closed form, and write it to `output`.

    `moments` are of this model, by `calibrate`; `inputs` the calibration inputs themselves, which budgets, the closed
    loop, a polish, presets that merge, and sparse weights look at. `device` is where systems are solved, in
    float64; of `inputs`, `samples` are drawn by `seed`, which also orders a polish's, and those are left out that
    `calibrate` left out by the same `hold_out` and `groups`, so that they may prove the result. The directory holds
    model.safetensors and config.json; `load` gives the module, without pruning code. The method is CORP's and
    GRAIL's by preset, and `best`, the default (see ReduceOptions).

    Raises BadInput where nothing or contradictory things are asked for, for moments of another model, for options that
    the others would ignore, and where sites can't do what was asked unless `allow_partial`; Missing without the device.
    """
    require_device(device)
    choice, path = _choice(options), Path(output)
    asked = request_from_choice(choice, seed=seed)
    with ExitStack() as stack:
        dense, given = on_device(stack.enter_context(opened(model)), device), None
        if inputs is not None:
            opened_set = stack.enter_context(opened_inputs(dense.model, inputs, samples=samples, seed=seed))
            given = parted_inputs(opened_set, hold_out=hold_out, groups=groups, seed=seed).fitted
        result, planned = reduce_checkpoint(
            dense,
            Path(moments),
            asked,
            directory=path,
            images=given,
            judges=_judges(choice, dense, given),
            held_out=None if choice.held_out is None else load_moments(choice.held_out),
        )
    return Reduced(
        path=path,
        model=result.model.eval(),
        sites=result.sites,
        notes=result.notes,
        macs=(macs(dense.model), macs(result.model)),
        parameters=(parameters(dense.model), parameters(result.model)),
        record=record_of_reduction(result, planned),
    )
