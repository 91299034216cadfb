"""The dense encoder, its calibration and held-out crops, and reductions of it, each judged on the held-out ones."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.real.commands import Cost, run
from benchmarks.real.head import SaliencyHead, load_head
from benchmarks.real.measures import BATCH, Outputs, figures, outputs
from benchmarks.real.rows import Method, Settings, words
from benchmarks.real.weights import ARCHITECTURE
from corp_deploy.families.counting import macs, parameters
from corp_deploy.store.checkpoint import dense_from_architecture, load_checkpoint
from ground.errors import Missing
from ground.files import sha256_of_file, write_json, write_text

WEIGHTS = "dinov2_s.safetensors"
NEEDED = (WEIGHTS, "head.safetensors", "calib.npy", "calib_groups.json", "held.npy", "held_groups.json")


def _require(directory: Path) -> None:
    if absent := [name for name in NEEDED if not (directory / name).is_file()]:
        raise Missing(f"{directory / absent[0]}: not here; `make real` brings weights and photographs")


class Calibration:
    """Crops that a method is fitted to: the first so many, or all of the first so many photographs."""

    def __init__(self, ready: Path, work: Path, crops: int, photographs: int | None = None) -> None:
        self.ready, self.work, self.crops = ready, work, crops
        names = json.loads((ready / "calib_groups.json").read_text(encoding="utf-8"))[:crops]
        order = list(dict.fromkeys(names))
        kept = set(order[:photographs])
        self.positions = [position for position, name in enumerate(names) if name in kept]
        self.photographs = len(kept)
        self.path = work / f"calib-{crops}-{self.photographs}.npy"
        self.groups = self.path.with_suffix(".json")
        write_text(self.groups, json.dumps([names[position] for position in self.positions]))
        if not self.path.is_file():
            partial = self.path.with_suffix(".partial.npy")
            np.save(partial, np.load(ready / "calib.npy", mmap_mode="r")[self.positions])
            partial.rename(self.path)

    def of(self, photographs: int) -> "Calibration":
        """The crops of so many photographs alone."""
        return Calibration(self.ready, self.work, self.crops, photographs)

    @cached_property
    def images(self) -> Tensor:
        return torch.from_numpy(np.load(self.path))

    def as_json(self) -> dict[str, Any]:
        return {
            "crops": len(self.positions),
            "photographs": self.photographs,
            "sha256": sha256_of_file(self.path),
        }


class Subject:
    """The dense encoder with the crops that it is judged by; `work` keeps moments between runs."""

    def __init__(self, ready: Path, work: Path, held_out: int, threads: int) -> None:
        _require(ready)
        work.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(threads)
        self.ready, self.work, self.threads = ready, work, threads
        self.held_out = torch.from_numpy(np.load(ready / "held.npy", mmap_mode="r")[:held_out].copy())
        names = json.loads((ready / "held_groups.json").read_text(encoding="utf-8"))[:held_out]
        self.photographs = len(set(names))

    @cached_property
    def head(self) -> SaliencyHead:
        return load_head(self.ready / "head.safetensors")

    @cached_property
    def model(self) -> nn.Module:
        model = dense_from_architecture(ARCHITECTURE)
        model.load_state_dict(load_file(self.ready / WEIGHTS))
        return model

    @cached_property
    def macs(self) -> int:
        return macs(self.model)

    @cached_property
    def dense(self) -> Outputs:
        return outputs(self.model, self.held_out, self.head)

    @cached_property
    def settings(self) -> Settings:
        return Settings(self.model)

    @property
    def model_words(self) -> list[str]:
        """The model, as every command takes it."""
        kwargs = json.dumps(dict(ARCHITECTURE.kwargs))
        weights = str(self.ready / WEIGHTS)
        return ["--model", ARCHITECTURE.name, "--model-kwargs", kwargs, "--weights", weights]

    def bare_pass_s(self, images: Tensor) -> float:
        """CPU seconds of one forward pass over these images."""
        with torch.inference_mode():
            self.model(images[:BATCH])
            started = time.process_time()
            for batch in images.split(BATCH):
                self.model(batch)
        return time.process_time() - started

    def moments(self, method: Method, calibration: Calibration) -> tuple[Path, Mapping[str, float]]:
        """The moments file that a method needs with what it cost; made where it is not there."""
        said = "".join(each for each in method.calibrate if each.isalnum())
        path = self.work / f"moments-{calibration.path.stem}-{said or 'plain'}.safetensors"
        cost = path.with_suffix(".json")
        if not cost.is_file():
            given = ["--images", str(calibration.path), "--batch-size", str(BATCH), "--output", str(path)]
            grouped = method.calibrate.format(groups=calibration.groups).split()
            took = run(["calibrate", *self.model_words, *given, *grouped], self.threads)
            write_json(cost, asdict(took))
        return path, json.loads(cost.read_text(encoding="utf-8"))

    def reduced(self, said: Sequence[str], method: Method, calibration: Calibration, directory: Path) -> Cost:
        """Reduce as the row says; the moments are made first and cost it nothing."""
        moments, _ = self.moments(method, calibration)
        images = ["--images", str(calibration.path)] if method.images else []
        shutil.rmtree(directory, ignore_errors=True)
        given = ["--moments", str(moments), *images, "--output", str(directory)]
        return run(["reduce", *self.model_words, *given, *said], self.threads)

    def row(
        self,
        method: Method,
        share: float,
        calibration: Calibration,
        *,
        fitted: bool = False,
        directory: Path | None = None,
    ) -> dict[str, Any]:
        """One row: what was asked, what it costs and how far it is; `fitted` judges it on its own crops too.

        `directory` keeps the reduced model.
        """
        said = words(method, share, self.settings)
        directory = directory or self.work / "reduced"
        cost = self.reduced(said, method, calibration, directory)
        model = load_checkpoint(directory).model
        row: dict[str, Any] = {"method": method.name, "share": share, "command": f"reduce {' '.join(said)}"}
        row |= {"macs_share": macs(model) / self.macs, "parameters": parameters(model), **asdict(cost)}
        row |= figures(outputs(model, self.held_out, self.head), self.dense)
        if fitted:
            images = calibration.images
            own = figures(outputs(model, images, self.head), outputs(self.model, images, self.head))
            row |= {"photographs": calibration.photographs, "crops": len(calibration.positions)}
            row |= {f"fitted_{name}": own[name] for name in ("class_error", "patch_error")}
        return row
