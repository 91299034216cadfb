"""`inspect` of models that no family knows: their sites, what goes with each, and what stays for which reason."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from corp_deploy.cli import main
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.store.checkpoint import dense_from_architecture
from ground.errors import BadInput
from tests.traced_examples import CODE, DENSENET, PVT

DIM, HIDDEN, HEADS = 48, 192, 3


def inspected(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(main, ["inspect", *words, "--json"])
    assert result.exit_code == 0, result.output
    record: dict[str, object] = json.loads(result.stdout)
    return record


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    (tmp_path / "own.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return ("--model", "module:own.py:make", "--trust-code")


def test_a_module_that_declares_nothing_has_its_sites(own: Sequence[str]) -> None:
    record = inspected(*own)
    sites = {row["site"]: row for row in record["sites"]}  # type: ignore[attr-defined]
    blocks = [f"h.{block}{site}" for block in range(2) for site in (".attn.qk", ".attn.v", "")]
    assert list(sites) == ["stem", *blocks]
    assert sites["h.0"]["width"] == f"channels {HIDDEN}"
    assert sites["h.0"]["parameters"] == 2 * DIM * HIDDEN + HIDDEN
    assert sites["h.0"]["macs"] == 16 * 2 * DIM * HIDDEN
    assert sites["h.1.attn.v"]["width"] == f"values {DIM}, 16 in each of {HEADS}"
    # The values' rows of the fused layer and what they make of weights and of the output projection.
    assert sites["h.1.attn.v"]["macs"] == 16 * DIM * DIM + 16 * 16 * DIM + 16 * DIM * DIM
    assert sites["stem"]["macs"] == 256 * 27 * 24 + 16 * 24 * 16 * DIM
    rows = [*record["sites"], *record["fixed"]]  # type: ignore[misc]
    for figure in ("parameters", "macs"):
        assert sum(row[figure] for row in rows) == record[figure]
    reasons = {stay["reason"]: stay["layers"] for stay in record["stays"]}  # type: ignore[attr-defined]
    assert reasons["it is what the model gives"] == ["head"]
    assert "stem.3" in reasons["layer_norm in h.0.ln_1 (LayerNorm) mixes it"]


def test_a_name_needs_no_weights_to_be_looked_at() -> None:
    record = inspected("--model", PVT.name, "--model-kwargs", json.dumps(dict(PVT.kwargs)))
    widths = [row["width"] for row in record["sites"]]  # type: ignore[attr-defined]
    assert widths[:3] == ["queries and keys 16", "values 16", "channels 64"]
    assert widths[3:] == ["queries and keys 32, 16 in each of 2", "values 32, 16 in each of 2", "channels 128"]
    assert inspected("--model", "vit_tiny_patch16_224")["depth"] == 12


def test_a_module_of_a_size_that_can_not_be_told_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(5, 3)\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["inspect", "--model", "module:own.py:make", "--trust-code"])
    assert result.exit_code == 2
    assert "no size of images is known that it takes" in result.output
    assert "input_size = (3, height, width)" in result.output


def test_a_module_that_can_not_be_traced_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\nclass Odd(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(8, 8)\n\n    def forward(self, x):\n"
        "        x = self.layer(x.flatten(1)[:, :8])\n"
        "        return x if x.is_meta or x.sum().item() > 0 else -x\n\ndef make():\n    return Odd()\n"
    )
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["inspect", "--model", "module:own.py:make", "--trust-code"])
    assert result.exit_code == 2, result.output
    assert "Odd can't be traced" in result.output


def test_sums_hold_for_a_model_of_maps() -> None:
    record = inspection_of_model(dense_from_architecture(DENSENET))
    for figure in ("parameters", "macs"):
        assert sum(row[figure] for row in (*record["sites"], *record["fixed"])) == record[figure]
    with pytest.raises(BadInput, match="is built by no family of this name"):
        dense_from_architecture(Architecture(name="any", family="traced"))
