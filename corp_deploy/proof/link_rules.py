"""The rules by which the links of a parity chain are judged, at each output of the dense model."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from corp_deploy.families.counting import count_macs
from corp_deploy.families.family import output_ports
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import model_digest
from ground.feeds import Feeds, Outputs
from ground.ports import OutputPort
from ground.precision import FLOAT16, FLOAT32, FloatType
from perf.parity import tolerance
from perf.parity.link import Link, LinkKind, measure_link
from perf.parity.measures import Measures, largest_logit, measure_relative_errors
from perf.parity.tolerance import Choices, Tolerance
from perf.timing.watch import has_vnni

from .candidates import Candidate
from .heads import ProofHeads
from .limits import ParityLimits
from .own_noise import MergeNoise, measure_own_noise

AS_TYPED = "; rounded as typed by ONNX Runtime, float32 arithmetic between"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReference:
    """The outputs that a candidate is compared with, and the merge noise of its torch model if that merges tokens."""

    label: str
    answers: Outputs
    merges: MergeNoise | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRules:
    """The rules of the links at one output.

    `noises` are the dense model's own errors in the candidates' types and in float16; the latter decides which classes
    are too close for a change to count. `products` is the length of the longest chain of matrix products, and
    `magnified` the factor by which a head magnifies relative errors. `several` is true if there are other outputs.
    """

    port: OutputPort
    several: bool
    limits: ParityLimits
    noises: Mapping[FloatType, Measures]
    products: int
    largest_logit: float
    magnified: float = 1.0
    threshold: float | None = None

    def rounding(self, float_type: FloatType) -> Tolerance:
        """Return the tolerance of two computations of one model, of which one is in this type."""
        if self.port.name in self.limits.exclude_output:
            return tolerance.EXCLUDED
        if float_type is not FLOAT32:
            return tolerance.half_tolerance(
                self.noises[float_type], float_type=float_type, factor=self.limits.factor(float_type)
            )
        return tolerance.exact_tolerance(
            products=self.products, largest_logit=self.largest_logit, magnified=self.magnified
        )

    def of_user(self) -> Tolerance:
        """Return the user's limits on the reduced model."""
        return self.limits.of_port(self.port, self.noises[FLOAT16])

    def link(
        self, candidate: Candidate, name: str, kind: LinkKind, before: LinkReference, by_batch: Mapping[int, Outputs]
    ) -> Link:
        own, merges, float_type = self.port.name, before.merges, candidate.float_type
        bounds, choices = self.of_user() if kind in ("reduced", "whole") else self.rounding(float_type), None
        is_narrow = kind in ("half", "quantised")
        if bounds.excluded:
            pass
        elif merges is not None and is_narrow:
            # Rounding alone changes which tokens are merged, so the bound is this model's own error in the type.
            noise, factor = merges.noise[float_type][own], self.limits.factor(float_type)
            bounds = tolerance.half_tolerance(noise, float_type=float_type, factor=factor, whose="the merged model")
        elif merges is not None and kind == "exact":
            choices = Choices(margins_N=merges.margins_N, limit=self.limits.max_apart)
        if is_narrow and candidate.emulated and not bounds.excluded:
            bounds = replace(bounds, rule=f"{bounds.rule}{AS_TYPED}")
        judged = measure_link(
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
        if merges is None or not is_narrow or bounds.excluded:
            return judged
        # The reason also counts the inputs on which it errs more than the type does without merging.
        answers, plain = by_batch[judged.batch][own], self.rounding(float_type).max_relative_error or 0.0
        off_N = measure_relative_errors(before.answers[own][: len(answers)], answers, role=self.port.role)
        count = int((off_N > plain).sum())
        more = (
            f"{count} of {len(off_N)} {judged.measures.inputs} ({count / len(off_N):.1%}) err more than {plain:.2g}, "
            f"the error of {float_type.label} in the dense model: other tokens are merged there"
        )
        return replace(judged, reason=f"{judged.reason}; {more}")


def build_link_rules(
    dense: Checkpoint,
    feeds: Feeds,
    answers: Outputs,
    batch: int,
    limits: ParityLimits,
    heads: ProofHeads,
    halves: Collection[FloatType],
) -> list[LinkRules]:
    """Build the rules of each output and each map of heads; `halves` are candidates' types of fewer bits."""
    ports = output_ports(dense.model)
    noises = {
        each: measure_own_noise(dense, each, feeds, answers, batch, heads) for each in dict.fromkeys((FLOAT16, *halves))
    }
    noise, products = noises[FLOAT16], count_macs(dense.model).chain

    def rules(port: OutputPort, **own: Any) -> LinkRules:
        of_port = {float_type: every[port.name] for float_type, every in noises.items()}
        several = len(ports) + len(heads.ports) > 1
        return LinkRules(port=port, several=several, limits=limits, noises=of_port, **own)

    own = [
        rules(
            port,
            products=products,
            largest_logit=largest_logit(answers[port.name], port.role),
            threshold=limits.threshold_of(port, answers[port.name]),
        )
        for port in ports
    ]
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
    """Return the factor by which a head magnifies the dense model's relative errors in FP16, at least 1."""
    least = min(noise.relative_error for noise in noises)
    ratio = map_noise.relative_error / least if least > 0 else 1.0
    return max(1.0, ratio) if math.isfinite(ratio) else 1.0


def with_reasons(
    links: Sequence[Link], candidate: Candidate, as_typed: Callable[[], Sequence[Link]]
) -> tuple[Link, ...]:
    """Add to a failing link that this CPU's INT8 kernels are the cause, if the graph passes without them.

    `as_typed` makes the same links without ONNX Runtime's INT8 kernels. The verdict stays FAIL, as it holds on this
    CPU.
    """
    if not candidate.computes_int8 or all(link.status != "FAIL" for link in links):
        return tuple(links)
    return tuple(
        replace(link, reason=f"{link.reason}; {_cause(other, candidate)}")
        if link.status == "FAIL" and other.status == "PASS"
        else link
        for link, other in zip(links, as_typed(), strict=True)
    )


def with_origin(links: Sequence[Link], candidate: Candidate, model: nn.Module) -> tuple[Link, ...]:
    """Add to a failing link that the graph was exported from another model, if its recorded digest says so."""
    own = candidate.model_sha256
    if own is None or all(link.status != "FAIL" for link in links) or own == (expected := model_digest(model)):
        return tuple(links)
    origin = (
        f"the graph is of another model (sha256 {own[:16]}, expected {expected[:16]} of the model before it): "
        "export it again, or name its own model before it"
    )
    return tuple(replace(link, reason=f"{origin}; {link.reason}") if link.status == "FAIL" else link for link in links)


def _cause(as_typed: Link, candidate: Candidate) -> str:
    vnni, errs = has_vnni(), f"as typed its error is {as_typed.measures.relative_error:.2g}: this CPU's INT8 kernels"
    if candidate.weight_bits < 8 or vnni:
        return f"{errs} compute something else, serve it on another CPU"
    does, where = ("saturate (no VNNI)", "a CPU with VNNI") if vnni is False else ("differ", "another CPU")
    return f"{errs} {does}, serve it on {where}, or export with --weight-bits 7"
