"""The function corp_deploy.reduce."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from calib.batches import Batches
from calib.store import load_moments
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.given_module import NAME as MEMORY
from corp_deploy.invocation import reduction
from corp_deploy.invocation.input_choice import Drawn, HoldOutOptions
from corp_deploy.planning.execution import reduce_checkpoint
from corp_deploy.planning.request import build_reduction_record
from corp_deploy.reduction.report import SiteReport
from corp_deploy.traced.models.module import is_reduced
from ground.errors import BadInput
from ground.gpu import require_device

from .in_python import errors_in_python, function_from_record, message_in_python
from .models import Directory, OfModel, in_memory, open_inputs, open_model
from .values import InputsLike, given_inputs


@dataclass(frozen=True, kw_only=True)
class ReduceOptions(reduction.ReduceOptions):
    __doc__ = reduction.ReduceOptions.__doc__

    def __post_init__(self) -> None:
        with errors_in_python(reduction.ReduceOptions):
            super().__post_init__()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced(Directory):
    """A reduced model, by the `path` of its directory, which `os.fspath` returns too.

    `model` is an ordinary nn.Module in eval mode on the CPU. `sites` have the loss at each site, `notes` what was not
    reduced and why; `macs` and `parameters` are pairs, dense and reduced; `record` is what the command prints as JSON.
    If the dense model was in memory and no library makes it, the directory needs `module` beside it:
    `Source(path, module=module)`.
    """

    model: nn.Module
    sites: tuple[SiteReport, ...]
    notes: tuple[str, ...]
    macs: tuple[int, int]
    parameters: tuple[int, int]
    record: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReduceCall(HoldOutOptions, Drawn, reduction.ReduceOptions, reduction.ReduceFiles, OfModel):
    """The parameters of `reduce`."""

    inputs: InputsLike | None = None


@function_from_record(ReduceCall)
def reduce(call: ReduceCall) -> Reduced:
    """Remove channels, dimensions and heads of a model, repair the loss in closed form, and write it to `output`.

    `moments` are those of this model, by `calibrate`. `inputs` are the calibration inputs, which budgets, the closed
    loop, a polish, presets that merge, and sparse weights need; those that `calibrate` held out by the same `hold_out`
    and `groups` are left out, so that they may prove the result. The directory holds model.safetensors and
    config.json; `load` returns the module, without pruning code. The presets are CORP's and GRAIL's methods, and
    `best`, the default.

    Raises BadInput for options that ask for nothing, contradict one another or would be ignored, for moments of another
    model, and for sites that can't be reduced as asked unless `allow_partial`; Missing without the device.
    """
    require_device(call.device)
    moments_file, given = Path(call.moments), None if call.inputs is None else given_inputs(call.inputs)
    moments = load_moments(moments_file)
    with ExitStack() as stack:
        example = given if isinstance(given, Batches) else moments
        dense, input_set = stack.enter_context(open_model(call.model, example)), None
        if dense.architecture.family == MEMORY and is_reduced(dense.model):
            raise BadInput("model is a reduced module in memory; give its directory, which names the dense model")
        if given is not None:
            opened_set = open_inputs(dense.model, given, **call.drawn).identified()
            input_set = call.split(opened_set, call.seed).fitted
        result, planned = reduce_checkpoint(
            dense,
            moments_file,
            call,
            moments=moments,
            directory=Path(call.output),
            images=input_set,
        )
    module, notes = None, [message_in_python(each, ReduceCall) for each in result.notes]
    if dense.architecture.family == MEMORY:
        module = in_memory(call.model)
        notes.append(
            f"the directory needs the module beside it, as no library makes {type(module).__name__}: "
            "corp_deploy.Source(DIR, module=MODULE); commands take it of a function: module:PATH.py:FUNCTION"
        )
    return Reduced(
        path=Path(call.output),
        module=module,
        model=result.model.eval(),
        sites=result.sites,
        notes=tuple(notes),
        macs=(macs(dense.model), macs(result.model)),
        parameters=(parameters(dense.model), parameters(result.model)),
        record=build_reduction_record(result, planned),
    )
