"""Layers whose weights half precision can't hold stay in FP32 where --auto looks for what breaks."""

import torch
from torch import Tensor, nn

from corp_deploy.families.family import input_ports
from corp_deploy.invocation.export_choice import ExportOptions
from corp_deploy.proof.kept_sites import find_sites_to_keep
from corp_deploy.store.module_model import checkpoint_from_module
from export.graph.precision import modules_beyond
from ground.precision import BFLOAT16, FLOAT16


class Large(nn.Module):
    """A weight beyond half precision, of a channel that is small."""

    input_size = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.large, self.head = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        with torch.no_grad():
            self.cut.weight[0].zero_()
            self.cut.bias[0] = 1e-4  # type: ignore[index]
            self.large.weight[0, 0] = 1e5

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.large(self.cut(images).flatten(1)))
        return scores


def test_auto_keeps_overflowing_and_named_layers_in_float32() -> None:
    dense = checkpoint_from_module(Large())
    assert modules_beyond(dense.model, FLOAT16) == ("large",)
    assert modules_beyond(dense.model, BFLOAT16) == ()
    feeds = {input_ports(dense.model)[0].name: torch.randn(8, 3, 8, 8).numpy()}
    assert find_sites_to_keep(dense, dense, feeds, opset=None).kept == ("large",)
    assert find_sites_to_keep(dense, dense, feeds, opset=None, keep_fp32=("head",)).kept == ("head", "large")


def test_patterns_combine_with_auto() -> None:
    options = ExportOptions(precision=("mixed",), auto=True, keep_fp32=("head",))
    assert options.auto
    assert options.keep_fp32 == ("head",)
