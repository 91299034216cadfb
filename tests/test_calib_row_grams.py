"""calib.row_grams: blocks that share products are those of the patches themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from calib.patches import grid_of, padded, patches
from calib.products import Kernel
from calib.row_grams import (
    add_gram_by_rows_,
    by_row_columns,
    mirror_rows_,
    reorder_,
    row_patches,
    takes_every_row,
)


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).float()


def gram_by_rows(x_BCHW: Tensor, conv: nn.Conv2d, edges: tuple[int, int, int, int], kernel: Kernel) -> Tensor:
    """Of both of two equal batches, by group, in the order of the weights."""
    x_BCHW = padded(x_BCHW, conv, edges)
    v_GVHn = row_patches(x_BCHW, conv)
    order_U = by_row_columns(x_BCHW.shape[1] // conv.groups, conv.kernel_size)
    total_GUU = torch.zeros(conv.groups, len(order_U), len(order_U), dtype=torch.float64)
    there = range(edges[2], x_BCHW.shape[2] - edges[3])
    for total_UU, v_VHn in zip(total_GUU, v_GVHn, strict=True):
        for _ in range(2):
            add_gram_by_rows_(total_UU, v_VHn, conv, there, kernel)
        mirror_rows_(total_UU, conv.kernel_size[0])
        reorder_(total_UU, order_U.argsort())
    return total_GUU


def gram_of_patches(x_BCHW: Tensor, conv: nn.Conv2d, edges: tuple[int, int, int, int]) -> Tensor:
    u_BNGU = patches(x_BCHW.double(), conv, edges)
    return 2.0 * torch.einsum("bngu,bngv->guv", u_BNGU, u_BNGU)


sides = st.sampled_from([1, 2, 3, 4, 5])


@settings(max_examples=60, deadline=None)
@given(
    high=st.sampled_from([2, 3, 4, 5]),
    wide=sides,
    along=st.integers(1, 3),
    apart=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    edges=st.tuples(*[st.integers(0, 5)] * 4),
    kernel=st.sampled_from(["blas", "onednn"]),
)
def test_shared_products_give_the_gram_of_the_patches(
    high: int,
    wide: int,
    along: int,
    apart: int,
    groups: int,
    edges: tuple[int, int, int, int],
    kernel: Kernel,
) -> None:
    """Edges wider than the kernel too; whole numbers, so that any entry that is off by anything is seen."""
    conv = nn.Conv2d(4, 4, (high, wide), (1, along), 0, (apart, 1), groups)
    x_BCHW = whole_numbers(3, 4, 20, 8)
    assert takes_every_row(conv, grid_of(padded(x_BCHW, conv, edges), conv)[0])
    assert torch.equal(gram_by_rows(x_BCHW, conv, edges, kernel), gram_of_patches(x_BCHW, conv, edges))


@pytest.mark.parametrize("kernel", ["blas", "onednn"])
def test_wide_grams_of_many_places(kernel: Kernel) -> None:
    """More than one block row of products, and more places than one product may have."""
    conv, x_BCHW = nn.Conv2d(70, 1, 3, padding=1), whole_numbers(2, 70, 33, 40)
    edges = (1, 1, 1, 1)
    assert torch.equal(gram_by_rows(x_BCHW, conv, edges, kernel), gram_of_patches(x_BCHW, conv, edges))


def test_activations_with_a_mean_keep_float32_rounding() -> None:
    conv, edges = nn.Conv2d(70, 1, 3, padding=1), (1, 1, 1, 1)
    x_BCHW = torch.randn(4, 70, 28, 28, generator=torch.Generator().manual_seed(0)) + 3.0
    got, expected = gram_by_rows(x_BCHW, conv, edges, "blas"), gram_of_patches(x_BCHW, conv, edges)
    assert float((got - expected).abs().max()) < 2e-6 * float(expected.diagonal(dim1=1, dim2=2).mean())


@pytest.mark.parametrize(
    ("conv", "rows", "expected"),
    [
        (nn.Conv2d(2, 2, 3), 3, True),
        (nn.Conv2d(2, 2, 3), 2, False),  # no row that every place of the kernel comes over
        (nn.Conv2d(2, 2, 3, dilation=2), 4, False),
        (nn.Conv2d(2, 2, 3, stride=(1, 2)), 3, True),
        (nn.Conv2d(2, 2, 3, stride=(2, 1)), 9, False),
        (nn.Conv2d(2, 2, (1, 3)), 9, False),  # nothing to share
    ],
)
def test_where_blocks_share_products(conv: nn.Conv2d, rows: int, expected: bool) -> None:
    assert takes_every_row(conv, rows) is expected


def test_columns_change_their_order_and_back() -> None:
    order_U = by_row_columns(2, (3, 2))
    assert order_U.tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    before_UU = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    total_UU = before_UU.clone()
    reorder_(total_UU, order_U)
    assert torch.equal(total_UU, before_UU[order_U][:, order_U])
    reorder_(total_UU, order_U.argsort())
    assert torch.equal(total_UU, before_UU)
