"""What the links of a parity chain are judged by, at each output of the dense model."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from corp_deploy.families.family import family_of, output_ports
from corp_deploy.families.model_cost import counted
from corp_deploy.store.checkpoint import Checkpoint
from export.graph.precision import typed_copy
from ground.feeds import Feeds, Outputs
from ground.ports import OutputPort
from perf.parity import tolerance
from perf.parity.measures import Measures, largest_logit, measures
from perf.parity.parity import Link, LinkKind, link
from perf.parity.tolerance import Tolerance
from perf.runners.module import tensors_of_ports

from .candidates import Candidate, outputs_at
from .inputs import ProofInputs

DENSE = "dense torch fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityLimits:
    """What the user allows the reduced model to differ from the dense one by; None sets no limit."""

    min_agreement: float | None = None
    max_error: float | None = None
    half_factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a candidate is held against: its label in the record and its answers to all inputs."""

    label: str
    answers: Outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRules:
    """Everything the links at one output are judged by."""

    port: OutputPort
    several: bool
    limits: ParityLimits
    noise: Measures
    products: int
    largest_logit: float

    def rounding(self, fp16: bool) -> Tolerance:
        """How far two computations of one model may lie apart in this precision."""
        if fp16:
            return tolerance.fp16(self.noise, factor=self.limits.half_factor)
        return tolerance.exact(products=self.products, largest_logit=self.largest_logit)

    def of_user(self) -> Tolerance:
        """What the reduced model may differ from the dense one by."""
        limits = self.limits
        return tolerance.limits(min_agreement=limits.min_agreement, max_error=limits.max_error, noise=self.noise)

    def link(
        self, candidate: Candidate, name: str, kind: LinkKind, before: Reference, by_batch: Mapping[int, Outputs]
    ) -> Link:
        """The link from what stands before to a candidate."""
        own = self.port.name
        return link(
            name=name,
            kind=kind,
            reference=before.label,
            candidate=candidate.label,
            reference_rows=before.answers[own],
            candidate_by_batch={batch: answers[own] for batch, answers in by_batch.items()},
            tolerance=self.of_user() if kind in ("reduced", "whole") else self.rounding(candidate.fp16),
            port=self.port,
            several=self.several,
        )


def _fp16_noise(dense: Checkpoint, feeds: Feeds, reference: Outputs, batch: int) -> dict[str, Measures]:
    """The dense model's own FP16-against-FP32 error on these inputs, with the same safe LayerNorm and softmax."""
    fp16, ports = typed_copy(family_of(dense.model).exportable(dense.model), "fp16"), output_ports(dense.model)

    def run(part: Feeds) -> Outputs:
        with torch.inference_mode():
            answer = fp16(*(torch.from_numpy(array) for array in part.values()))
        tensors = tensors_of_ports(answer, ports, where=DENSE)
        return {port.name: tensor.numpy() for port, tensor in zip(ports, tensors, strict=True)}

    answers = outputs_at(run, feeds, batch)
    return {port.name: measures(reference[port.name], answers[port.name], role=port.role) for port in ports}


def link_rules(
    dense: Checkpoint, proof_inputs: ProofInputs, answers: Outputs, batch: int, limits: ParityLimits
) -> list[LinkRules]:
    """Those of each output of the dense model."""
    ports = output_ports(dense.model)
    noise = _fp16_noise(dense, proof_inputs.feeds, answers, batch)
    products = counted(dense.model).chain
    return [
        LinkRules(
            port=port,
            several=len(ports) > 1,
            limits=limits,
            noise=noise[port.name],
            products=products,
            largest_logit=largest_logit(answers[port.name], port.role),
        )
        for port in ports
    ]
