"""Outputs of traced models don't change when channels of streams and sites are reordered."""

import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families.traced_model import trace_model, tracing
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import dense_from_architecture
from corp_deploy.traced.models.layers import find_streams, reorder_groups, stream_scores
from tests import timm_models, tiny
from tests.refusals import rejects
from tests.traced_examples import PVT

SWIN = Architecture(
    name="swin_tiny_patch4_window7_224",
    kwargs={"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "num_classes": 7},
)


def model_of(name: str) -> nn.Module:
    if name in ("pvt", "swin"):
        model = dense_from_architecture(PVT if name == "pvt" else SWIN)
    else:
        architecture = timm_models.architecture(name)
        model = trace_model(tiny.timm_model(architecture.name, **architecture.kwargs), architecture)
    tiny.enliven(model, 0)
    return model.requires_grad_(False)


def outputs(model: nn.Module) -> Tensor:
    return tiny.ran(model, tiny.images(3))


@pytest.mark.parametrize("name", ["class token", "registers", "layer scale", "packed gate", "norms inside", "swin"])
def test_permuted_stream_gives_equal_outputs(name: str) -> None:
    model = model_of(name)
    new, found = model, find_streams(model)
    assert len(found) == (2 if name == "swin" else 1)
    for stream in found:
        order = torch.randperm(stream.size, generator=torch.Generator().manual_seed(0))
        new = reorder_groups(new, stream, order)
        span = stream.readers[0]
        before, after = model.get_parameter(span.name), new.get_parameter(span.name)
        assert not torch.equal(before, after)
        assert torch.equal(before.flatten().sort().values, after.flatten().sort().values)
    assert float((outputs(new) - outputs(model)).norm() / outputs(model).norm()) < 2e-6


def test_groups_inside_sites_are_permuted() -> None:
    model = model_of("pvt")
    new = model
    for site in tracing(model).analysis.sites:
        parts = torch.arange(site.size).view(site.parts, -1)  # heads are contiguous in these sites
        drawn = torch.randperm(parts.shape[1], generator=torch.Generator().manual_seed(1))
        if site.kind in ("channels", "values"):
            new = reorder_groups(new, site, parts[:, drawn].flatten())
    assert not torch.equal(new.state_dict()["stages.0.blocks.0.mlp.fc2.weight"],
                           model.state_dict()["stages.0.blocks.0.mlp.fc2.weight"])  # fmt: skip
    assert float((outputs(new) - outputs(model)).norm() / outputs(model).norm()) < 2e-6


def test_stream_scores_are_sums_over_reading_layers_behind_norms() -> None:
    """The layers are those of a plain ViT, including its head."""
    model = model_of("class token")
    state, by_hand = dict(model.named_parameters()), torch.zeros(48, dtype=torch.float64)
    pairs = [(f"blocks.{at}.{norm}", f"blocks.{at}.{layer}") for at in (0, 1)
             for norm, layer in (("norm1", "attn.qkv"), ("norm2", "mlp.fc1"))]  # fmt: skip
    for norm, layer in [*pairs, ("norm", "head")]:
        for row in state[f"{layer}.weight"].double():
            by_hand += (row * state[f"{norm}.weight"].double()).square()
    (stream,) = find_streams(model)
    torch.testing.assert_close(stream_scores(model, stream), by_hand)


def test_outputs_keep_their_order() -> None:
    rejects("no residual stream of which all writers and readers are known", find_streams, model_of("no classes"))
