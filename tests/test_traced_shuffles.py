"""Channels that are shuffled and split in two, of which uneven parts are left."""

from pathlib import Path

import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from corp_deploy.families.architecture import Preprocessing
from corp_deploy.families.counting import macs
from corp_deploy.families.custom_modules import architecture_of
from corp_deploy.families.family import sites_of
from corp_deploy.families.trusted_code import Code, trusting_code
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.inputs import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint

CHANNELS, SIZE = 12, 8
CODE = """
from tests.test_traced_shuffles import Shuffled

def make():
    return Shuffled()
"""


class Unit(nn.Module):
    """ShuffleNet V2's (arXiv 1807.11164, figure 3c)."""

    def __init__(self) -> None:
        super().__init__()
        half = CHANNELS // 2
        self.branch = nn.Sequential(nn.Conv2d(half, half, 1), nn.ReLU(), nn.Conv2d(half, half, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        out = torch.cat((left, self.branch(right)), dim=1)
        mixed: Tensor = out.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return mixed


class Shuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input_size = (3, SIZE, SIZE)
        self.stem, self.units = nn.Conv2d(3, CHANNELS, 1), nn.Sequential(Unit(), Unit(), Unit())
        self.last, self.head = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Linear(CHANNELS, 4)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.last(self.units(self.stem(images)))).mean((2, 3)))
        return out


@pytest.mark.slow("graph")
def test_shuffled_channels_are_removed_wherever_they_land(tmp_path: Path) -> None:
    """Reduced, saved, loaded and exported; every site loses channels, and with `best` less is lost than without."""
    architecture = architecture_of(Code(file="own.py", function="make", source=CODE), {}, Preprocessing())
    with trusting_code(True):
        dense = dense_from_architecture(architecture)
        images = torch.randn(48, 3, SIZE, SIZE)
        save_file({"images": images}, tmp_path / "images.safetensors")
        checkpoint = Checkpoint(model=dense, architecture=architecture, lineage={})
        moments = calibrate(checkpoint, images_for_model(dense, tmp_path / "images.safetensors"), batch_size=8)
        errors = dict[str, float]()
        for preset in ("none", "best"):
            reduction = reduce(
                dense,
                moments,
                method_from_preset(preset, mlp_sparsity=0.5, conv_sparsity=0.5, align_hidden=1, align_conv=1),
            )
            assert not [note for note in reduction.notes if "kept" in note], reduction.notes
            assert len(reduction.sites) == len(sites_of(dense).every)
            assert macs(reduction.model) < 0.6 * macs(dense)
            wanted = dense(images).detach()
            errors[preset] = float((reduction.model(images) - wanted).norm() / wanted.norm())
        assert errors["best"] < errors["none"], errors
        save(Checkpoint(model=reduction.model, architecture=architecture, lineage={}), tmp_path / "reduced")
        loaded = load_checkpoint(tmp_path / "reduced")
        torch.testing.assert_close(loaded.model(images), reduction.model(images))
        export_checkpoint(loaded, tmp_path / "model.onnx", precision="fp32")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (given,) = session.run(None, {session.get_inputs()[0].name: images[:5].numpy()})
    torch.testing.assert_close(torch.from_numpy(given), reduction.model(images[:5]), rtol=1e-4, atol=1e-5)
