"""What the rows of accuracy share: the trained model, the held-out images and its answers, the latest moments."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from torch import Tensor, nn

from benchmarks.gpu import images as pictures
from benchmarks.gpu import training
from benchmarks.gpu.record import NotYet, Row, reason_of
from benchmarks.gpu.setting import Setting
from calib.collect import Options, collect
from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families.family import listened, sites_of
from corp_deploy.planning.curves import eliminations
from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.input_sets import lineage_of_model, model_digest
from corp_deploy.traced.models.module import replaced
from corp_deploy.traced.models.sites import calibration_taps
from perf.stats.decision import wilson

Loop = Literal["open", "closed", "polished"]
T = TypeVar("T")


@dataclass(slots=True)
class Calibrated:
    """The moments of so many images of a seed, and the eliminations, by device, that serve every sparsity."""

    seed: int
    count: int
    moments: Moments
    eliminations: dict[str, dict[str, Elimination]] = field(default_factory=dict)

    def eliminations_on(self, where: str, model: nn.Module, method: Method) -> dict[str, Elimination]:
        if where not in self.eliminations:
            self.eliminations[where] = eliminations(model, self.moments, method)
        return self.eliminations[where]


@dataclass(slots=True)
class Workshop:
    """The dense model, the held-out images and its answers, and the latest moments."""

    setting: Setting
    checkpoint: Checkpoint | None = None
    held_out: tuple[Tensor, Tensor] | None = None
    answers: Tensor | None = None
    latest: Calibrated | None = None
    not_on_gpu: dict[Loop, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.setting.cache / ("tiny" if self.setting.small else "vit-s")

    def model(self) -> nn.Module:
        """The dense model on the CPU. Raises NotYet before it is trained."""
        if self.checkpoint is None:
            if not (self.folder / "config.json").is_file():
                raise NotYet("no trained weights in the cache: the training comes first")
            self.checkpoint = load_checkpoint(self.folder)
        return self.checkpoint.model

    def train(self) -> Row:
        """Train and keep."""
        self.checkpoint = training.trained(self.setting)
        save(self.checkpoint, self.folder)
        told = {"row": "training", "model_sha256": model_digest(self.checkpoint.model)}
        return told | {key: value for key, value in self.checkpoint.lineage.items() if key != "trained_by"}

    def judged(self, reduced: nn.Module) -> Row:
        """Accuracy, agreement and error of a reduced model."""
        device, size = self.setting.device, self.setting.image_size
        if self.held_out is None or self.answers is None:
            count = training.course(self.setting).held_out_images
            self.held_out = pictures.labelled("held-out", count, size=size, device=device)
            self.answers = training.logits_of(models_copy(self.model(), device), self.held_out[0]).double()
        images, labels = self.held_out
        answers = training.logits_of(models_copy(reduced, device), images).double()
        top = answers.argmax(1)
        right = int((top == labels).sum())
        low, high = wilson(right, len(labels))
        return {
            "accuracy": right / len(labels),
            "accuracy_interval": [low, high],
            "agreement": float((top == self.answers.argmax(1)).double().mean()),
            "relative_error": float((answers - self.answers).norm() / self.answers.norm()),
        }

    def calibrated(self, seed: int, count: int) -> Calibrated:
        """On so many images of a seed, with CORP's per-image system."""
        if self.latest is None or (self.latest.seed, self.latest.count) != (seed, count):
            self.latest = None
            device = self.setting.device
            held = pictures.held_in_bytes("calibration", count, size=self.setting.image_size, device=device, seed=seed)
            dense = models_copy(self.model(), device)
            batches = (pictures.images_from_bytes(piece, device) for piece in held.split(50))
            lineage = lineage_of_model(dense)
            taps = calibration_taps(dense, sites_of(dense))
            found = collect(
                listened(dense), taps, batches, device=device, options=Options(attention_system=True), lineage=lineage
            )
            self.latest = Calibrated(seed, count, found)
        return self.latest

    def somewhere(self, loop: Loop, work: Callable[[str], T]) -> tuple[T, Row]:
        """The work on the GPU or, where that fails, on the CPU; and what the row says of it."""
        if self.setting.device == "cuda" and loop not in self.not_on_gpu:
            try:
                return work("cuda"), {"reduced_on": "cuda"}
            except NotYet:
                raise
            except Exception as error:  # the CPU is asked next and raises what is no matter of the device
                self.not_on_gpu[loop] = reason_of(error)
        return work("cpu"), {"reduced_on": "cpu", "not_on_gpu": self.not_on_gpu.get(loop)}


def models_copy(model: nn.Module, device: str) -> nn.Module:
    """The model itself on the CPU, a copy elsewhere."""
    return model if device == "cpu" else replaced(model, {}).to(device)
