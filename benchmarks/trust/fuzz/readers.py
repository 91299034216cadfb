"""The readers of foreign files, each with files that are whole, and what a command does with what it read."""

import json
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import timm
import torch
from click.testing import CliRunner
from safetensors.torch import save as safetensors_from

from calib import store
from calib.groups import group_ids
from calib.texts import open_texts
from corp_deploy.cli import main
from corp_deploy.release.baseline import Baseline
from corp_deploy.release.pipeline import stages_of
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.graph_facts import facts_of_onnx
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.labels import labels_for
from corp_deploy.store.weights import read_weights
from export.graph.check import check_onnx
from export.graph.ports import ports_of_graph
from export.triton.lint import lint_repository
from export.triton.repository import write_repository
from export.triton.variants import Package
from ground.errors import BadInput
from ground.onnx_file import read_onnx
from perf.gate.evidence import Evidence
from perf.gate.gate import judge
from perf.gate.rule import rule_from_text
from perf.parity.rounding import round_file
from perf.runners.onnx_session import io_of_onnx

from .content import (
    GRAPH,
    JSON,
    TOML,
    Values,
    moments_values,
    npy_bytes,
    npz_bytes,
    pictures,
    sealed_moments,
    tar_bytes,
    torch_bytes,
)
from .valid import Record, bench, parity, valid_records

SIZE, CLASSES = 16, 3
TINY = Architecture(
    name="vit_tiny_patch16_224",
    kwargs={"img_size": SIZE, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": CLASSES},
)
RECIPE = b"""
[model]
model = "model"
[calibration]
images = "images.npy"
samples = 3
[held_out]
images = "images.npy"
[reduce]
mlp = 0.5
attn = 0.5
preset = "best"
[export]
precisions = ["fp32", "fp16"]
[parity]
batches = [1, 3]
[bench]
batches = [1]
time_limit_s = 5
[gate]
fail_if = ["speedup@b1 < 1.0", "top1_agreement < 0.9"]
[targets.onnxruntime-cpu]
precision = "fp32"
"""
RULES = (
    b"p50@b1 > baseline * 1.03", b"reduced.speedup@b1 < 1.2", b"top1_agreement < 0.99", b"fused_attention < dense",
    b"size_bytes > 3.5 MB", b"compute.p99@b1 >= dense - 1e-3", b"metric.f1 < 0.5", b"cosine_mean@whole <= .5",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A kind of file: its name, whole ones, how it is read and used, and how values stand in it."""

    name: str
    whole: Sequence[bytes]
    read: Callable[[Path], object]
    values: Values | None = None
    seal: Callable[[bytes], bytes] = bytes
    """Makes the digests right again that a change broke: whoever alters a file can."""


Readers = Mapping[str, Sequence[Format]]


def made_home(home: Path) -> None:
    """A model, images, its moments and its graph, the smallest there are."""
    torch.manual_seed(0)
    save(Checkpoint(model=dense_from_architecture(TINY), architecture=TINY, lineage={}), home / "model")
    rng = np.random.default_rng(0)
    np.save(home / "images.npy", rng.standard_normal((24, 3, SIZE, SIZE)).astype(np.float32))
    (home / "photographs").mkdir()
    for name, content in pictures().items():
        (home / "photographs" / name).write_bytes(content)
    for words in (
        ("calibrate", "--model", "model", "--images", "images.npy", "-o", "moments.safetensors"),
        ("export", "--model", "model", "-o", "model.onnx", "--precision", "fp32,fp16"),
    ):
        done = CliRunner().invoke(
            main, [str(home / word) if "." in word or word == "model" else word for word in words]
        )
        if done.exit_code:
            raise RuntimeError(done.output)
    write_repository(Package(name="vit", cpu_onnx=home / "model.onnx"), home / "repository")
    (home / "served").symlink_to(next((home / "repository").glob("*/config.pbtxt")).parent)


def _read_moments(path: Path) -> object:
    moments = store.load(path)
    return [moments.sites[name] for name in moments.sites]


def _read_sealed_model(home: Path) -> Callable[[Path], object]:
    """The weights that were changed, under their own digest."""
    config = json.loads((home / "model" / "config.json").read_text())

    def read(path: Path) -> object:
        changed = config | {"weights_sha256": sha256(path.read_bytes()).hexdigest()}
        (path.parent / "config.json").write_text(json.dumps(changed))
        return load_checkpoint(path.parent)

    return read


def _read_config(home: Path) -> Callable[[Path], object]:
    weights = home / "model" / "model.safetensors"

    def read(path: Path) -> object:
        if not (path.parent / weights.name).exists():
            shutil.copyfile(weights, path.parent / weights.name)
        return load_checkpoint(path.parent)

    return read


def _read_recipe(path: Path) -> object:
    return stages_of(load_recipe(path), path.parent / "out", Baseline(path=path.parent / "base.json", init=True))


def _read_rules(path: Path) -> object:
    now = Evidence(bench=bench(), parity=parity())
    return judge([rule_from_text(path.read_bytes().decode("utf-8", "surrogateescape"))], now, now)


def _read_config_pbtxt(home: Path) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        model = path.parent / "repository" / "vit"
        if not model.exists():
            shutil.copytree(home / "served", model)
        shutil.copyfile(path, model / "config.pbtxt")
        return lint_repository(path.parent / "repository")

    return read


def _read_graph(path: Path) -> object:
    proto = read_onnx(path)
    return check_onnx(proto), ports_of_graph(proto)


def _round_graph(path: Path) -> object:
    round_file(path, path.with_suffix(".rounded"))
    return path


def readers(home: Path) -> Readers:
    """By name, of what `made_home` made."""
    model = load_checkpoint(home / "model").model
    pixels, labels = np.load(home / "images.npy")[:3], np.array([0, 2, 1])
    np.save(home / "three.npy", pixels)
    weights = (home / "model" / "model.safetensors").read_bytes()
    moments = (home / "moments.safetensors").read_bytes()
    state = timm.create_model("vit_tiny_patch16_224", **TINY.kwargs).state_dict()
    graphs = [(home / name).read_bytes() for name in ("model.onnx", "model.fp16.onnx")]
    photographs, three = pictures(), images_for_model(model, home / "three.npy")

    def images(path: Path) -> object:
        return list(images_for_model(model, path).batches(1))

    def labelled(path: Path) -> object:
        return labels_for(path, three, model)

    def grouped(path: Path) -> object:
        return group_ids(three, str(path))

    def pictured(path: Path) -> object:
        folder = path.parent / "one"
        folder.mkdir(exist_ok=True)
        path.replace(folder / path.name)
        try:
            return images(folder)
        finally:
            (folder / path.name).unlink()

    def record(name: str, entry: Record) -> Format:
        file, document, reader = entry
        return Format(name=file, whole=[json.dumps(document).encode()], read=reader, values=JSON)

    return {
        "moments": [
            Format(name="plain.safetensors", whole=[moments], read=_read_moments),
            Format(
                name="sealed.safetensors", whole=[moments], read=_read_moments, values=moments_values(moments),
                seal=sealed_moments,
            ),
        ],
        "model directories": [
            Format(
                name="config.json", whole=[(home / "model" / "config.json").read_bytes()], read=_read_config(home),
                values=JSON,
            ),
            Format(name="model.safetensors", whole=[weights], read=_read_sealed_model(home)),
        ],
        "checkpoints": [
            Format(
                name="w.pth", whole=[torch_bytes(each) for each in (state, {"state_dict": state, "epoch": 3})],
                read=read_weights,
            ),
            Format(name="w.safetensors", whole=[safetensors_from(state)], read=read_weights),
        ],
        "recipes": [Format(name="recipe.toml", whole=[RECIPE], read=_read_recipe, values=TOML)],
        "gate rules": [Format(name="rule.txt", whole=RULES, read=_read_rules)],
        "records": [record(name, entry) for name, entry in valid_records(home / "any.json").items()],
        "config.pbtxt": [
            Format(
                name="new.pbtxt", whole=[(home / "served" / "config.pbtxt").read_bytes()],
                read=_read_config_pbtxt(home),
            ),
        ],
        "ONNX graphs": [
            Format(name=f"{name}.onnx", whole=graphs, read=read, values=GRAPH)
            for name, read in {
                "checked": _read_graph, "facts": facts_of_onnx, "borders": io_of_onnx, "rounded": _round_graph,
            }.items()
        ],
        "images": [
            *(Format(name=name, whole=[content], read=pictured) for name, content in photographs.items()),
            Format(name="i.npy", whole=[npy_bytes(pixels), npy_bytes(pixels.astype(np.uint8))], read=images),
            Format(name="i.npz", whole=[npz_bytes(images=pixels)], read=images),
            Format(name="i.safetensors", whole=[safetensors_from({"images": torch.from_numpy(pixels)})], read=images),
            Format(
                name="i.tar", read=images,
                whole=[tar_bytes(photographs, form) for form in (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT)],
            ),
        ],
        "labels": [
            Format(name="l.npy", whole=[npy_bytes(labels)], read=labelled),
            Format(name="l.npz", whole=[npz_bytes(labels=labels)], read=labelled),
            Format(name="g.npy", whole=[npy_bytes(np.array(["a", "b", "a"]))], read=grouped),
            Format(name="g.json", whole=[b'["a", "b", 1]'], read=grouped, values=JSON),
        ],
        "documents": [
            Format(name="t.txt", whole=["one line\n\ntwo Ä\r\nthree".encode()], read=_read_documents),
        ],
    }  # fmt: skip


def _read_documents(path: Path) -> object:
    texts = open_texts(path, encode=lambda lines: {"ids": torch.tensor([[len(line)] for line in lines])})
    return [texts.name(position) for position in range(texts.count)]


def is_read(each: Format, content: bytes, folder: Path) -> bool:
    """Whether the file was taken; raises whatever the reader raises but BadInput, which is its answer."""
    path = folder / each.name
    path.write_bytes(each.seal(content))
    try:
        each.read(path)
    except BadInput:
        return False
    return True
