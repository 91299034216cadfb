"""What the links of a parity chain are judged by, at each output of the dense model."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import counted
from corp_deploy.families.family import output_ports
from corp_deploy.families.merge_margins import merge_margins
from corp_deploy.families.norm_types import NORMS
from corp_deploy.invocation.proof import ProofOptions
from corp_deploy.store.checkpoint import Checkpoint
from export.graph.precision import typed_copy
from export.graph.quantised import simulated
from ground.feeds import Feeds, Outputs, batch_size, rows_of
from ground.ports import OutputPort
from ground.precision import FLOAT16, FLOAT32, QUANTISED, FloatType, mixed_with_float32
from perf.parity import tolerance
from perf.parity.maps import THRESHOLD
from perf.parity.measures import Measures, largest_logit, measures, relative_errors
from perf.parity.parity import ImageSet, Link, LinkKind, link
from perf.parity.tolerance import Choices, Tolerance
from perf.runners.module import tensors_of_ports

from .candidates import Candidate, outputs_at
from .half_products import HalfProducts
from .heads import Heads
from .reach import reaches, unreachable

DENSE = "dense torch fp32"
AS_TYPED = "; rounded as typed by ONNX Runtime, float32 arithmetic between"


@dataclass(frozen=True, kw_only=True)
class ParityLimits(ProofOptions):
    """What the user allows the reduced model to differ from the dense one by; None sets no limit.

    `max_apart`: the largest share of inputs on which two runtimes may merge other tokens, by rounding alone. The three
    behind it are of maps that heads apart make, which the first two are not of. `confidence`: of the interval with
    which shares of inputs have to keep to their limits, 0 where the point alone decides. `elsewhere`: on what
    those are judged that these inputs leave open. Raises BadInput for what is no limit.
    """

    elsewhere: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.of_outputs(), self.of_maps()

    def of_outputs(self, noise: Measures | None = None) -> Tolerance:
        """What they are for a model's own outputs."""
        return self._of(noise, min_agreement=self.min_agreement, max_error=self.max_error)

    def of_maps(self, noise: Measures | None = None) -> Tolerance:
        """What they are for the maps of heads apart."""
        return self._of(noise, min_agreement=self.min_pixels, max_error=self.max_map_error, min_iou=self.min_iou)

    def _of(self, noise: Measures | None, **least: float | None) -> Tolerance:
        return tolerance.limits(**least, confidence=self.confidence, noise=noise, elsewhere=self.elsewhere)

    def unreachable(self, images: ImageSet) -> list[str]:
        """The limits that so many inputs can never show to be kept, a sentence each."""
        shares = {name.replace("_", " "): least for name, least in self.shares.items()}
        return unreachable(shares, count=images.count, noun=images.noun, confidence=self.confidence)

    def of_few(self, count: int, *, elsewhere: str) -> "ParityLimits":
        """For so few inputs that they can only fail a share: what they leave open is judged `elsewhere`."""
        few = any(not reaches(least, count, self.confidence) for least in self.shares.values())
        return replace(self, elsewhere=elsewhere) if few else self

    def factor(self, float_type: FloatType) -> float:
        """How many times the dense model's own error in this type a link may err."""
        return self.quantised_factor if float_type in QUANTISED.values() else self.half_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Merges:
    """How near each input [N] is to merging other tokens, and the model's own error in 16 bits by type and output."""

    margins_N: NDArray[np.float64]
    noise: Mapping[FloatType, Mapping[str, Measures]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a candidate is held against; `merges` where the torch model that it computes merges tokens."""

    label: str
    answers: Outputs
    merges: Merges | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRules:
    """Everything the links at one output are judged by. `noises`: the dense model's own error in float16, which tells
    ties from flips, and in every other type that candidates are held in.
    """

    port: OutputPort
    several: bool
    limits: ParityLimits
    noises: Mapping[FloatType, Measures]
    products: int
    largest_logit: float
    magnified: float = 1.0
    threshold: float = THRESHOLD

    def rounding(self, float_type: FloatType) -> Tolerance:
        """How far two computations of one model may lie apart where one is held in this type."""
        if float_type is not FLOAT32:
            return tolerance.half(self.noises[float_type], float_type=float_type, factor=self.limits.factor(float_type))
        return tolerance.exact(products=self.products, largest_logit=self.largest_logit, magnified=self.magnified)

    def of_user(self) -> Tolerance:
        """What the reduced model may differ from the dense one by."""
        of_role = self.limits.of_maps if self.port.role == "score map" else self.limits.of_outputs
        return of_role(self.noises[FLOAT16])

    def link(
        self, candidate: Candidate, name: str, kind: LinkKind, before: Reference, by_batch: Mapping[int, Outputs]
    ) -> Link:
        """The link from what stands before to a candidate."""
        own, merges, float_type = self.port.name, before.merges, candidate.float_type
        bounds, choices = self.of_user() if kind in ("reduced", "whole") else self.rounding(float_type), None
        is_narrow = kind in ("half", "quantised")
        if merges is not None and is_narrow:
            # Half precision alone has other tokens merged: its yardstick is what it does to this very model.
            noise, factor = merges.noise[float_type][own], self.limits.factor(float_type)
            bounds = tolerance.half(noise, float_type=float_type, factor=factor, whose="the merged model")
        elif merges is not None and kind == "exact":
            choices = Choices(margins_N=merges.margins_N, limit=self.limits.max_apart)
        if is_narrow and candidate.emulated:
            bounds = replace(bounds, rule=f"{bounds.rule}{AS_TYPED}")
        judged = link(
            name=name,
            kind=kind,
            reference=before.label,
            candidate=candidate.label,
            reference_rows=before.answers[own],
            candidate_by_batch={batch: answers[own] for batch, answers in by_batch.items()},
            tolerance=bounds,
            choices=choices,
            port=self.port,
            several=self.several,
            threshold=self.threshold,
        )
        if merges is None or not is_narrow:
            return judged
        # And on how many inputs it errs more than this type does where nothing is merged.
        answers, plain = by_batch[judged.batch][own], self.rounding(float_type).max_relative_error or 0.0
        off_N = relative_errors(before.answers[own][: len(answers)], answers, role=self.port.role)
        count = int((off_N > plain).sum())
        more = (
            f"{count} of {len(off_N)} {judged.measures.inputs} ({count / len(off_N):.1%}) err more than {plain:.2g}, "
            f"what {float_type.label} does to the dense model: other tokens are merged there"
        )
        return replace(judged, reason=f"{judged.reason}; {more}")


def merges_of(
    checkpoint: Checkpoint, feeds: Feeds, answers: Outputs, batch: int, *, halves: Collection[FloatType], heads: Heads
) -> Merges | None:
    """How near inputs are to other merges, and the own error in types of steps to come; None where none merge."""
    if traced_model.merging_of(checkpoint.model) is None:
        return None
    margins = []
    for start in range(0, batch_size(feeds), batch):
        tensors = {name: torch.from_numpy(array) for name, array in rows_of(feeds, slice(start, start + batch)).items()}
        inputs = next(iter(tensors.values())) if len(tensors) == 1 else tensors
        least_B = merge_margins(checkpoint.model, inputs)
        assert least_B is not None, start
        margins.append(least_B.double().numpy())
    noise = {float_type: _own_noise(checkpoint, float_type, feeds, answers, batch, heads) for float_type in halves}
    return Merges(margins_N=np.concatenate(margins), noise=noise)


def _own_noise(
    dense: Checkpoint, float_type: FloatType, feeds: Feeds, reference: Outputs, batch: int, heads: Heads
) -> dict[str, Measures]:
    """A torch model's own error in a type against FP32 on these inputs, with the same safe norms and softmax; in INT8
    and FP8 where it is rounded plainly. Of maps what heads in FP32 make of it.
    """
    exportable, ports = traced_model.exportable(dense.model), output_ports(dense.model)
    half = _rounding(exportable, float_type, feeds, batch)

    def run(part: Feeds) -> Outputs:
        with torch.no_grad(), HalfProducts():  # type: ignore[no-untyped-call]
            answer = half(*(torch.from_numpy(array) for array in part.values()))
        tensors = tensors_of_ports(answer, ports, where=DENSE)
        return {port.name: tensor.numpy() for port, tensor in zip(ports, tensors, strict=True)}

    answers = outputs_at(heads.behind(run, batch), feeds, batch)
    every = *ports, *heads.ports
    return {port.name: measures(reference[port.name], answers[port.name], role=port.role) for port in every}


def _rounding(exportable: nn.Module, float_type: FloatType, feeds: Feeds, batch: int) -> nn.Module:
    """A copy that is held in this type."""
    word = next((word for word, each in QUANTISED.items() if each is float_type), None)
    if word is None:
        return typed_copy(exportable, mixed_with_float32(float_type).pure, norms=NORMS)

    def run(model: nn.Module) -> None:
        for start in range(0, batch_size(feeds), batch):
            model(*(torch.from_numpy(array) for array in rows_of(feeds, slice(start, start + batch)).values()))

    return simulated(exportable, word, run)


def link_rules(
    dense: Checkpoint,
    feeds: Feeds,
    answers: Outputs,
    batch: int,
    limits: ParityLimits,
    heads: Heads,
    halves: Collection[FloatType],
) -> list[LinkRules]:
    """Of each output of the dense model and each map of its heads; `halves`: types that candidates are held in."""
    ports = output_ports(dense.model)
    types = dict.fromkeys((FLOAT16, *halves))
    noises = {each: _own_noise(dense, each, feeds, answers, batch, heads) for each in types}
    noise, products = noises[FLOAT16], counted(dense.model).chain

    def rules(port: OutputPort, **own: Any) -> LinkRules:
        of_port = {float_type: every[port.name] for float_type, every in noises.items()}
        several = len(ports) + len(heads.ports) > 1
        return LinkRules(port=port, several=several, limits=limits, noises=of_port, **own)

    own = [rules(port, products=products, largest_logit=largest_logit(answers[port.name], port.role)) for port in ports]
    of_maps = [
        rules(
            port,
            products=products + heads.head_of(port.name).products,
            largest_logit=0.0,
            magnified=_magnified(noise[port.name], [noise[name] for name in heads.head_of(port.name).reads]),
            threshold=heads.threshold,
        )
        for port in heads.ports
    ]
    return [*own, *of_maps]


def _magnified(map_noise: Measures, noises: Sequence[Measures]) -> float:
    """How many times larger a head makes relative errors, by the dense ones in FP16; 1 at least."""
    least = min(noise.relative_error for noise in noises)
    ratio = map_noise.relative_error / least if least > 0 else 1.0
    return max(1.0, ratio) if math.isfinite(ratio) else 1.0
