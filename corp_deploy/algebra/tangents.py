"""How the outputs of an MLP and of an attention change with their first linear map. PURE; see gauss_newton.

Legend: B inputs, N tokens, X tokens of all inputs, H heads, Q query and key dimensions of a head, V value dimensions,
D inputs and a one, R rows of the first map, K inputs of the last map, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def with_one(x: Tensor) -> Tensor:
    """The inputs and a one, which carries the bias: [...,C] -> [...,D]."""
    return torch.cat((x, torch.ones_like(x[..., :1])), dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTangent:
    """Of y = f(first u), f any function of what the first map gives [X,R], which is differentiated once: `pulled_XR` is
    linear in `weights_XO`, so that its own derivative is f's. `size_bytes`: of all that is kept for that.
    """

    entering_XD: Tensor
    given_XR: Tensor
    out_XO: Tensor
    weights_XO: Tensor
    pulled_XR: Tensor
    size_bytes: int

    @classmethod
    def of(cls, entering_XD: Tensor, given_XR: Tensor, run: Callable[[Tensor], Tensor]) -> Self:
        """Outputs may be of as many tokens as they will."""
        held_bytes = list[int]()

        def kept(tensor: Tensor) -> Tensor:
            held_bytes.append(tensor.nbytes)
            return tensor

        with torch.enable_grad(), saved_tensors_hooks(kept, lambda tensor: tensor):
            given_XR = given_XR.detach().requires_grad_()
            out_XO = run(given_XR)
            weights_XO = torch.zeros_like(out_XO).requires_grad_()
            (pulled_XR,) = torch.autograd.grad(out_XO, given_XR, weights_XO, create_graph=True)
        own = (entering_XD, given_XR, out_XO, weights_XO, pulled_XR)
        return cls(
            entering_XD=entering_XD,
            given_XR=given_XR,
            out_XO=out_XO,
            weights_XO=weights_XO,
            pulled_XR=pulled_XR,
            size_bytes=sum(held_bytes) + sum(each.nbytes for each in own),
        )

    def along(self, step_RD: Tensor) -> Tensor:
        moved_XR = self.entering_XD @ step_RD.mT
        (moved_XO,) = torch.autograd.grad(self.pulled_XR, self.weights_XO, moved_XR, retain_graph=True)
        return moved_XO

    def sensitivity(self, out_XO: Tensor) -> Tensor:
        (given_XR,) = torch.autograd.grad(self.out_XO, self.given_XR, out_XO, retain_graph=True)
        return given_XR
