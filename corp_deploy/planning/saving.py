"""What can be known before a reduction of whether its widths can be said in a configuration of transformers."""

from pathlib import Path

from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.families.hf_saved import INSTEAD
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.hub_snapshot import CONFIG
from corp_deploy.store.transformers_saved import FOLDER, origin_of
from ground.errors import BadInput

from .request import ReductionRequest


def _unsayable(dense: Checkpoint, request: ReductionRequest) -> str:
    """Why no configuration can say what is asked for, or nothing, as far as the options tell."""
    if request.options.schedule is not None or traced_model.merging_of(dense.model) is not None:
        return "no class of transformers merges tokens"
    if request.options.allocates:
        return (
            "a budget gives every layer widths of its own, and a configuration has one for all; give --mlp and --attn"
        )
    if request.options.auto_heads:
        return "--heads auto may leave queries and keys narrower than values; give --heads square"
    return ""


def require_sayable(dense: Checkpoint, request: ReductionRequest) -> None:
    """Raise BadInput, before any work, for a reduction that could not be saved as it is asked for."""
    if request.options.save_as is None:
        return
    origin = origin_of(dense)
    if reason := _unsayable(dense, request):
        raise BadInput(f"--save-as hf: {reason}; {INSTEAD}")
    origin.refuse_unsayable(sites_of(dense.model), uniform_widths(dense.model, request.method))


def refuse_outdated(directory: Path, request: ReductionRequest) -> None:
    """Raise BadInput where a form of transformers would stay beside a model that it is not of."""
    theirs = directory / FOLDER
    if request.options.save_as is None and (theirs / CONFIG).is_file():
        raise BadInput(
            f"{theirs}: this transformers directory of another model would remain beside this one; remove it, "
            "overwrite it with --save-as hf, or choose another --output"
        )
