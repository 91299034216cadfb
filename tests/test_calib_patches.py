"""calib.patches: what a convolution reads, times its weights, is what torch says it gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from calib.patches import patches
from calib.sites import PatchTaps
from ground.errors import BadInput


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def given_by(u_BNGU: Tensor, conv: nn.Conv2d) -> Tensor:
    """Patches times weights by group, [B,N,O]."""
    weight_GPU = conv.weight.flatten(1).unflatten(0, (conv.groups, -1))
    return torch.einsum("bngu,gpu->bngp", u_BNGU, weight_GPU).flatten(2)


sides = st.sampled_from([1, 2, 3, 4, 5, 7])


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.tuples(sides, sides),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    groups=st.sampled_from([1, 2, 6]),
    edges=st.tuples(*[st.integers(0, 3)] * 4),
)
def test_patches_times_weights_are_the_convolution(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    edges: tuple[int, int, int, int],
) -> None:
    conv = nn.Conv2d(6, 12, kernel, stride, 0, dilation, groups, bias=False).double()
    x_BCHW = random(2, 6, 20, 15)
    with torch.no_grad():
        expected = conv(functional.pad(x_BCHW, edges))
        u_BNGU = patches(x_BCHW, conv, edges)
        got = given_by(u_BNGU, conv)
    assert u_BNGU.shape == (2, expected[0, 0].numel(), groups, 6 // groups * kernel[0] * kernel[1])
    torch.testing.assert_close(got, expected.flatten(2).mT, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("padding", ["same", "valid", 0, 2, (1, 0)])
@pytest.mark.parametrize("kernel", [3, (2, 4)])
def test_without_edges_the_convolution_pads_itself(
    padding: str | int | tuple[int, int], kernel: int | tuple[int, int]
) -> None:
    conv = nn.Conv2d(4, 5, kernel, padding=padding, dilation=(1, 2), bias=False).double()
    x_BCHW = random(3, 4, 9, 11)
    with torch.no_grad():
        expected = functional.conv2d(x_BCHW, conv.weight, padding=padding, dilation=(1, 2))
        got = given_by(patches(x_BCHW, conv), conv)
    torch.testing.assert_close(got, expected.flatten(2).mT, rtol=1e-12, atol=1e-12)


def test_columns_are_by_channel_then_by_place() -> None:
    conv = nn.Conv2d(2, 1, 2)
    x_BCHW = torch.arange(8.0).view(1, 2, 2, 2)
    assert patches(x_BCHW, conv).flatten().tolist() == list(range(8))


def test_a_map_with_its_channels_last_has_the_same_patches() -> None:
    conv, x_BCHW = nn.Conv2d(4, 4, 3, 2, 1, groups=2), random(2, 4, 7, 7).float()
    last = x_BCHW.contiguous(memory_format=torch.channels_last)
    assert torch.equal(patches(last, conv), patches(x_BCHW, conv))


def test_only_zeros_may_be_put_around() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")
    with pytest.raises(BadInput, match=r"'reflect'.*zero padding alone"):
        patches(torch.zeros(1, 2, 4, 4), conv)
    with pytest.raises(BadInput, match=r"^stem: pads by 'reflect'"):
        PatchTaps(name="stem", output=conv)


@pytest.mark.parametrize(
    "channels_GR",
    [
        torch.tensor([[0, 1]]),
        torch.tensor([[1, 0], [0, 1]]),
        torch.tensor([[0, 0], [0, 1]]),
        torch.tensor([[0, 3], [0, 1]]),
        torch.tensor([[-1, 0], [0, 1]]),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(2, 1),
        torch.tensor([0, 1]),
    ],
)
def test_channels_that_are_not_of_the_groups_are_refused(channels_GR: Tensor) -> None:
    with pytest.raises(BadInput, match=r"^conv: channels of patches are .*int64 \[2, any\], sorted, of the 3"):
        PatchTaps(name="conv", output=nn.Conv2d(6, 2, 3, groups=2), channels_GR=channels_GR)


def test_edges_below_zero_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^conv: edges of \(0, -1, 0, 0\)"):
        PatchTaps(name="conv", output=nn.Conv2d(2, 2, 3), edges=(0, -1, 0, 0))
