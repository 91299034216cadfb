"""What products of float16 tensors give, sooner than CPUs without arithmetic of that type compute them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from corp_deploy.families.counting import PRODUCTS


class HalfProducts(TorchDispatchMode):
    """Computes products of float16 tensors on the CPU in float32 and rounds once, as tensor cores do: the same but for
    the order of sums. For `torch.no_grad`; in inference mode other operators come here.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = args, kwargs or {}
        if func.overloadpacket not in PRODUCTS or not _is_half(args[0]):
            return func(*args, **arguments[1])
        wide, named = tree_map_only(Tensor, Tensor.float, arguments)
        return func(*wide, **named).half()


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"
