"""A check of a model on the first of the user's own inputs, before a long pass over all of them."""

from torch import nn

from calib.inputs import InputSet, tensors_by_name, to_device
from corp_deploy.traced.models.module import TracedModule, device_of, tracing
from corp_deploy.traced.programs.steady import require_steady

AT_ONCE, BATCHES = 2, 2


def require_steady_on(model: nn.Module, inputs: InputSet) -> None:
    """Run the first two batches twice; raise BadInput, naming the operation, if outputs differ or are not finite."""
    if not isinstance(model, TracedModule):
        return
    for batch in inputs.head(AT_ONCE * BATCHES).batches(AT_ONCE):
        tensors = list(tensors_by_name(to_device(batch, device_of(model))).values())
        if all(bool(each.isfinite().all()) for each in tensors):  # reading the others names their file
            require_steady(tracing(model).program, tensors, called=f"the first {inputs.noun}")
