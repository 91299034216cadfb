"""Dense against reduced on this machine: what the two are, how they run, and perf's interleaved measurement of them."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perf.bench import Subject, bench
from perf.module_runner import ModuleRunner
from perf.onnx_runner import OnnxRunner
from perf.runs import Bench
from perf.timing import Plan

from . import vit
from .checkpoint import WEIGHTS, Checkpoint, load_checkpoint
from .cost import macs
from .errors import BadInput
from .files import sha256_of_file
from .graphs import export_checkpoint, facts_of_onnx

BACKENDS = ("onnxruntime", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of the two as perf's subject, and the image shape it takes."""

    subject: Subject
    image_shape: tuple[int, int, int]
    static_batch: int | None


def _from_module(name: str, checkpoint: Checkpoint, weights: Path, threads: int | None) -> Contender:
    shape = vit.input_spec(checkpoint.model).shape
    subject = Subject(
        name=name,
        open=partial(ModuleRunner, checkpoint.model, threads=threads, label=weights.parent.name),
        macs=None if vit.parts(checkpoint.model).refused else macs(vit.shape(checkpoint.model)),
        params=sum(parameter.numel() for parameter in checkpoint.model.parameters()),
        size_bytes=weights.stat().st_size,
        sha256=sha256_of_file(weights),
    )
    return Contender(subject=subject, image_shape=shape, static_batch=None)


def _from_onnx(name: str, path: Path, threads: int | None) -> Contender:
    facts = facts_of_onnx(path)
    subject = Subject(
        name=name,
        open=partial(OnnxRunner, path, threads=threads),
        macs=facts.macs,
        params=facts.parameters,
        size_bytes=path.stat().st_size,
        sha256=sha256_of_file(path),
    )
    return Contender(subject=subject, image_shape=facts.image_shape, static_batch=facts.batch)


def _contender(name: str, path: Path, backend: str, threads: int | None, scratch: Path) -> Contender:
    if path.suffix == ".onnx" and path.is_file():
        if backend == "torch":
            raise BadInput(
                f"{path}: an ONNX file runs in ONNX Runtime; give the model directory, or --backend onnxruntime"
            )
        return _from_onnx(name, path, threads)
    if not path.is_dir():
        raise BadInput(f"{path}: expected an .onnx file or a model directory written by corp-deploy")
    checkpoint = load_checkpoint(path)
    if backend == "torch":
        return _from_module(name, checkpoint, path / WEIGHTS, threads)
    graph = scratch / f"{name}.onnx"
    export_checkpoint(checkpoint, graph, precision="fp32")
    return _from_onnx(name, graph, threads)


@contextmanager
def _contenders(dense: Path, reduced: Path, backend: str, threads: int | None) -> Iterator[tuple[Contender, Contender]]:
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        yield _contender("dense", dense, backend, threads, at), _contender("reduced", reduced, backend, threads, at)


def _refuse_unequal(dense: Contender, reduced: Contender, batches: Sequence[int]) -> None:
    if dense.image_shape != reduced.image_shape:
        raise BadInput(f"dense takes images {dense.image_shape}, reduced {reduced.image_shape}: not the same task")
    for contender in (dense, reduced):
        if contender.static_batch is not None and list(batches) != [contender.static_batch]:
            raise BadInput(
                f"{contender.subject.name}: its batch is fixed at {contender.static_batch}, asked for {list(batches)}; "
                f"measure --batch {contender.static_batch}, or export with a dynamic batch"
            )


def measure(
    dense: Path,
    reduced: Path,
    *,
    batches: Sequence[int],
    backend: str = "onnxruntime",
    plan: Plan,
    threads: int | None = None,
    images: NDArray[np.float32] | None = None,
    command: Sequence[str] = (),
    progress: Callable[[float, str], None] | None = None,
) -> Bench:
    """Time a dense and a reduced model in one process. Raises BadInput for models that don't go together.

    `images` [N,3,H,W] float32 are what is fed; None feeds normal noise, which costs the same time.
    """
    with _contenders(dense, reduced, backend, threads) as (one, other):
        _refuse_unequal(one, other, batches)
        fed = images
        if fed is None:
            fed = np.random.default_rng(0).standard_normal((max(batches), *one.image_shape), dtype=np.float32)
        return bench((one.subject, other.subject), fed, batches, plan, command=command, progress=progress)
