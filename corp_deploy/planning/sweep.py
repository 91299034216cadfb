"""Many sparsities from the same moments: what each costs, how far it is from the dense model, and the best of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from calib.input_set import InputSet
from calib.inputs import Inputs, as_tuple, joined, pieces, run_model
from calib.moments import Moments
from corp_deploy.families.family import output_ports
from corp_deploy.families.model_cost import macs, parameters
from corp_deploy.reduction.kind import Order
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import Reduction, reduce
from ground.errors import BadInput
from ground.ports import OutputPort
from perf.parity.measures import measures

from .budget import allocate
from .curves import CostCurve, cost_curves, eliminations
from .probe import Probe

Answer = NDArray[np.float32]
KIND = "corp-deploy/sweep"
PROBE_IMAGES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputScore:
    """How far one of several outputs is from the dense one."""

    name: str
    relative_error: float
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One reduced model of a sweep: `macs_share` of the dense MACs stay; errors are against the dense
    outputs. No agreement: too few inputs for embeddings to have neighbours.

    `sites_reduced` became smaller; `sites_refused` were asked to and can't. Of several outputs error and agreement are
    those of the worst, and `outputs` has each.
    """

    preset: str
    mlp_sparsity: float
    attention_sparsity: float
    conv_sparsity: float
    geometry: str
    budget: float | None
    macs: int
    macs_share: float
    parameters: int
    relative_error: float
    agreement: float | None
    accuracy: float | None
    sites_reduced: int
    sites_refused: int
    on_front: bool = False
    outputs: tuple[OutputScore, ...] = ()

    @property
    def by_output(self) -> str:
        """The error of each output, where there are several."""
        return ", ".join(f"{each.name} {each.relative_error:.4f}" for each in self.outputs)

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        if not self.outputs:
            del fields["outputs"]
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """One model to try: a preset at uniform sparsities, or at a share of the dense MACs to keep."""

    preset: str
    method: Method
    budget: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Inputs with each of the dense model's outputs [N, ...] for them, and labels where there are any."""

    inputs: Inputs
    ports: tuple[OutputPort, ...]
    dense: tuple[Answer, ...]
    labels_N: NDArray[np.int64] | None
    batch_size: int

    def _scores(self, answers: Sequence[Answer]) -> tuple[OutputScore, ...]:
        errors = [
            measures(dense, answer, role=port.role)
            for port, dense, answer in zip(self.ports, self.dense, answers, strict=True)
        ]
        return tuple(
            OutputScore(name=port.name, relative_error=each.relative_error, agreement=each.agreement)
            for port, each in zip(self.ports, errors, strict=True)
        )

    def agreement(self, answers: Sequence[Answer]) -> float | None:
        """The least over the outputs; None for too few inputs."""
        shares = [score.agreement for score in self._scores(answers) if score.agreement is not None]
        return min(shares, default=None)

    def _accuracy(self, answers: Sequence[Answer]) -> float | None:
        """Of the first logits."""
        if self.labels_N is None:
            return None
        own = next((place for place, port in enumerate(self.ports) if port.role == "logits"), 0)
        return float((answers[own].argmax(1) == self.labels_N).mean())

    def trial(self, request: SweepRequest, reduction: Reduction, dense_macs: int) -> SweepPoint:
        """Score one reduced model."""
        model = reduction.model
        method = request.method
        answers = outputs(model, self.inputs, self.batch_size)
        scores, cost = self._scores(answers), macs(model)
        agreements = [score.agreement for score in scores if score.agreement is not None]
        return SweepPoint(
            preset=request.preset,
            budget=request.budget,
            mlp_sparsity=method.mlp_sparsity or 0.0,
            attention_sparsity=method.attention_sparsity or 0.0,
            conv_sparsity=method.conv_sparsity or 0.0,
            geometry=method.geometry,
            macs=cost,
            macs_share=cost / dense_macs,
            parameters=parameters(model),
            relative_error=max(score.relative_error for score in scores),
            agreement=min(agreements, default=None),
            accuracy=self._accuracy(answers),
            sites_reduced=len(reduction.coverage.reduced),
            sites_refused=len(reduction.coverage.refused),
            outputs=scores if len(scores) > 1 else (),
        )


def outputs(model: nn.Module, inputs: Inputs, batch_size: int) -> tuple[Answer, ...]:
    """Each output [N, ...] of all inputs."""
    with torch.inference_mode():
        rows = [[output.numpy() for output in as_tuple(run_model(model, part))] for part in pieces(inputs, batch_size)]
    return tuple(np.concatenate(parts) for parts in zip(*rows, strict=True))


def scored_inputs(model: nn.Module, source: InputSet, labels_N: NDArray[np.int64] | None, batch_size: int) -> Scored:
    """All of the inputs with the dense model's outputs for them."""
    inputs = joined(list(source.batches(batch_size)))
    dense = outputs(model, inputs, batch_size)
    return Scored(inputs=inputs, ports=output_ports(model), dense=dense, labels_N=labels_N, batch_size=batch_size)


def _front(trials: Sequence[SweepPoint]) -> set[int]:
    """Positions of the trials that no other one beats in MACs and error at once."""
    order = sorted(range(len(trials)), key=lambda n: (trials[n].macs, trials[n].relative_error))
    front: set[int] = set()
    best = float("inf")
    for position in order:
        if trials[position].relative_error < best:
            best = trials[position].relative_error
            front.add(position)
    return front


def sweep(
    model: nn.Module,
    moments: Moments,
    requests: Iterable[SweepRequest],
    scored: Scored,
    *,
    calibration: InputSet | None = None,
    done: Callable[[int], None] | None = None,
) -> list[SweepPoint]:
    """Reduce and score every choice with the costly work shared: one elimination per MLP serves every width, one set
    of probes every budget of a geometry. `calibration`: the images that presets which merge channels are fitted to.
    Raises BadInput for moments of another model and budgets out of reach.
    """
    known: dict[float, dict[str, Order]] = {}
    curves: dict[str, list[CostCurve]] = {}
    dense_macs = macs(model)
    trials: list[SweepPoint] = []
    for request in requests:
        method = request.method
        if method.mlp_selection == "obs" and method.ridge_rel not in known:
            known[method.ridge_rel] = eliminations(model, moments, method)
        shared = known.get(method.ridge_rel, {})
        widths = None
        if request.budget is not None:
            if method.geometry not in curves:
                few = next(pieces(scored.inputs, PROBE_IMAGES))
                probe = Probe(model=model, moments=moments, method=method, inputs=few, eliminations=shared)
                curves[method.geometry] = cost_curves(probe, "macs")
            widths = allocate(curves[method.geometry], dense_macs, request.budget).widths
        reduction = reduce(model, moments, method, widths=widths, eliminations=shared, images=calibration)
        trials.append(scored.trial(request, reduction, dense_macs))
        if done is not None:
            done(len(trials))
    front = _front(trials)
    return [_marked(trial, position in front) for position, trial in enumerate(trials)]


def _marked(trial: SweepPoint, on_front: bool) -> SweepPoint:
    return replace(trial, on_front=on_front)


def smallest_that_agrees(trials: Sequence[SweepPoint], least: float) -> SweepPoint:
    """The trial of least MACs whose top-1 agreement is at least `least`. Raises BadInput when there is none."""
    shares = {place: trial.agreement for place, trial in enumerate(trials) if trial.agreement is not None}
    if not shares:
        raise BadInput(
            "--min-agreement: too few inputs for embeddings to have neighbours, so none can agree; give more"
        )
    agreeing = [trials[place] for place, share in shares.items() if share >= least]
    if not agreeing:
        best = trials[max(shares, key=shares.__getitem__)]
        raise BadInput(
            f"no trial agrees on {least:.2%} of the images, the best reaches {max(shares.values()):.2%} "
            f"({best.preset}, {best.macs_share:.2f} of the MACs); sweep lower sparsities or lower --min-agreement"
        )
    return min(agreeing, key=lambda trial: (trial.macs, trial.relative_error))


ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2)


def smallest_by_error(trials: Sequence[SweepPoint]) -> dict[float, SweepPoint]:
    """For round errors the trial of least MACs that errs no more; of errors with the same trial the least alone."""
    smallest: dict[float, SweepPoint] = {}
    for error in ERRORS:
        holding = [trial for trial in trials if trial.relative_error <= error]
        best = min(holding, key=lambda trial: (trial.macs, trial.relative_error), default=None)
        if best is not None and best not in smallest.values():
            smallest[error] = best
    return smallest


def sentence_of_sweep(trials: Sequence[SweepPoint]) -> str:
    """What of the MACs which error takes, by the trials themselves: nothing is read in between them."""
    smallest = smallest_by_error(trials)
    if not smallest:
        least = min(trials, key=lambda trial: trial.relative_error)
        by_output = f" ({least.by_output})" if least.outputs else ""
        return (
            f"no model tried errs {ERRORS[-1]:.0%} or less; the least is {least.relative_error:.1%}{by_output} at "
            f"{least.macs_share:.2f} of the MACs"
        )
    by_error = ", ".join(
        f"{trial.macs_share:.2f} at {error:.0%}{f' ({trial.by_output})' if trial.outputs else ''}"
        for error, trial in smallest.items()
    )
    of_worst = " of the worst output" if trials[0].outputs else ""
    return (
        f"share of the MACs that an error{of_worst} takes, the smallest model tried for each: {by_error}; the edge "
        "between two is found by reduce --within 'error 0.05'"
    )


def record_of_sweep(trials: Sequence[SweepPoint], answer: SweepPoint | None) -> dict[str, Any]:
    """The sweep as JSON values."""
    return {
        "kind": KIND,
        "version": 1,
        "trials": [trial.as_json() for trial in trials],
        "smallest_that_agrees": None if answer is None else answer.as_json(),
        "smallest_by_error": [
            {"error": error, "macs_share": trial.macs_share, "relative_error": trial.relative_error}
            for error, trial in smallest_by_error(trials).items()
        ],
    }
