"""Real weights are packed small, and on a GPU reduced, polished and judged as the commands would do it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.gpu import real
from benchmarks.gpu.page_variants import real as page_of
from benchmarks.gpu.record import Record
from benchmarks.gpu.run import main
from benchmarks.gpu.setting import Setting
from benchmarks.real import packed
from benchmarks.real.head import SaliencyHead
from benchmarks.real.measures import relative_error
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from ground.errors import Missing
from tests import tiny

Row = dict[str, Any]
KWARGS = {"img_size": 32, "patch_size": 8, "num_classes": 0}


def pictures(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Blurred noise [N,3,32,32], normalised, which JPEG leaves about as it is."""
    noise = np.random.default_rng(seed).uniform(0, 255, (count, 4, 4, 3)).astype(np.uint8)
    large = [np.asarray(Image.fromarray(each).resize((32, 32), Image.Resampling.BICUBIC)) for each in noise]
    return packed.normalised(np.stack(large).transpose(0, 3, 1, 2)).numpy()


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make real` leaves, of a tiny model whose blocks all matter."""
    directory = tmp_path_factory.mktemp("real") / "ready"
    directory.mkdir()
    model = tiny.checkpoint(**KWARGS).model
    for name, parameter in model.named_parameters():
        if name.endswith(".gamma"):
            parameter.data.fill_(0.3)
    save_file(model.state_dict(), directory / "dinov2_s.safetensors")
    torch.manual_seed(0)
    save_file(SaliencyHead((48, 16, 8), patch=8).state_dict(), directory / "head.safetensors")
    for name, count, groups in (("calib", 24, 8), ("held", 6, 2)):
        np.save(directory / f"{name}.npy", pictures(count, seed=count))
        names = [f"{name}-{position % groups}.jpg" for position in range(count)]
        (directory / f"{name}_groups.json").write_text(json.dumps(names))
    return directory


@pytest.fixture(scope="module")
def folder(ready: Path) -> Path:
    packed.pack(ready, ready.with_name("packed"), tiny.checkpoint(**KWARGS).architecture)
    return ready.with_name("packed")


def test_what_is_unpacked_is_what_was_packed_but_for_rounding(ready: Path, folder: Path) -> None:
    found = packed.unpack(folder)
    dense = tiny.checkpoint(**KWARGS)
    for name, tensor in found.dense.model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, tensor.half().float()), name
    state = load_file(ready / "dinov2_s.safetensors")
    for name, tensor in state.items():
        torch.testing.assert_close(found.dense.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-6)
    assert found.dense.architecture == dense.architecture
    assert not any(parameter.requires_grad for parameter in found.dense.model.parameters())
    for crops, name in ((found.calibration, "calib"), (found.held_out, "held")):
        images = np.load(ready / f"{name}.npy")
        assert relative_error(packed.normalised(crops.pixels), torch.from_numpy(images)) < 0.1
        assert list(crops.photographs) == json.loads((ready / f"{name}_groups.json").read_text())


def test_packing_takes_the_place_of_what_was_packed_and_absence_is_told(
    ready: Path, folder: Path, tmp_path: Path
) -> None:
    (folder / "held" / "9999.jpg").write_bytes(b"")
    packed.pack(ready, folder, tiny.checkpoint(**KWARGS).architecture)
    assert not (folder / "held" / "9999.jpg").exists()
    assert not folder.with_name("packed.partial").exists()
    said = CliRunner().invoke(packed.main, ["--ready", str(tmp_path), "--output", str(tmp_path / "out")])
    assert (said.exit_code, "no real weights here" in said.output) == (1, True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(Missing, match=r"python -m benchmarks\.real\.packed"):
        packed.unpack(tmp_path)


@pytest.fixture(scope="module")
def record(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Row:
    """The part of a small run."""
    output = tmp_path_factory.mktemp("out")
    words = ["--output", str(output), "--small", "--device", "cpu", "--only", "real", "--packed", str(folder)]
    main(words, say=lambda line: None)
    written: Row = json.loads((output / "gpu_real.json").read_text())
    return written


@pytest.mark.slow("training")
def test_every_reduction_and_polish_is_made_and_judged(record: Row) -> None:
    assert {row["status"] for row in record["rows"]} == {"done"}
    first, *others = record["rows"]
    assert (first["images"], first["photographs"], first["held_out_images"], first["held_out_photographs"]) == (
        24,
        8,
        6,
        2,
    )
    reductions = [row for row in others if row["row"] == "reduction"]
    assert {(row["widths"], row["loop"]) for row in reductions} == {
        (widths, loop) for widths in ("uniform", "by site") for loop in ("open", "closed")
    }
    for row in reductions:
        assert row["macs_share"] <= 0.8
        assert 0.0 < row["class_error"] < 1.0
        assert ("closed loop" in row["efforts"]) == (row["loop"] == "closed")


def test_a_polish_has_a_curve_and_starts_from_the_closed_loop(record: Row) -> None:
    start = next(row for row in record["rows"] if row["key"] == "by site closed loop 80% of the MACs")
    for how in ("block", "model"):
        row = next(row for row in record["rows"] if row["key"] == f"polish {how} 0.3 s 80% of the MACs")
        assert row["class_error_before"] == start["class_error"]
        assert row["macs_share"] == start["macs_share"]
        report = row["report"]
        assert report["error"] <= report["error_before"]
        assert all(len(part["curve"]) >= 1 for part in report["parts"])
        assert report["held_out"] + report["fitted"] == 24


def test_a_row_is_what_the_commands_give(folder: Path, record: Row, tmp_path: Path) -> None:
    setting = Setting(device="cpu", small=True, everything=False, cache=tmp_path, packed=folder)
    subject = real.Subject(setting)
    model = subject.reduced(real.Case(share=0.8, widths="by site", loop="open"))
    assert subject.groups_B.unique().numel() == 8
    with torch.inference_mode():
        tokens = {
            name: net.get_submodule("norm")(_before_norm(net, subject.held_out))
            for name, net in (("dense", subject.dense.model), ("reduced", traced_model.exportable(model)))
        }
    expected = relative_error(tokens["reduced"][:, 0], tokens["dense"][:, 0])
    row = next(row for row in record["rows"] if row["key"] == "by site open loop 80% of the MACs")
    assert row["class_error"] == pytest.approx(expected, rel=1e-4)
    assert row["macs_share"] == macs(model) / macs(subject.dense.model)


def _before_norm(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    held: list[torch.Tensor] = []
    hook = model.get_submodule("norm").register_forward_pre_hook(lambda _, given: held.append(given[0]))
    model(images)
    hook.remove()
    return held[0]


def test_the_page_tells_all_of_it(record: Row) -> None:
    text = page_of(record)
    assert "Fitted to 24 crops of 8 photographs, judged on 6 of 2 others" in text
    rows = [row for row in record["rows"] if row["row"] == "reduction"]
    for row in rows:
        assert f"| 80% | {row['widths']} | {row['loop']} loop | {row['class_error']:.4f} |" in text
    assert text.count("| 80% | model |") == text.count("| 80% | block |") == 1


def test_without_what_was_packed_every_row_says_so(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path), "--small", "--device", "cpu", "--only", "real"]
    main([*words, "--packed", str(tmp_path / "none")], say=lambda line: None)
    rows = json.loads((tmp_path / "gpu_real.json").read_text())["rows"]
    assert {row["status"] for row in rows} == {"absent"}
    assert all("nothing packed here" in row["reason"] for row in rows)


def test_one_share_with_its_polish_comes_first_and_all_is_estimated(folder: Path, tmp_path: Path) -> None:
    full = Setting(device="cpu", small=False, everything=False, cache=tmp_path, packed=folder)
    tasks = real.tasks(full, Record(tmp_path / "x.json", "real", {}, {}))
    assert len({task.key for task in tasks}) == len(tasks)
    assert [task.key for task in tasks][5] == "polish model 60 s 66% of the MACs"
    assert all(task.estimate_s > 0.0 for task in tasks)
