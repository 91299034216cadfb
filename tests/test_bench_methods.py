"""The benchmarks of quality run, on sizes that take seconds, and their records and pages agree."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness import Record
from benchmarks.pages import heads_page
from benchmarks.pages.accuracy_page import hard_vit as table
from benchmarks.pages.convnets_page import convnets as convnets_page
from benchmarks.pages.levers_page import levers
from benchmarks.pages.methods_page import page
from benchmarks.quality import convnets, hard_training, hard_vit, methods, polish, rotation
from benchmarks.quality import levers as of_levers
from benchmarks.quality.hard_training import correlation, unevenness
from benchmarks.quality.layer_polish import Subject
from benchmarks.quality.levers import LEVERS, cells
from benchmarks.quality.methods_variants import KINDS, VARIANTS, Kind, Variant
from benchmarks.quality.procedural_images import CLASSES, made
from corp_deploy.polish import options
from corp_deploy.polish.options import PolishOptions
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.dense_model import model_of_directory
from corp_deploy.store.inputs import images_for_model
from tests.refusals import rejects

from . import tiny
from .test_corp_rotation import moments

pytestmark = pytest.mark.nightly

WIDER = {**tiny.ARCHITECTURE.kwargs, "embed_dim": 96, "depth": 1}


@pytest.mark.slow("training")
def test_a_quick_run_writes_a_record_and_its_page(tmp_path: Path) -> None:
    methods.main(["--quick", "--threads", "1", "--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "out")])
    record = json.loads((tmp_path / "out" / "methods.json").read_text())
    assert (record["version"], record["kind"]) == (1, "methods-benchmark")
    rows = {(row["method"], row["kind"]): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == sum(len(method.kinds) for method in VARIANTS)
    for kind in KINDS:
        here = [row for (_, row_kind), row in rows.items() if row_kind == kind and not row["component"]]
        assert len({(row["hidden"], row["qk"], row["v"]) for row in here}) == 1, kind
    assert rows["best", "joint"]["relative_error"] < rows["none", "joint"]["relative_error"]
    written = (tmp_path / "out" / "methods.md").read_text()
    assert written == page(record)
    assert f"{rows['best', 'joint']['relative_error']:.4f}" in written


def test_a_row_is_made_again_when_its_method_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other, whether a run stopped or is repeated."""
    stale, asked = ("grail", "fold", "best, closed loop"), list[str]()
    done = [
        {"method": method.name, "kind": kind, "sparsity": sparsity}
        | {"digest": "of old" if method.name in stale else method.digest()}
        for method, kind, sparsity in methods.plan((0.5,))
    ]
    (tmp_path / "rows-digits-0-24.json").write_text(json.dumps(done))

    def make(_: object, method: Variant, kind: Kind, sparsity: float) -> methods.Row:
        asked.append(method.name)
        figures = dict.fromkeys(("accuracy", "agreement", "relative_error"), 0.0)
        return methods.Row(
            model="digits", seed=0, kind=kind, sparsity=sparsity, method=method.name, component=method.component,
            hidden=8, qk=4, v=4, digest=method.digest(), **figures,
        )  # fmt: skip

    monkeypatch.setattr(methods.Bench, "__init__", lambda *_: None)
    monkeypatch.setattr(methods.Bench, "row", make)
    subject = methods.digits(tmp_path, 10)
    rows = methods.measured(subject, 0, (0.5,), 24, tmp_path)
    assert (sorted(asked), len(rows)) == (["best, closed loop"] * 3 + ["fold", "grail"], len(done))
    monkeypatch.setattr(methods, "Bench", None)  # nothing is missing, so nothing is calibrated
    assert methods.measured(subject, 0, (0.5,), 24, tmp_path) == rows


@pytest.mark.parametrize(("sparsity", "hidden", "head"), [(0.5, 192, 16), (0.875, 48, 4)])
def test_widths_are_the_same_for_every_method(sparsity: float, hidden: int, head: int) -> None:
    model = tiny.timm_model("vit_tiny_patch16_224", **WIDER)
    for variant in VARIANTS:
        asked = uniform_widths(model, methods.method_of(variant, variant.kinds[-1], sparsity))
        assert asked["blocks.0.mlp"] == hidden, variant.name
        is_joint, is_square = "joint" in variant.kinds, variant.choices().geometry == "square"
        assert asked.get("blocks.0.attn.qk") == (3 * head if is_joint else None), variant.name
        assert asked.get("blocks.0.attn.v") == (3 * head if is_square else None), variant.name


def test_procedural_images_follow_from_their_number_alone() -> None:
    few, more = made("train", 3), made("train", 40)
    np.testing.assert_array_equal(few.images, more.images[:3])
    assert (few.images != made("held-out", 3).images).any()
    assert more.images.shape == (40, 3, 64, 64)
    assert more.images.dtype == np.float32
    assert float(np.abs(more.images).max()) < 3.0
    assert len(CLASSES) == 24
    assert len(set(made("train", 300).labels.tolist())) == 24
    with pytest.raises(ValueError, match="got 'test'"):
        made("test", 1)


@pytest.mark.slow("training")
def test_every_way_is_measured_once_at_equal_widths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convnets, "SEEDS", (0,))
    record = Record(tmp_path / "record.json", convnets.KIND, {"calibration_images": 64})
    dense = model_of_directory(convnets.DIGITS)
    convnets.add_methods(record, dense, (0.5,), 64)
    rows = record["rows"]
    assert [row["way"] for row in rows] == [way.name for way in convnets.WAYS]
    (removed,) = {row["removed_of_model"] for row in rows}
    assert removed == pytest.approx(0.5, abs=0.05)
    errors = {row["way"]: row["relative_error"] for row in rows}
    assert errors["best, closed loop"] < 0.5 * errors["grail, symmetric closed loop"]
    assert errors["best"] < 0.5 * errors["grail"] < errors["none"]
    monkeypatch.setattr(convnets, "reduced", pytest.fail)
    again = Record(tmp_path / "record.json", convnets.KIND, {"calibration_images": 64})
    convnets.add_methods(again, dense, (0.5,), 64)  # all are there
    text = convnets_page(json.loads((tmp_path / "record.json").read_text()))
    assert "| best, closed loop |" in text
    assert "means of 1 choices of images" in text


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    home = tmp_path_factory.mktemp("bench")
    model = tiny.checkpoint().model.requires_grad_(False)
    inputs, judging = (tiny.opened(home / f"{seed}.npy", tiny.images(24, seed=seed), model) for seed in (0, 1))
    return Subject(name="tiny", dense=model, inputs=inputs, judging=judging, align=8, newton=(), adam=())


def test_int8_has_255_values_of_one_scale() -> None:
    x = torch.tensor([-2.0, -1.0, 0.004, 0.009, 1.3, 5.0])
    got = rotation.rounded(x, 2.0)
    assert got.tolist() == pytest.approx([-2.0, -1.0079, 0.0, 0.01575, 1.3071, 2.0], abs=1e-4)


def test_a_rotation_is_measured_in_every_precision(subject: Subject) -> None:
    plain, turned = rotation.rows_of(subject, moments(), 0.5)
    assert (plain["rotates"], turned["rotates"], plain["width"], plain["fp32"]) == (False, True, 8, 0.0)
    assert 0.0 < turned["fp32"] < 1e-5
    for row in (plain, turned):
        assert 1e-5 < row["fp16"] < 1e-2
        assert all(1e-4 < row[name] < 0.1 for name in ("int8_logits", "int8_qk", "int8_v"))
    assert "tiny, heads of 8" in heads_page.rotation({"rows": [plain, turned]})


def test_a_row_has_the_errors_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polish, "VARIANTS", {"model": PolishOptions(how="model", steps=5, batch_size=4)})
    dense = tiny.checkpoint()
    np.save(tmp_path / "images.npy", tiny.images(24))
    judged = torch.from_numpy(tiny.images(8, seed=5))
    subject = polish.Subject(
        name="tiny", dense=dense, inputs=images_for_model(dense.model, tmp_path / "images.npy"), groups_B=None,
        method=method_from_preset("best", mlp_sparsity=0.5, align_hidden=8), closed_loop=True,
        error=lambda candidate: polish.error(polish.outputs(dense.model, judged), judged, candidate),
    )  # fmt: skip
    record = Record(tmp_path / "record.json", polish.KIND, {"threads": 1})
    for _ in range(2):  # the second time the record has it
        polish.rows_of(subject, ["model"], record, None)
    (row,) = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert subject.error(dense.model) == 0.0
    assert row["error_before"] == subject.error(subject.reduced())
    assert row["held_out_error"] <= row["held_out_error_before"]
    assert (row["steps"], row["parts"][0]["curve"][-1]["step"]) == (5, 5)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("kind", of_levers.KINDS)
def test_a_cell_is_an_error_or_a_reason(kind: str) -> None:
    asked = ("`--preset best`", "`--macs`", "`--sparse 2:4`", "`--rescale`", "`--merge-tokens`", "BF16")
    rows = list(cells(kind, {name: LEVERS[name] for name in asked}))
    by_lever = {row["lever"]: row for row in rows}
    for lever in ("`--preset best`", "`--macs`", "`--sparse 2:4`", "BF16"):
        assert by_lever[lever]["error"] < 0.7, (kind, by_lever[lever])
    is_of_tokens = of_levers.KINDS[kind].share in ("mlp", "attn")
    assert ("reason" in by_lever["`--rescale`"]) is is_of_tokens or kind == "squeeze and excitation"
    assert is_of_tokens or "no attention of tokens" in by_lever["`--merge-tokens`"]["reason"]
    page = levers({"rows": rows})
    for row in rows:
        line = next(line for line in page.splitlines() if line.startswith(f"| {row['lever']}"))
        told = line.split("|")[2].strip()
        assert re.fullmatch(r"\[\d+\]" if "reason" in row else r"[\d.e-]+", told), line


def test_the_terms_that_make_it_hard_are_what_they_say() -> None:
    assert unevenness(torch.full((2, 5), 3.0)) == 0.0
    assert unevenness(torch.tensor([1.0, float(np.e) ** 2])) == pytest.approx(1.0)
    values = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(0))
    values[..., 3] = values[..., 0] * 2.0 + 1.0
    expected = 0.0
    for group in values.double().numpy():
        squares = np.corrcoef(group, rowvar=False) ** 2
        expected += np.mean([squares[i, j] for i in range(4) for j in range(4) if i != j]) * 4 / 2
    assert float(correlation(values)) == pytest.approx(expected, rel=1e-4)


def test_figures_of_a_pair_of_models() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    dense = np.eye(2)[[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]]
    reduced = np.eye(2)[[0, 1, 1, 0, 0, 1, 1, 1, 1, 1]]
    found = hard_vit.figures(dense, reduced, labels)
    assert (found["only_dense_right"], found["only_reduced_right"], found["accuracy"]) == (3, 1, 0.7)
    assert found["agreement"] == 0.6
    assert found["relative_error"] == pytest.approx(np.sqrt(8 / 10))
    change = np.array([0, -1, -1, 1, -1, 0, 0, 0, 0, 0])  # of each image's being right
    half = 100 * 1.959964 * change.std() / np.sqrt(10)
    assert found["points"] == pytest.approx([-20.0, -20.0 - half, -20.0 + half], rel=1e-5)
    assert hard_vit.figures(dense, dense, labels)["points"] == [0.0, 0.0, 0.0]


@pytest.mark.slow("training")
def test_it_trains_reduces_by_every_method_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hard_training.ARCHITECTURE
    monkeypatch.setattr(hard_training, "ARCHITECTURE", replace(whole, kwargs={**whole.kwargs, "depth": 1}))
    monkeypatch.setattr(hard_training, "DEPTH", 1)
    monkeypatch.setattr(hard_training, "BATCH", 8)
    monkeypatch.setattr(options, "STEPS", {"none": 0, "layer": 1, "block": 2, "model": 2})
    monkeypatch.setattr(hard_vit, "SPARSITIES", (0.5,))
    once = hard_training.trained(tmp_path / "one", images=16, epochs=2)
    hard_training.train(tmp_path / "two.pt", images=16, epochs=2)
    dense = load_checkpoint(tmp_path / "one")
    assert once.architecture.kwargs["num_classes"] == 72
    held = torch.load(tmp_path / "two.pt", weights_only=True)["model"]
    assert all(torch.equal(value, held[name]) for name, value in dense.model.state_dict().items())

    subject = hard_vit.Subject(dense, made("train", 32), made("held-out", 12), tmp_path)
    path, setting = tmp_path / "record.json", hard_vit.setting(subject)
    hard_vit.measure(subject, Record(path, hard_vit.KIND, setting))
    record = Record(path, hard_vit.KIND, setting)
    rows = {row["method"]: row for row in record["rows"]}
    assert list(rows) == [way.name for way in hard_vit.WAYS]
    assert rows["best, closed loop"]["macs_share"] == rows["none"]["macs_share"] < 1.0
    assert rows["thorough"]["macs_share"] <= rows["none"]["macs_share"]
    assert rows["best"]["relative_error"] < rows["none"]["relative_error"]
    assert f"| thorough | {rows['thorough']['macs_share']:.2f} |" in table(record.content)

    monkeypatch.setattr(hard_vit.Subject, "row", None)  # nothing is missing, so nothing is reduced
    hard_vit.measure(subject, record)
    rejects("measured with another weights", Record, path, hard_vit.KIND, setting | {"weights": "others"})
