"""What a model is run on: one tensor or several named ones, of any dtype, the batch in front of each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ground.errors import BadInput

Inputs = Tensor | Mapping[str, Tensor]


def tensors_by_name(inputs: Inputs) -> Mapping[str, Tensor]:
    """The tensors by name; one that has none goes as `input`."""
    return {"input": inputs} if isinstance(inputs, Tensor) else inputs


def map_tensors(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The same form with every tensor changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    return {name: change(tensor) for name, tensor in inputs.items()}


def run_model(model: nn.Module, inputs: Inputs) -> Any:
    """What the model gives: named inputs are handed over by their order."""
    return model(*tensors_by_name(inputs).values())


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """What a model gave: one output bare, or several."""
    return (output,) if isinstance(output, Tensor) else tuple(output)


def to_device(inputs: Inputs, device: torch.device | str) -> Inputs:
    """On that device; out of page-locked memory without waiting."""
    return map_tensors(inputs, lambda tensor: tensor.to(device, non_blocking=True))


def batch_size(inputs: Inputs) -> int:
    """How many inputs there are. Raises BadInput for none and where the tensors disagree."""
    sizes = {name: len(tensor) if tensor.ndim else 0 for name, tensor in tensors_by_name(inputs).items()}
    if len(set(sizes.values())) != 1 or not all(sizes.values()):
        shapes = ", ".join(_shown(name, tensor) for name, tensor in tensors_by_name(inputs).items()) or "no tensor"
        raise BadInput(f"inputs: got {shapes}; expected the same batch of 1 or more in front of every input")
    return next(iter(sizes.values()))


def refuse_dtypes(inputs: Inputs) -> None:
    """Raises BadInput for numbers of another precision than the model's: float32 and whole numbers are taken."""
    for name, tensor in tensors_by_name(inputs).items():
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype != torch.float32):
            raise BadInput(f"inputs: got {_shown(name, tensor)}; expected float32, whole numbers or booleans")


def concatenated(parts: Sequence[Inputs]) -> Inputs:
    """Parts of one form as one batch."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([tensors_by_name(part)["input"] for part in parts])
    return {name: torch.cat([tensors_by_name(part)[name] for part in parts]) for name in first}


def chunks(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """In parts of `size`; the last one may be smaller."""
    for start in range(0, batch_size(inputs), size):
        yield map_tensors(inputs, lambda tensor, start=start: tensor[start : start + size])  # type: ignore[misc]


def padded_to(inputs: Inputs, size: int) -> Inputs:
    """Made up to `size` with repeats of the last one."""
    repeats = size - batch_size(inputs)
    if not repeats:
        return inputs
    return map_tensors(inputs, lambda tensor: torch.cat([tensor, tensor[-1:].expand(repeats, *tensor.shape[1:])]))


def _shown(name: str, tensor: Tensor) -> str:
    return f"{name} {tensor.dtype} {list(tensor.shape)}"
