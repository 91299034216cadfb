"""Merged models held to their real graphs: what merges by rounding alone is judged apart, a fault isn't."""

from pathlib import Path

import numpy as np
import pytest

from corp_deploy.families import traced_model
from corp_deploy.proof.candidates import candidate_from_path
from corp_deploy.proof.chain import prove
from corp_deploy.proof.inputs import inputs_from_set
from corp_deploy.proof.link_rules import ParityLimits
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.inputs import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.merging import Merging

from . import tiny

SCHEDULE = (2, 4)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, dense = tmp_path_factory.mktemp("margins"), tiny.checkpoint()
    save(dense, folder / "dense")
    model = traced_model.with_merging(dense.model, Merging(schedule=SCHEDULE))
    merged = Checkpoint(model=model, architecture=dense.architecture, lineage={})
    save(merged, folder / "merged")
    for precision in ("fp32", "fp16"):
        export_checkpoint(merged, folder / f"{precision}.onnx", precision=precision)
    pixels = tiny.images(24)
    pixels[5] = 0.3  # one colour all over: all patches are alike but for where they are
    np.save(folder / "images.npy", pixels)
    return folder


@pytest.mark.slow("graph")
def test_a_merged_model_is_proved_to_its_graphs(home: Path) -> None:
    dense = load_checkpoint(home / "dense")
    given = inputs_from_set(images_for_model(dense.model, home / "images.npy"))
    steps = [candidate_from_path(home / name) for name in ("merged", "fp32.onnx", "fp16.onnx")]
    proof = prove(dense, steps, given, batches=(1, 8), limits=ParityLimits(max_error=1.0)).parity
    assert proof.verdict == "PASS", proof.line
    merged, exact_link, half, _ = proof.links
    assert (merged.ties, half.ties) == (None, None)
    assert exact_link.ties is not None
    assert exact_link.ties.inputs == 24
    assert "the merged model's own FP16 error" in half.tolerance.rule
    assert "what FP16 does to the dense model: other tokens are merged there" in half.reason
