"""The benchmarks of quality run through their own commands, on models that take seconds."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.harness import Bench, Record
from benchmarks.pages import accuracy_page, convnets_page, merging_page, sparsity_page
from benchmarks.pages.levers_page import levers
from benchmarks.quality import convnets, hard_vit, methods, positions, sparsity, subjects, text_encoder
from benchmarks.quality import levers as of_levers
from benchmarks.quality.procedural_images import CLASSES, made
from benchmarks.quality.reference_text import opened
from benchmarks.quality.subjects import Subject
from benchmarks.quality.training import HARD, correlation, train, trained, unevenness
from benchmarks.real import efforts, real_convnet
from benchmarks.real.page import efforts as efforts_table
from benchmarks.real.page import real_convnet as convnet_table
from corp_deploy.families.hf_encoders import Arguments, architecture_of_encoder
from corp_deploy.families.tokenizer import Tokenization
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.dense_model import model_of_directory
from corp_deploy.store.input_sets import images_for_model
from examples.digits.images import load_part
from ground.errors import Missing

from . import tiny

pytestmark = pytest.mark.nightly


def run(command: click.Command, path: Path, *words: str) -> dict[str, Any]:
    """Run a benchmark and return its record."""
    threads = torch.get_num_threads()
    try:
        result = CliRunner().invoke(command, ["--output", str(path), *words], catch_exceptions=False)
    finally:
        torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def small_vit(scratch: Path, fitted: int, judging: int, *, name: str = "digits") -> Subject:
    dense = tiny.checkpoint()
    dense.model.requires_grad_(False)
    sets = [tiny.opened(scratch / f"{seed}.npy", tiny.images(24, seed=seed), dense.model) for seed in (0, 1)]
    return Subject(name=name, dense=dense, inputs=sets[0], held_out=sets[1])


def small_text(scratch: Path, fitted: int, judging: int, *, seed: int = 0) -> Subject:
    """An encoder of one small block with random weights, and pieces of 5 random tokens."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 128, "max_position_embeddings": 8}
    config = {"model_type": "bert", "num_hidden_layers": 1, "num_attention_heads": 2, **sizes}
    text = Tokenization(length=5, sha256="0" * 64)
    architecture = architecture_of_encoder(
        Arguments(config=config, text=text, pooling="mean"), Preprocessing(), where="small"
    )
    dense = Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})
    texts = [
        opened(scratch / name, [" ".join(map(str, row)) for row in torch.randint(40, (count, 5)).tolist()])
        for name, count in (("fitted", 8), ("judging", 4))
    ]
    return Subject(name="MiniLM", dense=dense, inputs=texts[0], held_out=texts[1], attention_system=True)


def absent(*_: object) -> Subject:
    raise Missing("not installed")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Callable[..., Subject]] = {"digits": small_vit, "MiniLM": small_text}
    small |= dict.fromkeys(("DINOv2-S", "EfficientNet-Lite0"), absent)
    for module in (sparsity, efforts):
        monkeypatch.setattr(module, "SUBJECTS", small)
    monkeypatch.setattr(subjects, "BATCH", 4)
    monkeypatch.setattr(text_encoder, "minilm", small_text)


@pytest.mark.slow("training")
def test_methods_record_has_equal_widths_and_a_page(tmp_path: Path) -> None:
    record = run(methods.main, tmp_path / "r.json", "--quick", "--threads", "1")
    rows = {(row["method"], row["kind"]): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == sum(len(way.kinds) for way in methods.WAYS)
    for kind in methods.KINDS:
        assert len({(row["hidden"], row["qk"], row["v"]) for (_, own), row in rows.items() if own == kind}) == 1, kind
    assert rows["best", "joint"]["relative_error"] < rows["none", "joint"]["relative_error"]
    whole = [{**row, "sparsity": sparsity} for row in record["rows"] for sparsity in accuracy_page.SPARSITIES]
    assert f"{rows['best', 'joint']['relative_error']:.4f}" in accuracy_page.methods({**record, "rows": whole})


@pytest.mark.parametrize(("sparsity", "hidden", "head"), [(0.5, 192, 16), (0.875, 48, 4)])
def test_widths_are_the_same_for_every_method(sparsity: float, hidden: int, head: int) -> None:
    model = tiny.timm_model("vit_tiny_patch16_224", **{**tiny.ARCHITECTURE.kwargs, "embed_dim": 96, "depth": 1})
    for way in methods.WAYS:
        asked = uniform_widths(model, way.method(way.kinds[-1], sparsity))
        assert asked["blocks.0.mlp"] == hidden, way.name
        assert asked.get("blocks.0.attn.qk") == (3 * head if "joint" in way.kinds else None), way.name


def test_procedural_images_depend_only_on_their_index() -> None:
    few, more = made("train", 3), made("train", 40)
    np.testing.assert_array_equal(few.images, more.images[:3])
    assert (few.images != made("held-out", 3).images).any()
    assert more.images.shape == (40, 3, 64, 64)
    assert len(set(made("train", 300).labels.tolist())) == len(CLASSES) == 24
    with pytest.raises(ValueError, match="got 'test'"):
        made("test", 1)


@pytest.mark.slow("training")
def test_every_method_removes_channels_of_convolutions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convnets, "SEEDS", (0,))
    monkeypatch.setattr(convnets, "REMOVED", (0.5,))
    monkeypatch.setattr(convnets, "CALIBRATION_IMAGES", 64)
    monkeypatch.setattr(convnets, "SHAPES", {})
    record = run(convnets.main, tmp_path / "r.json")
    assert [row["way"] for row in record["rows"]] == [way.name for way in convnets.WAYS]
    assert {round(row["removed_of_model"], 1) for row in record["rows"]} == {0.5}
    errors = {row["way"]: row["relative_error"] for row in record["rows"]}
    assert errors["best, closed loop"] < 0.5 * errors["grail, symmetric closed loop"]
    assert errors["best"] < 0.5 * errors["grail"] < errors["none"]
    assert "means over 1 choices of images" in convnets_page.convnets(record)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("kind", ["heads", "residual streams"])
def test_lever_cells_are_errors_or_reasons(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("`--preset best`", "`--macs`", "`--sparse 2:4`", "`--rescale`", "`--merge-tokens`", "BF16")
    monkeypatch.setattr(of_levers, "LEVERS", {name: of_levers.LEVERS[name] for name in asked})
    record = run(of_levers.main, tmp_path / "r.json", "--only", kind)
    cells = {row["lever"]: row for row in record["rows"]}
    assert all(cells[lever]["error"] < 0.7 for lever in ("`--preset best`", "`--macs`", "`--sparse 2:4`", "BF16"))
    assert "reason" in cells["`--rescale`" if kind == "heads" else "`--merge-tokens`"]
    page = levers(record)
    for row in record["rows"]:
        cell = next(line for line in page.splitlines() if line.startswith(f"| {row['lever']}")).split("|")[2].strip()
        assert re.fullmatch(r"\[\d+\]" if "reason" in row else r"[\d.e-]+", cell)


def test_hard_training_terms_equal_their_definitions() -> None:
    assert unevenness(torch.full((2, 5), 3.0)) == 0.0
    assert unevenness(torch.tensor([1.0, float(np.e) ** 2])) == pytest.approx(1.0)
    values = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(0))
    values[..., 3] = values[..., 0] * 2.0 + 1.0
    expected = 0.0
    for group in values.double().numpy():
        squares = np.corrcoef(group, rowvar=False) ** 2
        expected += np.mean([squares[i, j] for i in range(4) for j in range(4) if i != j]) * 4 / 2
    assert float(correlation(values)) == pytest.approx(expected, rel=1e-4)


def test_pair_figures_equal_a_computation_by_hand() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    dense = np.eye(2)[[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]]
    reduced = np.eye(2)[[0, 1, 1, 0, 0, 1, 1, 1, 1, 1]]
    figures = hard_vit.figures(dense, reduced, labels)
    assert (figures["only_dense_right"], figures["only_reduced_right"], figures["accuracy"]) == (3, 1, 0.7)
    change = np.array([0, -1, -1, 1, -1, 0, 0, 0, 0, 0])  # of each image's being right
    half = 100 * 1.959964 * change.std() / np.sqrt(10)
    assert figures["points"] == pytest.approx([-20.0, -20.0 - half, -20.0 + half], rel=1e-5)


@pytest.mark.slow("training")
def test_hard_model_is_trained_resumed_and_reduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(HARD, depth=1, batch=8, images=16, epochs=2)
    monkeypatch.setattr(hard_vit, "SPARSITIES", (0.5,))
    train(tmp_path / "two.pt", replace(short, epochs=1))
    state = torch.load(tmp_path / "two.pt", weights_only=True)
    assert state["epochs"] == 1
    dense = trained(tmp_path / "one", short)
    assert trained(tmp_path / "one", short).architecture.kwargs == dense.architecture.kwargs  # from the folder
    subject = hard_vit.subject_of(dense, made("train", 32), made("held-out", 12), tmp_path)
    record = Record(tmp_path / "record.json", "benchmarks/hard-vit", {})
    hard_vit.measure(Bench(record), subject)
    rows = {row["method"]: row for row in record["rows"]}
    assert list(rows) == [way.name for way in hard_vit.WAYS]
    assert rows["best, closed loop"]["macs_share"] == rows["none"]["macs_share"] < 1.0
    assert rows["best"]["relative_error"] < rows["none"]["relative_error"]
    assert f"| none | {rows['none']['macs_share']:.2f} |" in accuracy_page.hard_vit(record.content)


@pytest.mark.slow("training")
@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("command", "words", "table", "line"),
    [
        (text_encoder.main, ("--only", "joint"), accuracy_page.text_encoder, "| joint | 50% | 39,936 |"),
        (sparsity.main, ("--only", "digits"), sparsity_page.sparsity, "| 2:4, inputs reordered |"),
        (efforts.main, ("--only", "half*"), efforts_table, "| MiniLM | half of all | standard |"),
    ],
)
def test_benchmark_has_its_rows_and_table(
    command: click.Command, words: tuple[str, ...], table: Any, line: str, tmp_path: Path
) -> None:
    record = run(command, tmp_path / "r.json", *words)
    assert all(0.0 < row["error"] < 3.0 for row in record["rows"])
    assert line in table(record)
    assert run(command, tmp_path / "r.json", *words) == record


@pytest.mark.slow("models")
def test_ways_to_turn_merged_tokens_have_their_rows_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def untrained(architecture: Architecture, cache: Path) -> Checkpoint:
        torch.manual_seed(0)
        model = dense_from_architecture(architecture)
        tiny.enliven(model, 0)
        return Checkpoint(model=model.requires_grad_(False), architecture=architecture, lineage={})

    monkeypatch.setattr(positions, "SHAPES", ())
    monkeypatch.setattr(positions, "SCHEDULES", (8,))
    monkeypatch.setattr(positions, "trained", untrained)
    record = run(positions.main, tmp_path / "r.json")
    errors = {(row["model"], row["way"]): row["error"] for row in record["rows"]}
    for architecture in positions.MODELS:
        assert len({errors[architecture.name, turn] for turn in positions.TURNS}) == len(positions.TURNS)
        assert errors[architecture.name, "closed loop"] < errors[architecture.name, positions.TURNS[0]]
    assert "| EVA-02 | mean angle |" in merging_page.positions(record)


@pytest.mark.slow("models")
def test_every_method_reduces_a_convolutional_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(scratch: Path, fitted: int, judging: int) -> Subject:
        dense, sets = model_of_directory(convnets.DIGITS), []
        for part in ("train", "held-out"):
            np.save(scratch / f"{part}.npy", load_part(part).images[:48])
            sets.append(images_for_model(dense.model, scratch / f"{part}.npy"))
        return Subject(name="EfficientNet-Lite0", dense=dense, inputs=sets[0], held_out=sets[1])

    monkeypatch.setattr(real_convnet, "efficientnet", small)
    monkeypatch.setattr(real_convnet, "SHARES", (0.8,))
    record = run(real_convnet.main, tmp_path / "r.json")
    rows = {row["method"]: row for row in record["rows"]}
    assert list(rows) == list(real_convnet.ROWS)
    assert all(row["macs_share"] <= 0.8 for row in rows.values())
    assert rows["best"]["error"] < rows["none"]["error"]
    assert "| best, by site, closed loop |" in convnet_table(record)
