"""Judging inputs, and comparisons of reduced models with the dense one on them. N is the number of inputs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from calib.inputs import Inputs, InputSet, as_tuple, chunks, concatenated, run_model, to_device
from calib.moments import Moments
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.family import output_ports
from corp_deploy.invocation.budget_choice import BudgetChoice, Measure
from corp_deploy.invocation.values import InMemory
from corp_deploy.store.input_sets import inputs_for_model
from corp_deploy.store.labels import labels_for
from corp_deploy.traced.models.module import device_of
from ground.errors import BadInput
from ground.ports import OutputPort, Role
from perf.parity.labels import predicted_classes
from perf.parity.measures import MEASURES, measure_outputs, require_agreement

from .sweep_points import DensePoint, OutputScore

Answer = NDArray[np.float32]


def compute_outputs(model: nn.Module, batches: Iterable[Inputs]) -> tuple[Answer, ...]:
    """Run a model over batches and return each output [N, ...] of all inputs, as float32."""
    where = device_of(model)
    with torch.inference_mode():
        rows = [
            [output.float().cpu().numpy() for output in as_tuple(run_model(model, to_device(batch, where)))]
            for batch in batches
        ]
    return tuple(np.concatenate(parts) for parts in zip(*rows, strict=True))


def top_k_accuracy(logits_NC: Answer, labels_N: NDArray[np.int64], k: int) -> float:
    """Return the share of the inputs whose label is among the k largest logits.

    It is 1 if there are no more than k classes. A single logit tells two classes apart by its sign.
    """
    if k == 1:
        return float((predicted_classes(logits_NC) == labels_N).mean())
    if logits_NC.shape[1] == 1:
        return 1.0
    best_NK = np.argsort(-logits_NC, axis=1, kind="stable")[:, :k]
    return float((best_NK == labels_N[:, None]).any(1).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredInputs:
    """Inputs with the dense model's outputs [N, ...] and the labels, if there are any."""

    inputs: Inputs
    ports: tuple[OutputPort, ...]
    dense: tuple[Answer, ...]
    labels_N: NDArray[np.int64] | None
    batch_size: int

    def answers(self, model: nn.Module) -> tuple[Answer, ...]:
        """Return each output [N, ...] of another model for these inputs."""
        return compute_outputs(model, chunks(self.inputs, self.batch_size))

    def scores(self, answers: Sequence[Answer]) -> tuple[OutputScore, ...]:
        """Return the error and agreement of each of a model's outputs against the dense model's."""
        scores = []
        for port, dense, answer in zip(self.ports, self.dense, answers, strict=True):
            found = measure_outputs(dense, answer, role=port.role)
            scores.append(OutputScore(name=port.name, relative_error=found.relative_error, agreement=found.agreement))
        return tuple(scores)

    def accuracies(self, answers: Sequence[Answer]) -> tuple[float, float] | tuple[None, None]:
        """Return top-1 and top-5 accuracy of the first logits, or of the first output; None for both without labels."""
        if self.labels_N is None:
            return None, None
        own = next((place for place, port in enumerate(self.ports) if port.role == "logits"), 0)
        return top_k_accuracy(answers[own], self.labels_N, 1), top_k_accuracy(answers[own], self.labels_N, 5)

    def of_dense(self, model: nn.Module) -> DensePoint:
        accuracy, top5 = self.accuracies(self.dense)
        return DensePoint(
            macs=macs(model), parameters=parameters(model), inputs=len(self.dense[0]), accuracy=accuracy, top5=top5
        )


def worst_agreement(scores: Sequence[OutputScore]) -> float | None:
    """Return the smallest agreement of the outputs, or None if there are too few inputs for any."""
    return min((score.agreement for score in scores if score.agreement is not None), default=None)


def score_inputs(
    model: nn.Module, source: InputSet, labels_N: NDArray[np.int64] | None, batch_size: int
) -> ScoredInputs:
    """Return all inputs of a set with their labels and the outputs of `model`, the dense one."""
    inputs = concatenated(list(source.batches(batch_size)))
    dense = compute_outputs(model, chunks(inputs, batch_size))
    return ScoredInputs(inputs=inputs, ports=output_ports(model), dense=dense, labels_N=labels_N, batch_size=batch_size)


BATCH = 32
DRAWS, CONFIDENCE, SEED = 1000, 0.95, 0
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingInputs:
    """Inputs that no fit has seen, their class indices [N] if there are any, and their origin in words."""

    inputs: InputSet
    labels_N: NDArray[np.int64] | None
    origin: str

    def __str__(self) -> str:
        return f"{self.inputs.count} {self.inputs.noun} {self.origin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The value of one measure of a reduced model, with its 95 % interval over the inputs.

    If the model has several outputs, it is that of the worst, which `output` names, and `every` has one for each.
    """

    value: float
    low: float
    high: float
    output: str = ""
    every: tuple["Judgement", ...] = ()

    def as_json(self) -> dict[str, Any]:
        own = {"value": self.value, "low": self.low, "high": self.high}
        if not self.every:
            return own
        return own | {"output": self.output, "outputs": {each.output: each.as_json() for each in self.every}}


def _ids(moments: Moments) -> torch.Tensor:
    if not len(moments.image_ids):
        raise BadInput(
            "the moments don't record their images, so other images can't be told from them; calibrate again"
        )
    return moments.image_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeChoice:
    """The user's choice of judging inputs, or None for the inputs that calibration left out.

    `labels_N` are the class indices of `inputs` or, if that is None, of all inputs that `apart` gets.
    """

    inputs: InputSet | None = None
    labels_N: NDArray[np.int64] | None = None

    def apart(self, inputs: InputSet, moments: Moments) -> tuple[InputSet, JudgingInputs]:
        """Return the inputs that may be fitted to, and those that judge.

        Raises BadInput if there are none of either, an input is in both, or the moments don't record their images.
        """
        if self.inputs is None:
            return self._left_out(inputs, moments)
        common = int(torch.isin(self.inputs.ids, torch.cat([_ids(moments), inputs.ids])).sum())
        if common:
            raise BadInput(
                f"--judge: {common} of its {self.inputs.count} {inputs.noun} are calibration {inputs.noun} too, which "
                "can't judge; give others"
            )
        return inputs, JudgingInputs(inputs=self.inputs, labels_N=self.labels_N, origin="of --judge")

    def _left_out(self, inputs: InputSet, moments: Moments) -> tuple[InputSet, JudgingInputs]:
        is_fitted = torch.isin(inputs.ids, _ids(moments))
        fitted, others = ((is_fitted == is_held).nonzero().squeeze(1).tolist() for is_held in (True, False))
        if not fitted:
            raise BadInput(
                f"none of the {inputs.count} {inputs.noun} was used in the moments; give the images of calibrate, "
                "and others to judge on with --judge"
            )
        if not others:
            raise BadInput(
                f"the moments are of all {inputs.count} {inputs.noun}, so none is left to judge on: hold some out "
                "(calibrate --hold-out N), or give others with --judge"
            )
        labels_N = None if self.labels_N is None else self.labels_N[others]
        origin = "that the calibration left out"
        return inputs.subset(fitted), JudgingInputs(inputs=inputs.subset(others), labels_N=labels_N, origin=origin)


def judges_from_choice(model: nn.Module, images: InputSet | None, choice: BudgetChoice) -> JudgeChoice | None:
    """Open the inputs of --judge and the labels; return None without a limit (--within) or without `images`.

    `images` are those of the reduction, some of which calibration may have left out to judge.
    """
    if choice.within is None or images is None:
        return None
    others = None if choice.judge is None else inputs_for_model(model, Path(choice.judge))
    labelled = images if others is None else others
    labels = choice.labels.value if isinstance(choice.labels, InMemory) else choice.labels
    labels_N = None if labels is None else labels_for(labels, labelled, model)
    return JudgeChoice(inputs=others, labels_N=labels_N)


def _bootstrapped(count: int, value: float, statistic: Callable[[NDArray[np.int64]], float]) -> Judgement:
    """Return the value of a statistic with its bootstrap interval over `count` inputs."""
    drawn_DN = np.random.default_rng(SEED).integers(0, count, size=(DRAWS, count))
    values_D = [statistic(drawn_N) for drawn_N in drawn_DN]
    low, high = np.quantile(values_D, [(1.0 - CONFIDENCE) / 2.0, (1.0 + CONFIDENCE) / 2.0])
    return Judgement(value=value, low=min(float(low), value), high=max(float(high), value))


class Judge:
    """A judge of reduced models: compares their outputs with the dense model's on the judging inputs, by one measure.

    Raises BadInput if the measure is not defined for the model's outputs, or has no labels.
    """

    def __init__(self, model: nn.Module, judging: JudgingInputs, measure: Measure) -> None:
        self.ports, self.measure = output_ports(model), measure
        self.labels_N, self.inputs = judging.labels_N, judging.inputs
        if measure == "agreement":
            for port in self.ports:
                require_agreement(port, judging.inputs.count)
        self.judged = tuple(port for port in self.ports if measure != "accuracy" or port.role == "logits")
        if not self.judged:
            roles = ", ".join(f"{port.name} is {port.role}" for port in self.ports)
            raise BadInput(f"--within accuracy: {roles}, and only logits have labels; give error or agreement")
        if measure == "accuracy" and judging.labels_N is None:
            raise BadInput("--within accuracy needs --labels, the class indices of the images that judge")
        self.dense = self._answers(model)

    def _answers(self, model: nn.Module) -> dict[str, Answer]:
        answers = dict(
            zip((port.name for port in self.ports), compute_outputs(model, self.inputs.batches(BATCH)), strict=True)
        )
        return {port.name: answers[port.name] for port in self.judged}

    def of(self, model: nn.Module) -> Judgement:
        """Return the relative error, the agreement (top-1 or nearest neighbour), or the accuracy's change in points.

        A model with several outputs is judged by the worst. The value has its interval.
        """
        answers = self._answers(model)
        every = tuple(
            replace(self._judged(self.dense[port.name], answers[port.name], port.role), output=port.name)
            for port in self.judged
        )
        if len(every) == 1:
            return replace(every[0], output="")
        worst = max(every, key=lambda each: each.value if self.measure == "error" else -each.value)
        return replace(worst, every=every)

    def _judged(self, dense: Answer, outputs: Answer, role: Role) -> Judgement:
        if self.measure == "error":
            return _error(dense, outputs, role)
        if self.measure == "agreement":
            found = measure_outputs(dense, outputs, role=role)
            bounds = found.agreement_bounds
            assert bounds is not None, found
            return Judgement(value=found.agreement or 0.0, low=bounds[0], high=bounds[1])
        right = (predicted_classes(outputs) == self.labels_N).astype(np.float64)
        change_N = 100.0 * (right - (predicted_classes(dense) == self.labels_N))
        return _bootstrapped(len(change_N), float(change_N.mean()), lambda drawn: float(change_N[drawn].mean()))


def _error(dense: Answer, outputs: Answer, role: Role) -> Judgement:
    rows = MEASURES[role].output_kind.rows(dense, outputs)
    value = rows.relative_error()
    if not rows.finite_N.all():
        return Judgement(value=value, low=value, high=value)
    lost_N: Floats = np.square(rows.candidate_NF - rows.reference_NF).sum(axis=1)
    energy_N: Floats = np.square(rows.reference_NF).sum(axis=1)
    return _bootstrapped(len(lost_N), value, lambda drawn: float((lost_N[drawn].sum() / energy_N[drawn].sum()) ** 0.5))
