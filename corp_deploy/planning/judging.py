"""Inputs that judge reduced models against the dense one, none of them calibrated on. N inputs, C outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from calib.images import Images
from calib.input_set import InputSet
from calib.inputs import moved, run_model
from calib.moments import Moments
from corp_deploy.families.family import family_of, output_ports
from corp_deploy.families.modules import device
from corp_deploy.invocation.limit import Measure
from corp_deploy.store.inputs import images_for_model, labels_from_path, texts_for_model
from ground.errors import BadInput
from ground.ports import OutputPort
from perf.parity.measures import ANSWERS, measures, require_agreement

BATCH = 32
DRAWS, CONFIDENCE, SEED = 1000, 0.95, 0
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """Inputs that no fit has seen, class indices [N] of them where there are any, and where they come from in words."""

    inputs: InputSet
    labels_N: NDArray[np.int64] | None
    origin: str

    def __str__(self) -> str:
        return f"{self.inputs.count} {self.inputs.noun} {self.origin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One measure of a reduced model, with its 95 % interval over the inputs."""

    value: float
    low: float
    high: float


def _ids(moments: Moments) -> torch.Tensor:
    if not len(moments.image_ids):
        raise BadInput(
            "the moments don't say which images they are of, so none can be told to be others; calibrate again"
        )
    return moments.image_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Judges:
    """Inputs that are to judge, None for those that the calibration left out, with class indices [N] of them, or of all
    inputs that are looked at, where there are any.
    """

    inputs: InputSet | None = None
    labels_N: NDArray[np.int64] | None = None

    def apart(self, inputs: InputSet, moments: Moments) -> tuple[InputSet, Judging]:
        """Those of the inputs that may be fitted to, and what judges. Raises BadInput where either is none, or both."""
        if self.inputs is None:
            return self._left_out(inputs, moments)
        common = int(torch.isin(self.inputs.ids, torch.cat([_ids(moments), inputs.ids])).sum())
        if common:
            raise BadInput(
                f"--judge: {common} of its {self.inputs.count} {inputs.noun} are calibration {inputs.noun} too, which "
                "can't judge; give others"
            )
        return inputs, Judging(inputs=self.inputs, labels_N=self.labels_N, origin="of --judge")

    def _left_out(self, inputs: InputSet, moments: Moments) -> tuple[InputSet, Judging]:
        is_fitted = torch.isin(inputs.ids, _ids(moments))
        fitted, others = ((is_fitted == held).nonzero().squeeze(1).tolist() for held in (True, False))
        if not fitted:
            raise BadInput(
                f"none of the {inputs.count} {inputs.noun} is one that the moments are of; give those of calibrate, "
                "and others to judge by with --judge"
            )
        if not others:
            raise BadInput(
                f"the moments are of all {inputs.count} {inputs.noun}, so none is left to judge by: leave some out "
                "(calibrate --hold-out N), or give others with --judge"
            )
        labels_N = None if self.labels_N is None else self.labels_N[others]
        origin = "that the calibration left out"
        return inputs.subset(fitted), Judging(inputs=inputs.subset(others), labels_N=labels_N, origin=origin)


def judges_from_paths(model: nn.Module, images: InputSet, *, judge: Path | None, labels: Path | None) -> Judges:
    """What judges as it is named on a command line; `images` are those that are looked at to reduce."""
    others: InputSet | None = None
    if judge is not None:
        is_text = family_of(model).input_spec(model).medium == "text"
        others = texts_for_model(model, judge) if is_text else images_for_model(model, judge)
    labelled = images if others is None else others
    if labels is None:
        return Judges(inputs=others)
    if not isinstance(labelled, Images):
        raise BadInput(f"{labels}: labels are of images, the model takes {labelled.noun}; leave them out")
    return Judges(inputs=others, labels_N=labels_from_path(labels, labelled, model))


def _outputs(model: nn.Module, inputs: InputSet) -> NDArray[np.float32]:
    where = device(model)
    with torch.inference_mode():
        rows = [run_model(model, moved(batch, where)).float().cpu().numpy() for batch in inputs.batches(BATCH)]
    return np.concatenate(rows)


def _bootstrap(count: int, statistic: Callable[[NDArray[np.int64]], float]) -> tuple[float, float]:
    """The interval of a statistic of inputs drawn again with repetition."""
    drawn_DN = np.random.default_rng(SEED).integers(0, count, size=(DRAWS, count))
    values_D = [statistic(drawn_N) for drawn_N in drawn_DN]
    low, high = np.quantile(values_D, [(1.0 - CONFIDENCE) / 2.0, (1.0 + CONFIDENCE) / 2.0])
    return float(low), float(high)


class Judge:
    """The dense model's answers to the inputs that judge, made once, and one measure of any reduced model beside them.

    Raises BadInput where the measure is not defined of the outputs, or has no labels.
    """

    def __init__(self, model: nn.Module, judging: Judging, measure: Measure) -> None:
        ports: tuple[OutputPort, ...] = output_ports(model)
        if len(ports) != 1:
            raise BadInput(
                f"--within judges one output, the model has {len(ports)}: {', '.join(p.name for p in ports)}"
            )
        self.role, self.measure, self.labels_N, self.inputs = ports[0].role, measure, judging.labels_N, judging.inputs
        if measure == "agreement":
            require_agreement(ports[0], judging.inputs.count)
        if measure == "accuracy" and self.role != "logits":
            raise BadInput(
                f"--within accuracy: {ports[0].name} is {self.role}, which no label is of; give error or agreement"
            )
        if measure == "accuracy" and judging.labels_N is None:
            raise BadInput("--within accuracy needs --labels, the class indices of the images that judge")
        self.dense_NC = _outputs(model, judging.inputs)

    def of(self, model: nn.Module) -> Judgement:
        """Relative error, share that agrees (top-1, or nearest neighbour), or change of accuracy in points."""
        outputs_NC = _outputs(model, self.inputs)
        if self.measure == "error":
            return self._error(outputs_NC)
        if self.measure == "agreement":
            found = measures(self.dense_NC, outputs_NC, role=self.role)
            bounds = found.agreement_bounds
            assert bounds is not None, found
            return Judgement(value=found.agreement or 0.0, low=bounds[0], high=bounds[1])
        return self._points(outputs_NC)

    def _error(self, outputs_NC: NDArray[np.float32]) -> Judgement:
        rows = ANSWERS[self.role].rows(self.dense_NC, outputs_NC)
        value = rows.relative_error()
        if not rows.finite_N.all():
            return Judgement(value=value, low=value, high=value)
        lost_N: Floats = np.square(rows.candidate_NF - rows.reference_NF).sum(axis=1)
        energy_N: Floats = np.square(rows.reference_NF).sum(axis=1)
        low, high = _bootstrap(len(lost_N), lambda drawn: float((lost_N[drawn].sum() / energy_N[drawn].sum()) ** 0.5))
        return Judgement(value=value, low=min(low, value), high=max(high, value))

    def _points(self, outputs_NC: NDArray[np.float32]) -> Judgement:
        right = (outputs_NC.argmax(-1) == self.labels_N).astype(np.float64)
        change_N = 100.0 * (right - (self.dense_NC.argmax(-1) == self.labels_N))
        low, high = _bootstrap(len(change_N), lambda drawn: float(change_N[drawn].mean()))
        value = float(change_N.mean())
        return Judgement(value=value, low=min(low, value), high=max(high, value))
