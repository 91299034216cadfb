"""Own noise: a torch model's error in types of fewer bits, and its margins between the tokens that it merges."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from corp_deploy.families import traced_model
from corp_deploy.families.counting import PRODUCTS
from corp_deploy.families.family import output_ports
from corp_deploy.families.inspection import merge_margins
from corp_deploy.families.timm_library import NORMS
from corp_deploy.store.checkpoint import Checkpoint
from export.graph.precision import typed_copy
from export.graph.quantised import simulate_quantisation
from ground.feeds import Feeds, Outputs, iter_batches
from ground.precision import QUANTISED, FloatType, mixed_with_float32
from perf.parity.measures import Measures, measure_outputs
from perf.runners.module import tensors_of_ports

from .candidates import run_in_batches
from .heads import ProofHeads


class HalfProducts(TorchDispatchMode):
    """A dispatch mode in which the CPU computes products of float16 in float32 and rounds once, as tensor cores do.

    Only the order of sums differs. Use it in `torch.no_grad`: inference mode dispatches other operators.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = args, kwargs or {}
        is_half = func.overloadpacket in PRODUCTS and args[0].dtype == torch.float16
        if not is_half or args[0].device.type != "cpu":
            return func(*args, **arguments[1])
        wide, named = tree_map_only(Tensor, Tensor.float, arguments)
        return func(*wide, **named).half()


DENSE = "dense torch fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeNoise:
    """Each input's smallest margin [N] between merged and other tokens, and the model's errors by type and output."""

    margins_N: NDArray[np.float64]
    noise: Mapping[FloatType, Mapping[str, Measures]]


def measure_merge_noise(
    checkpoint: Checkpoint,
    feeds: Feeds,
    answers: Outputs,
    batch: int,
    *,
    halves: Collection[FloatType],
    heads: ProofHeads,
) -> MergeNoise | None:
    """Return the margins and own errors of a model that merges tokens, or None for another model."""
    if traced_model.merging_of(checkpoint.model) is None:
        return None
    margins = []
    for part in iter_batches(feeds, batch):
        tensors = {name: torch.from_numpy(array) for name, array in part.items()}
        inputs = next(iter(tensors.values())) if len(tensors) == 1 else tensors
        least_B = merge_margins(checkpoint.model, inputs)
        assert least_B is not None, checkpoint.architecture
        margins.append(least_B.double().numpy())
    noise = {
        float_type: measure_own_noise(checkpoint, float_type, feeds, answers, batch, heads) for float_type in halves
    }
    return MergeNoise(margins_N=np.concatenate(margins), noise=noise)


def measure_own_noise(
    dense: Checkpoint, float_type: FloatType, feeds: Feeds, reference: Outputs, batch: int, heads: ProofHeads
) -> dict[str, Measures]:
    """Return a torch model's own error in a type against FP32, by output, on these inputs.

    Norms and softmax keep the precision that they have in exported graphs; INT8 and FP8 are simulated by rounding.
    Heads compute their maps in FP32.
    """
    exportable, ports = traced_model.exportable(dense.model), output_ports(dense.model)
    half = _rounding(exportable, float_type, feeds, batch)

    def run(part: Feeds) -> Outputs:
        with torch.no_grad(), HalfProducts():  # type: ignore[no-untyped-call]
            answer = half(*(torch.from_numpy(array) for array in part.values()))
        tensors = tensors_of_ports(answer, ports, where=DENSE)
        return {port.name: tensor.numpy() for port, tensor in zip(ports, tensors, strict=True)}

    answers = run_in_batches(heads.behind(run, batch), feeds, batch)
    every = *ports, *heads.ports
    return {port.name: measure_outputs(reference[port.name], answers[port.name], role=port.role) for port in every}


def quantised_word(float_type: FloatType) -> str | None:
    return next((word for word, each in QUANTISED.items() if each is float_type), None)


def _rounding(exportable: nn.Module, float_type: FloatType, feeds: Feeds, batch: int) -> nn.Module:
    word = quantised_word(float_type)
    if word is None:
        return typed_copy(exportable, mixed_with_float32(float_type).pure, norms=NORMS)

    def run(model: nn.Module) -> None:
        for part in iter_batches(feeds, batch):
            model(*map(torch.from_numpy, part.values()))

    return simulate_quantisation(exportable, word, run)
