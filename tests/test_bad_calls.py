"""Calls that can't go well: each ends with exit code 2 and one message, at once, and leaves every file as it was."""

import json
import math
import os
import shutil
import signal
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import onnx
import pytest
import torch
from click.testing import Result
from onnx import helper
from PIL import Image
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file

from calib import store
from calib.moments import ChannelMoments
from corp_deploy.cli import main
from corp_deploy.commands.options import RegularPath
from corp_deploy.store.checkpoint import save
from corp_deploy.store.graph_facts import PREFIX
from corp_deploy.store.labels import labels_for
from corp_deploy.views.console import Output
from export.engine.record import record_path
from export.triton.repository import write_repository
from export.triton.variants import Package
from tests import tiny
from tests.command import invoked, refused, run
from tests.export_served import write_onnx, write_plan
from tests.refusals import rejects


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """What waits for a pipe or reads a device without end is interrupted."""

    def too_long(*_: object) -> None:
        raise RuntimeError("this was to be refused at once")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny.written(tmp_path_factory.mktemp("home"), 12)
    invoked("calibrate", "--model", root / "dense", "--images", root / "images.npy", "-o", root / "m.safetensors")
    words = ["--model", root / "dense", "--moments", root / "m.safetensors", "--mlp", 0.5, "-o", root / "reduced"]
    invoked("reduce", *words)
    return root


def tree(folder: Path) -> dict[str, bytes | None]:
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


# Pipes, devices and links to them

PATHS = [
    (name, each)
    for name, command in sorted(main.commands.items())
    for each in command.params
    if isinstance(each.type, click.Path)
]


def special(folder: Path, kind: str) -> Path:
    path = folder / "special"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_commands_refuse_pipes_and_devices(tmp_path: Path, kind: str) -> None:
    path = special(tmp_path, kind)
    assert len(PATHS) >= 60
    for command, parameter in PATHS:
        assert isinstance(parameter.type, RegularPath), (command, parameter.name)
        option = [] if isinstance(parameter, click.Argument) else [parameter.opts[0]]
        words = [*command.split(), *(["x"] if parameter.name == "candidates" else []), *option, path]
        others = [] if isinstance(parameter, click.Argument) and parameter.nargs == -1 else [path] * 2
        refused(run(*words, *(others if not option else [])), "special is a pipe, socket or device")
    assert path.is_fifo() if kind == "pipe" else path.readlink() == Path("/dev/zero")


def test_non_regular_image_counts_as_a_bad_image(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    special(folder, "link to a device").rename(folder / "a.png")
    Image.new("RGB", (40, 40)).save(folder / "b.png")
    words = ["calibrate", "--model", home / "dense", "--images", folder, "-o", tmp_path / "m.safetensors"]
    refused(run(*words), "a.png: a pipe, socket or device")
    invoked(*words, "--max-bad", 1)


def test_files_in_a_directory_must_be_regular(tmp_path: Path) -> None:
    for name in ("SHA256SUMS", "bench.json", "parity.json", "config.json"):
        (tmp_path / name).mkdir()
        special(tmp_path / name, "pipe").rename(tmp_path / name / name)
    (tmp_path / "recipe.toml").write_text('extends = "SHA256SUMS/SHA256SUMS"\n')
    refused(run("check", tmp_path / "SHA256SUMS"), "SHA256SUMS: a pipe, socket or device")
    words = ["release", tmp_path / "recipe.toml", "-o", tmp_path / "r", "--trust-paths"]
    refused(run(*words), ": a pipe, socket or device")
    refused(run("inspect", "--model", tmp_path / "config.json"), "config.json: a pipe, socket or device")
    for name in ("bench.json", "parity.json"):
        refused(run("report", tmp_path / name, "-o", tmp_path / "r.html"))
    assert not (tmp_path / "r").exists()


def test_output_in_a_directory_replaces_only_regular_files(home: Path, tmp_path: Path) -> None:
    special(tmp_path, "pipe").rename(tmp_path / "model.safetensors")
    words = ["--model", home / "dense", "--moments", home / "m.safetensors", "--mlp", 0.5, "-o", tmp_path]
    refused(run("reduce", *words), "model.safetensors: a pipe, socket or device")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert not (tmp_path / "model.safetensors").is_file()


# Results in the place of what they are made from


def test_output_never_replaces_its_input(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "dense", tmp_path / "dense")
    for name in ("images.npy", "m.safetensors"):
        shutil.copy(home / name, tmp_path)
    write_onnx(tmp_path / "g.onnx")
    np.savez(tmp_path / "held.npz", images=tiny.images(2))
    (tmp_path / "p.json").write_text(json.dumps({"kind": "parity"}))
    for name in ("link", "n.held-out", "n.4"):
        (tmp_path / f"{name}.npy").symlink_to("images.npy")
    at, model = tmp_path, ["--model", tmp_path / "dense"]
    before = tree(tmp_path)
    for words in (
        ["reduce", *model, "--moments", at / "m.safetensors", "--mlp", 0.5, "-o", at / "dense"],
        ["reduce", *model, "--moments", at / "m.safetensors", "--mlp", 0.5, "-o", at / "dense" / ".." / "dense"],
        ["calibrate", *model, "--images", at / "images.npy", "-o", at / "images.npy"],
        ["calibrate", *model, "--images", at / "images.npy", "-o", at / "link.npy"],
        ["calibrate", *model, "--images", at / "images.npy", "-o", at / "n.st", "--summary", at / "images.npy"],
        ["calibrate", *model, "--images", at / "n.held-out.npy", "--hold-out", 2, "-o", at / "n.npy"],
        ["calibrate", *model, "--images", at / "n.4.npy", "--snapshots", "2,4", "-o", at / "n.npy"],
        ["export", *model, "-o", at / "dense" / "model.safetensors"],
        ["build", at / "g.onnx", "--backend", "onnxruntime", "-o", at / "g.onnx"],
        ["bench", at / "g.onnx", at / "g.onnx", "-o", at / "g.onnx"],
        ["gate", at / "p.json", "-o", at / "g.xml", "-o", at / "p.json"],
        ["verify", at / "dense", at / "dense", "--images", at / "images.npy", "-o", at / "images.npy"],
        ["verify", at / "dense", at / "dense", "--images", at / "held.npz", "-o", at / "held.json"],
    ):
        refused(run(*words), "would replace what it is made from")
    words = ["verify", at / "dense", at / "dense", "--images", at / "held.npz", "-o", at / "new.npz"]
    refused(run(*words), "expected .json")
    assert tree(tmp_path) == before


# Words that a terminal shows as they are

ODD = "[/red] [gpu] :x:"


def test_brackets_in_names_are_shown_literally(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / ODD.replace("/", "")
    calibrated = folder / "[bold]m.safetensors"
    words = ["--model", home / "dense", "--images", home / "images.npy", "-o", calibrated]
    assert "[bold]m.safetensors" in run("calibrate", *words).stdout
    words = ["--model", home / "dense", "--moments", calibrated, "--mlp", 0.5, "-o", folder / "[red]"]
    assert "[red]: reduced model written" in run("reduce", *words).stdout
    invoked("inspect", "redundancy", "--moments", calibrated)


def test_messages_are_not_wrapped_at_the_terminal_width(capsys: pytest.CaptureFixture[str]) -> None:
    line = "x" * 90 + " " + "y" * 90
    Output(json=False, quiet=False).result({}, line)
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize(
    ("text", "written"), [(ODD, ODD), ("a\x1b[31mb\x9b2Jc\x07", r"a\x1b[31mb\x9b2Jc\x07")], ids=["markup", "controls"]
)
def test_every_renderable_shows_its_full_text(text: str, written: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(text, title=text)
    table.add_row(text)
    out = Output(json=False, quiet=False)
    with out.progress(text, 1, unit=written) as done:
        done(1)
    out.result({}, text, table)
    out.note(text)
    out.warn(text)
    shown = capsys.readouterr()
    assert shown.out.count(written) == 4
    assert shown.err.count(written) >= 3


def test_remedies_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp_deploy.machine._version", lambda name: "")
    findings = json.loads(run("doctor", "--json").stdout)["findings"]
    shown = run("doctor").stdout
    remedies = [row["remedy"] for row in findings if row["remedy"].startswith("pip install")]
    assert "pip install 'corp-deploy[gpu]'" in remedies
    assert all(remedy in shown for remedy in remedies)


# Weights


def weights() -> dict[str, Any]:
    return dict(tiny.checkpoint().model.state_dict())


NAME = "blocks.0.mlp.fc1.weight"
KWARGS = json.dumps(dict(tiny.ARCHITECTURE.kwargs))


def inspect(path: Path, name: str = tiny.ARCHITECTURE.name, kwargs: str = KWARGS) -> Result:
    return run("inspect", "--model", name, "--weights", path, "--model-kwargs", kwargs)


def quantised(value: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda value: value.to_sparse(), "torch.sparse_coo"),
        (lambda value: value.to_sparse_csr(), "torch.sparse_csr"),
        (quantised, "quantised"),
        (lambda value: value.to("meta"), "without values"),
        (lambda value: value > 0, "torch.bool"),
        (lambda value: value.to(torch.int64), "torch.int64"),
        (lambda value: value.to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
        (lambda value: value.to(torch.complex64) * (1 + 1j), "torch.complex64"),
        (lambda value: value.double() * 1e300, "as float32"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_weights_must_be_dense_real_and_finite_in_float32(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    state = weights()
    torch.save(state | {NAME: change(state[NAME])}, tmp_path / "w.pth")
    refused(inspect(tmp_path / "w.pth"), NAME, said)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_weights_are_accepted(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({name: value.to(dtype) for name, value in weights().items()}, tmp_path / "w.safetensors")
    assert inspect(tmp_path / "w.safetensors").exit_code == 0


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({3: torch.zeros(2)}, "names to tensors"),
        ({f"module.{NAME}": torch.zeros(192, 48)}, "with and without a wrapper's prefix"),
        ({"x" * 10_000_000: torch.zeros(2)}, "unexpected: xxx"),
    ],
)
def test_weight_names_must_be_unique_texts(tmp_path: Path, extra: dict[Any, Any], said: str) -> None:
    torch.save(weights() | extra, tmp_path / "w.pth")
    refused(inspect(tmp_path / "w.pth"), said)


# What a model is built with


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"embed_dim": 0}, "embed_dim is 0"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": -2}, "num_heads is -2"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"patch_size": [8, 0]}, "patch_size is a list"),
        ({"act_layer": "none of them"}, "can't build it"),
        ({"depth": 10_000_000}, "depth is 10000000"),
        ({"depth": 1.5}, "depth is 1.5"),
        ({"embed_dim": 65_536, "depth": 12, "num_heads": 1}, "parameters, "),
        ({"block_fn": {"a": [10**400]}}, "finite numbers"),
        ({"drop_rate": math.nan}, "not JSON"),
        ({"checkpoint_path": "none.pth"}, "checkpoint_path is not taken"),
        ({"features_only": True}, "features_only wraps the model"),
        ({"x" * 100_000: "y" * 100_000}, "can't build it"),
    ],
)
def test_model_arguments_are_bounded_before_building(
    home: Path, tmp_path: Path, kwargs: dict[str, Any], said: str
) -> None:
    save_file(weights(), tmp_path / "w.safetensors")
    refused(inspect(tmp_path / "w.safetensors", kwargs=json.dumps({**tiny.ARCHITECTURE.kwargs, **kwargs})), said)
    config = json.loads((home / "dense" / "config.json").read_text())
    config["timm"]["kwargs"] |= kwargs
    shutil.copytree(home / "dense", tmp_path / "changed")
    (tmp_path / "changed" / "config.json").write_text(json.dumps(config))
    refused(run("inspect", "--model", tmp_path / "changed"), said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 20_000 + "]" * 20_000, "nested too deep"),
        ('{"a": ' * 60 + "1" + "}" * 60, "nested too deep"),
        ("x" * 100_000, "not JSON"),
        ("[1]", "expected a JSON object"),
        ("9" * 5000, "number out of range"),
    ],
)
def test_invalid_arguments_are_not_echoed_whole(text: str, said: str) -> None:
    refused(run("inspect", "--model", "vit_tiny_patch16_224", "--model-kwargs", text), "--model-kwargs", said)


def changed(record: Any, path: str, value: object) -> Any:
    """The record with one entry replaced, or left out for None; ~1 in a path stands for a slash."""
    *above, last = (int(part) if part.isdecimal() else part.replace("~1", "/") for part in path.split("/"))
    at = record
    for key in above:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return record


CHANGES: dict[str, tuple[object, ...]] = {
    "sites/blocks.0.mlp/groups": (None, 1.5, True, "192", 0, 193, 10**30),
    "sites/blocks.0.mlp/kept": (None, [], "x", [1.5], [0, 0], [1, 0], [192]),
    "sites": ([], None, {}),
    "sites/blocks.1.mlp": (
        [], None, 3, {"hidden": 1.5, "output_bias": True}, {"hidden": 96, "output_bias": "yes"},
        {"heads": 3, "qk": 16, "v": 16, "scale": 0.25, "geometry": {}, "proj_bias": True},
    ),
    "program": (None, [], {}),
    "program/digest": (None, 3, "0" * 64),
    "program/biases": (None, "x", ["none of them"]),
    "weights_sha256": (None, 3, "abc"),
    "timm": (None, [], "x"),
    "timm/name": (None, 3, "x" * 100_000),
    "timm/kwargs": ([], {"depth": "two"}),
    "input": (None,),
    "input/preprocessing": (None, {"mean": "x"}),
    "lineage": (None,),
    "lineage/deep": (json.loads("[" * 500 + "]" * 500),),
}  # fmt: skip


@pytest.mark.parametrize("path", CHANGES)
def test_config_is_type_checked_on_reading(home: Path, tmp_path: Path, path: str) -> None:
    text = (home / "reduced" / "config.json").read_text()
    (tmp_path / "model.safetensors").symlink_to(home / "reduced" / "model.safetensors")
    for value in CHANGES[path]:
        (tmp_path / "config.json").write_text(json.dumps(changed(json.loads(text), path, value)))
        refused(run("inspect", "--model", tmp_path))


# Images and labels


def npy(header: str) -> bytes:
    """A .npy file whose header is this text."""
    padded = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + bytes(64)


def npz(path: Path, name: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


LABELS = (
    np.arange(13) % 7, np.arange(11) % 7, np.zeros(12, "timedelta64[s]"), np.full(12, 0.5), np.full(12, -1),
    np.full(12, 7), np.full(12, 2**62), np.full(12, 2**63, np.uint64), np.zeros((12, 2), np.int64),
)  # fmt: skip


@pytest.mark.slow("models")
def test_labels_must_be_one_class_index_per_image(home: Path, tmp_path: Path) -> None:
    for index, labels in enumerate(LABELS):
        np.save(tmp_path / f"labels{index}.npy", labels)
    words = ["--images", home / "images.npy", "-o", tmp_path / "p.json", "--batch", 3]
    for path in sorted(tmp_path.glob("labels*")):
        refused(run("verify", home / "dense", home / "dense", *words, "--labels", path), str(path))
    beyond = tmp_path / "labels5.npy"
    words = ["--moments", home / "m.safetensors", "--images", home / "images.npy", "--labels", beyond]
    sweep = ("sweep", "--model", home / "dense", *words, "--sparsity", 0.5, "-o", tmp_path / "s")
    refused(run(*sweep), str(beyond), "labels from 7 to 7, expected 0 to 6")
    assert not (tmp_path / "p.json").exists()
    assert not (tmp_path / "s").exists()


def test_labels_are_refused_for_other_inputs(tmp_path: Path) -> None:
    said = r"labels\.npy: labels are for images, the model takes texts; leave them out"
    texts: Any = SimpleNamespace(noun="texts")
    rejects(said, labels_for, tmp_path / "labels.npy", texts, tiny.checkpoint().model)


# Moments

HEADER_CHANGES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("order", "sites", "sha256", "lineage", "images"), (None, "x", 3.5, {"blocks.0.mlp.fc2": 1})),
    "sites/blocks.0.mlp.fc2": (None, {"type": "none"}), "sites/blocks.0.mlp.fc2/type": (None, "attention"),
    "sites/blocks.0.mlp.fc2/tokens": ("many", True, 0), "sites/blocks.0.mlp.fc2/more": (3,),
    "sha256/image_ids": (None, "0" * 64), "sha256/blocks.0.mlp.fc2~1gram_FF:upper": ("0" * 64,), "lineage/model": (3,),
}  # fmt: skip


@pytest.mark.parametrize("path", HEADER_CHANGES)
def test_moments_header_is_type_checked(home: Path, tmp_path: Path, path: str) -> None:
    with safe_open(home / "m.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = file.metadata()["calib"]
    for value in HEADER_CHANGES[path]:
        header = changed(json.loads(text), path, value)
        del header["header_sha256"]
        save_file(tensors, tmp_path / "m.safetensors", metadata={"calib": store._signed(header)})
        words = ["reduce", "--model", home / "dense", "--moments", tmp_path / "m.safetensors", "--mlp", 0.5]
        refused(run(*words, "-o", tmp_path / "r"))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sums_must_be_finite(home: Path, tmp_path: Path, value: float) -> None:
    moments = store.load_moments(home / "m.safetensors")
    site = moments.sites["blocks.0.mlp.fc2"]
    assert isinstance(site, ChannelMoments)
    spoilt = replace(site, gram_FF=site.gram_FF.clone().fill_(value))
    store.save_moments(
        replace(moments, sites={**moments.sites, "blocks.0.mlp.fc2": spoilt}), tmp_path / "m.safetensors"
    )
    words = ["reduce", "--model", home / "dense", "--moments", tmp_path / "m.safetensors", "--mlp", 0.5]
    refused(run(*words, "-o", tmp_path / "r"), "blocks.0.mlp.fc2/gram_FF holds NaN or Inf")


# Records


@pytest.fixture(scope="module")
def results(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of results: a reduced model and its parity record."""
    root = tmp_path_factory.mktemp("results")
    pair = (home / "dense", shutil.copytree(home / "reduced", root / "reduced"))
    invoked("verify", *pair, "--images", home / "images.npy", "--max-error", 1, "-o", root / "parity.json")
    return root


@pytest.mark.parametrize("value", [[], "x", 3, {"sites": "x"}, {"sites": [3]}, {"sites": [{}]}, {"coverage": []}])
def test_edited_reduction_is_refused(results: Path, tmp_path: Path, value: object) -> None:
    shutil.copytree(results, tmp_path / "r")
    config = tmp_path / "r" / "reduced" / "config.json"
    config.write_text(json.dumps(changed(json.loads(config.read_text()), "lineage/reduction", value)))
    refused(run("report", tmp_path / "r", "-o", tmp_path / "report.html"))
    assert not (tmp_path / "report.html").exists()


def test_directory_without_records_is_refused(tmp_path: Path) -> None:
    for text, said in ((None, "neither bench.json nor parity.json is here"), ("{", "bench.json: not JSON")):
        if text is not None:
            (tmp_path / "bench.json").write_text(text)
        result = run("report", tmp_path, "-o", tmp_path / "r.html")
        refused(result, said)
        assert "not a valid" not in result.stderr


# Recipes, graphs, engines' records and configs


def test_deep_toml_and_an_empty_baseline_are_refused_before_planning(home: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("a = " + "[" * 10_000 + "]" * 10_000)
    refused(run("release", recipe, "-o", tmp_path / "r", "--dry-run"), "nested too deep")
    recipe.write_text(
        f'[model]\nmodel = "{home}/dense"\n[calibration]\nimages = "{home}/images.npy"\n[held_out]\n'
        f'images = "{home}/images.npy"\n[reduce]\nmlp = 0.5\n'
    )
    (tmp_path / "empty.json").touch()
    words = ["release", recipe, "-o", tmp_path / "r", "--dry-run", "--trust-paths"]
    refused(run(*words, "--baseline", tmp_path / "empty.json"), "empty.json: not JSON")
    refused(run(*words, "--baseline", ""), "an empty path")


@pytest.mark.parametrize("text", ["x", "1.5", "9" * 30, "٣"])
def test_graph_metadata_must_be_numbers(tmp_path: Path, text: str) -> None:
    proto = onnx.load(str(write_onnx(tmp_path / "m.onnx")))
    helper.set_model_props(proto, {f"{PREFIX}macs": text})
    onnx.save(proto, tmp_path / "m.onnx")
    refused(run("bench", tmp_path / "m.onnx", tmp_path / "m.onnx", "-o", tmp_path / "b.json"), "its metadata say macs")


def resized(path: Path, to: Path, sizes: dict[int, int | str]) -> Path:
    """The graph with other sizes said of its input."""
    proto = onnx.load(str(path))
    for index, size in sizes.items():
        dim = proto.graph.input[0].type.tensor_type.shape.dim[index]
        dim.Clear()
        if isinstance(size, str):
            dim.dim_param = size
        else:
            dim.dim_value = size
    onnx.save(proto, str(to))
    return to


@pytest.fixture(scope="module")
def graph(home: Path) -> Path:
    invoked("export", "--model", home / "dense", "-o", home / "dense.onnx")
    return home / "dense.onnx"


@pytest.mark.parametrize("sizes", [{2: 64, 3: 64}, {1: 1}, {2: 0}, {2: 16, 3: 16}])
def test_graph_with_changed_input_size_refuses_the_images(
    home: Path, graph: Path, tmp_path: Path, sizes: dict[int, int | str]
) -> None:
    other = resized(graph, tmp_path / "other.onnx", sizes)
    words = ["--images", home / "images.npy", "-o", tmp_path / "p.json"]
    refused(run("verify", home / "dense", other, *words), "other.onnx: takes images", "got [1, 3, 32, 32]")
    refused(
        run("bench", graph, other, "-o", tmp_path / "b.json"),
        "other.onnx" if 0 in sizes.values() else "expected equal inputs",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["other.onnx"]


def test_graph_that_fails_on_its_declared_input_is_refused(home: Path, graph: Path, tmp_path: Path) -> None:
    save(tiny.checkpoint(img_size=64), tmp_path / "dense64")
    other = resized(graph, tmp_path / "other.onnx", {2: 64, 3: 64})
    words = ["--random", 2, "--batch", 2, "-o", tmp_path / "p.json"]
    refused(run("verify", tmp_path / "dense64", other, *words), "other.onnx: ONNX Runtime cannot run it on", "64, 64")
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize("size", ["height", 0, -4])
def test_graph_without_a_fixed_input_size_is_not_timed(graph: Path, tmp_path: Path, size: int | str) -> None:
    other = resized(graph, tmp_path / "other.onnx", {2: size})
    refused(
        run("bench", other, other, "-o", tmp_path / "b.json"),
        "other.onnx: its input images has no fixed size (3, ?, 32)",
    )


RECORD_CHANGES: dict[str, tuple[object, ...]] = {
    "inputs": (None, [], [{}]), "inputs/0/name": (3,), "inputs/0/shape": (None, []),
    **dict.fromkeys(("inputs/0/shape/1", "outputs/0/shape/1"), (0, True, 1.5, 10**40)),
    "profiles": (None, "1:8", ["1:8"], ["٣:4:5"], ["9:8:7"]), "targets": (None, "86", [86]),
    **dict.fromkeys(("onnx_bytes", "plan_bytes"), (None, 0, True, 1.5)),
    **dict.fromkeys(("half_weight_share", "half_kernel_share"), (True, -1, 1.5, 10**400, math.nan)),
    "build_seconds": (None, -1, math.nan, math.inf), "kernels": (True, -1, 1.5), "kernel_kinds": (None, {"a": -1}),
    "options": (None, {"a": []}), "roles": (3, {"logits": "poem"}), "onnx_sha256": (3, "abc"), "backend": (None, 3),
}  # fmt: skip


@pytest.mark.parametrize("path", RECORD_CHANGES)
def test_engine_record_is_type_checked_on_reading(tmp_path: Path, path: str) -> None:
    (tmp_path / "reduced").mkdir()
    graph = write_onnx(tmp_path / "reduced" / "model.onnx")
    plan = write_plan(tmp_path / "reduced" / "model.plan", graph)
    write_repository(Package(name="vit", plans=(plan,), onnx=graph), tmp_path / "repo")
    assert run("package", "lint", tmp_path / "repo").exit_code == 0
    text = record_path(plan).read_text()
    for value in RECORD_CHANGES[path]:
        edited_record = json.dumps(changed(json.loads(text), path, value))
        for place in (record_path(plan), tmp_path / "repo" / "vit" / "1" / "model.plan.json"):
            place.write_text(edited_record)
        refused(run("package", tmp_path, "-o", tmp_path / "new"), "model.plan.json: ")
    refused(run("bench", plan, plan, "-o", tmp_path / "b.json"), "model.plan.json: ")
    assert "model.plan.json" in invoked("package", "lint", tmp_path / "repo", code=1).stdout
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", ["max_batch_size: " + "9" * 5000, "a { " * 5000, "max_batch_size: ٣"])
def test_huge_numbers_and_deep_nesting_in_a_config_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "vit" / "1").mkdir(parents=True)
    (tmp_path / "vit" / "config.pbtxt").write_text(text)
    result = invoked("package", "lint", tmp_path, code=1)
    assert "Traceback" not in result.output
    assert len(result.output) < 3000
