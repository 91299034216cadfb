"""A reduction that does less than requested exits 2 and says why, unless --allow-partial is given."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from calib.store import save_moments
from corp_deploy.families.counting import macs
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.coverage import coverage, require_as_asked
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.sites import Refusal, TracedChannels
from ground.errors import BadInput
from perf.parity.link import measure_link
from perf.parity.parity import ImageSet, Parity
from perf.parity.tolerance import user_tolerance
from tests import tiny
from tests.command import invoked, refused

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qk norm": {"qk_norm": True},
    "norm inside": {"scale_mlp_norm": True},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a directory for each model and its moments, and images."""
    root = tmp_path_factory.mktemp("models")
    np.save(root / "images.npy", tiny.images(16))
    for family, kwargs in MODELS.items():
        checkpoint = tiny.checkpoint(**kwargs)
        save(checkpoint, root / family)
        images = images_for_model(checkpoint.model, root / "images.npy")
        save_moments(calibrate(checkpoint, images, batch_size=8), root / family / "m.safetensors")
    return root


def model_and_moments(home: Path, family: str) -> tuple[object, ...]:
    return "--model", home / family, "--moments", home / family / "m.safetensors"


def reduce(home: Path, family: str, output: Path, *words: object, code: int = 0) -> Result:
    fixed = ("reduce", *model_and_moments(home, family), "-o", output, "--align", "mlp=8,head=8")
    return invoked(*fixed, *words, code=code)


STAYS = "blocks.1.attn.v: queries and keys stay: layer_norm in blocks.1.attn.q_norm"


@pytest.mark.parametrize(
    ("words", "verdict", "reason"),
    [
        (("--attn", 0.5), "0 of 2 sites reduced", "--heads square"),
        (("--mlp", 0.5, "--attn", 0.5), "2 of 4 sites reduced", STAYS),
    ],
)
def test_smaller_reduction_than_requested_is_refused(
    home: Path, tmp_path: Path, words: tuple[object, ...], verdict: str, reason: str
) -> None:
    refused(reduce(home, "qk norm", tmp_path / "r", *words, code=2), verdict, reason, "--allow-partial")
    assert not (tmp_path / "r").exists()
    allowed = reduce(home, "qk norm", tmp_path / "r", *words, "--allow-partial", "--json")
    covered = json.loads(allowed.stdout)["coverage"]
    assert (covered["verdict"], len(covered["refused"])) == (verdict, 2)
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert config["lineage"]["reduction"]["coverage"] == covered


@pytest.mark.parametrize(
    ("family", "words", "verdict"),
    [
        ("plain", ("--mlp", 0.5, "--attn", 0.5, "--heads", "square"), "6 of 6 sites reduced"),
        ("plain", ("--mlp", 0.5, "--attn", 0.5), "4 of 6 sites reduced"),
        ("plain", ("--mlp", 0.5), "2 of 2 sites reduced"),
        ("plain", ("--mlp", 0, "--attn", 0), "0 of 6 sites reduced"),
        ("plain", ("--mlp", 0.5, "--preset", "vbp"), "2 of 2 sites reduced"),
        ("qk norm", ("--mlp", 0.5, "--attn", 0.5, "--heads", "square"), "4 of 4 sites reduced"),
        ("norm inside", ("--attn", 0.5), "2 of 4 sites reduced"),
        ("norm inside", ("--macs", 0.95, "--images", "images.npy"), "of 4 sites reduced"),
        ("plain", ("--mlp", 0.5, "--attn", 0.5, "--heads", "auto", "--images", "images.npy"), "of 6 sites reduced"),
    ],
)
def test_requested_reduction_is_done_and_counted(
    home: Path, tmp_path: Path, family: str, words: tuple[object, ...], verdict: str
) -> None:
    located = [home / word if word == "images.npy" else word for word in words]
    output = " ".join(reduce(home, family, tmp_path / "r", *located).stdout.split())
    assert f"reduced model written, {verdict}" in output or verdict.startswith("of")
    assert verdict in output


def test_reduction_without_effect_is_refused(home: Path, tmp_path: Path) -> None:
    words = ("--attn", 0.3, "--align", "head=16")
    nothing = reduce(home, "plain", tmp_path / "r", *words, code=2)
    refused(nothing, "nothing would be removed, 0 of 4 sites reduced", "rounded to multiples (head 16)")
    reduce(home, "plain", tmp_path / "r", *words, "--allow-partial")
    found = sites_of(tiny.checkpoint().model)
    keeps = method_from_preset("vbp", attention_sparsity=0.5)
    with pytest.raises(BadInput, match="this preset's method reduces MLPs only"):
        require_as_asked(coverage(found, keeps, {}, by_site=False), keeps)


def test_refused_site_counts_if_requested() -> None:
    plain = sites_of(tiny.checkpoint(depth=1).model)
    kinds = {"blocks.1.attn.qk": TracedPairs.kind, "blocks.1.mlp": TracedChannels.kind}
    refused = tuple(Refusal(name=name, reason="block is odd", kind=kind) for name, kind in kinds.items())
    found = replace(plain, refused=refused)
    method = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5)
    covered = coverage(found, method, {"blocks.0.mlp": 96, "blocks.0.attn.qk": 24}, by_site=False)
    assert covered.verdict == "2 of 5 sites reduced"
    assert covered.refused == dict.fromkeys(kinds, "block is odd")
    mlp_alone = method_from_preset("best", mlp_sparsity=0.5)
    assert coverage(found, mlp_alone, {"blocks.0.mlp": 96}, by_site=False).verdict == "1 of 2 sites reduced"
    assert coverage(found, method, {"blocks.0.mlp": 96}, by_site=True).left == ("blocks.0.attn.qk", "blocks.0.attn.v")


def test_sweep_reports_sites_that_cannot_be_reduced(home: Path, tmp_path: Path) -> None:
    words = ["sweep", *model_and_moments(home, "qk norm"), "--images", home / "images.npy"]
    more = ["--sparsity", 0.5, "--preset", "best", "--align", "mlp=8,head=8", "--min-agreement", 0.01]
    done = invoked(*words, *more, "-o", tmp_path / "s")
    assert "2 sites can't be reduced as asked" in done.stderr
    assert "--mlp 0.5 --attn 0.5 --allow-partial --align mlp=8,head=8 (" in " ".join(done.stdout.split())
    (trial,) = json.loads((tmp_path / "s" / "sweep.json").read_text())["trials"]
    assert (trial["sites_reduced"], trial["sites_refused"]) == (2, 2)


ALIGNED, PARTS = ("--align", "mlp=8,head=8"), ("--sparsity", 0.5, "--parts")


@pytest.mark.parametrize(
    ("family", "words", "needs_images"),
    [
        ("qk norm", (*PARTS, "attn", "--preset", "best", "--heads", "square", "--align", "head=8"), False),
        ("plain", (*PARTS, "mlp", "--preset", "corp"), False),
        pytest.param(
            "plain",
            (*PARTS, "mlp", "--preset", "fold", "--calibration-images", "images.npy", *ALIGNED),
            True,
            marks=pytest.mark.slow("models"),
        ),
    ],
)
def test_command_printed_by_sweep_reproduces_its_model(
    family: str, words: tuple[object, ...], needs_images: bool, home: Path, tmp_path: Path
) -> None:
    """The command names the images if the reduction needs them."""
    fixed, images = model_and_moments(home, family), home / "images.npy"
    located = [images if word == "images.npy" else word for word in words]
    swept = invoked("sweep", *fixed, "--images", images, *located, "--min-agreement", 0, "-o", tmp_path / "s")
    printed = " ".join(swept.stdout.split()).partition("agreement: ")[2].partition(" (")[0].split()
    assert not needs_images or printed[-2:] == ["--images", str(images)]
    invoked("reduce", *fixed, *printed, "-o", tmp_path / "r")
    trial = min(json.loads((tmp_path / "s" / "sweep.json").read_text())["trials"], key=lambda each: each["macs"])
    assert macs(load_checkpoint(tmp_path / "r").model) == trial["macs"]


def test_report_contains_the_coverage_verdict(home: Path, tmp_path: Path) -> None:
    reduce(home, "qk norm", tmp_path / "reduced", "--mlp", 0.5, "--attn", 0.5, "--allow-partial")
    reference = np.random.default_rng(0).standard_normal((8, 7))
    link = measure_link(
        name="whole", kind="whole", reference="dense", candidate="reduced", reference_rows=reference,
        candidate_by_batch={4: reference}, tolerance=user_tolerance(max_error=0.1),
    )  # fmt: skip
    parity = Parity(images=ImageSet(count=8, digest="0"), links=(link,))
    (tmp_path / "parity.json").write_text(json.dumps(parity.to_json()))
    for suffix in (".html", ".md"):
        report = tmp_path / f"report{suffix}"
        invoked("report", tmp_path, "-o", report)
        assert "2 of 4 sites reduced." in report.read_text().replace("\N{NO-BREAK SPACE}", " ").replace("&nbsp;", " ")
