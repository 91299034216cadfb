"""Products in float16 by way of float32: what tensor cores give, held against exact arithmetic."""

import pytest
import torch
from torch import Tensor, nn

from corp_deploy.proof.half_products import HalfProducts

LAYERS = {
    "linear": (nn.Linear(300, 7), (5, 300)),
    "convolution": (nn.Conv2d(6, 4, 3, padding=1, groups=2), (2, 6, 5, 5)),
    "attention": (nn.MultiheadAttention(12, 3, batch_first=True), (2, 5, 12)),
}


def answered(layer: nn.Module, x: Tensor) -> Tensor:
    out = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_what_comes_out_is_the_exact_product_rounded(name: str) -> None:
    layer, shape = LAYERS[name]
    half, x = layer.half().eval(), torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    with HalfProducts():  # type: ignore[no-untyped-call]
        given = answered(half, x)
    exact = answered(half.double(), x.double())
    assert given.dtype == torch.float16
    torch.testing.assert_close(given.double(), exact, rtol=2e-3, atol=2e-3 if name == "attention" else 1e-3)


@torch.no_grad()
def test_a_single_product_is_rounded_once() -> None:
    a, b = (torch.randn(9, 9, generator=torch.Generator().manual_seed(seed)).half() for seed in (0, 1))
    with HalfProducts():  # type: ignore[no-untyped-call]
        given = a @ b
    assert torch.equal(given, (a.float() @ b.float()).half())
    assert (given.double() - a.double() @ b.double()).abs().max() <= 2.0**-10 * (a.double() @ b.double()).abs().max()


@torch.no_grad()
def test_other_types_are_left_alone() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    with HalfProducts():  # type: ignore[no-untyped-call]
        assert torch.equal(x @ x.T, torch.mm(x, x.T))
        assert (x.bfloat16() @ x.T.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
def test_what_overflows_float16_is_infinite_as_it_is_there() -> None:
    big = torch.full((2, 64), 200.0).half()
    with HalfProducts():  # type: ignore[no-untyped-call]
        assert torch.isinf(big @ big.T).all()
