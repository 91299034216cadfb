"""The inputs that a sweep judges by, with what the dense model says to them. N inputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from calib.inputs import Inputs, InputSet, as_tuple, chunks, concatenated, run_model, to_device
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.family import output_ports
from corp_deploy.traced.models.module import device
from ground.ports import OutputPort
from perf.parity.measures import measures

from .sweep_points import DensePoint, OutputScore

Answer = NDArray[np.float32]


def outputs(model: nn.Module, batches: Iterable[Inputs]) -> tuple[Answer, ...]:
    """Each output [N, ...] of all inputs."""
    where = device(model)
    with torch.inference_mode():
        rows = [
            [output.float().cpu().numpy() for output in as_tuple(run_model(model, to_device(batch, where)))]
            for batch in batches
        ]
    return tuple(np.concatenate(parts) for parts in zip(*rows, strict=True))


def top_k(logits_NC: Answer, labels_N: NDArray[np.int64], k: int) -> float:
    """Share of the inputs whose label is among the k largest logits; all of them where there are no more classes."""
    best_NK = np.argsort(-logits_NC, axis=1, kind="stable")[:, :k]
    return float((best_NK == labels_N[:, None]).any(1).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Inputs with each of the dense model's outputs [N, ...] for them, and labels where there are any."""

    inputs: Inputs
    ports: tuple[OutputPort, ...]
    dense: tuple[Answer, ...]
    labels_N: NDArray[np.int64] | None
    batch_size: int

    def answers(self, model: nn.Module) -> tuple[Answer, ...]:
        """Of another model, each output."""
        return outputs(model, chunks(self.inputs, self.batch_size))

    def scores(self, answers: Sequence[Answer]) -> tuple[OutputScore, ...]:
        """How far each of a model's outputs is from the dense one."""
        scores = []
        for port, dense, answer in zip(self.ports, self.dense, answers, strict=True):
            found = measures(dense, answer, role=port.role)
            scores.append(OutputScore(name=port.name, relative_error=found.relative_error, agreement=found.agreement))
        return tuple(scores)

    def accuracies(self, answers: Sequence[Answer]) -> tuple[float, float] | tuple[None, None]:
        """Top-1 and Top-5, shares of the labelled inputs, of the first logits; None without labels."""
        if self.labels_N is None:
            return None, None
        own = next((place for place, port in enumerate(self.ports) if port.role == "logits"), 0)
        return top_k(answers[own], self.labels_N, 1), top_k(answers[own], self.labels_N, 5)

    def of_dense(self, model: nn.Module) -> DensePoint:
        accuracy, top5 = self.accuracies(self.dense)
        return DensePoint(
            macs=macs(model), parameters=parameters(model), inputs=len(self.dense[0]), accuracy=accuracy, top5=top5
        )


def worst_agreement(scores: Sequence[OutputScore]) -> float | None:
    """The least over the outputs; None for too few inputs."""
    return min((score.agreement for score in scores if score.agreement is not None), default=None)


def scored_inputs(model: nn.Module, source: InputSet, labels_N: NDArray[np.int64] | None, batch_size: int) -> Scored:
    """All of the inputs with the dense model's outputs for them."""
    inputs = concatenated(list(source.batches(batch_size)))
    dense = outputs(model, chunks(inputs, batch_size))
    return Scored(inputs=inputs, ports=output_ports(model), dense=dense, labels_N=labels_N, batch_size=batch_size)
