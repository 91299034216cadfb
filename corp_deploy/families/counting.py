"""Costs: multiply-adds of one input by module, counted on the meta device, and costs of sites at any width.

One multiply-add counts once, in every convolution and matrix product that runs and at the shape it runs with, so a
zero-padded head counts its padded width. Biases, normalisations, softmax and activations are not counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from corp_deploy.spec.widths import Widths
from corp_deploy.traced.finding.shares import LayerCosts
from corp_deploy.traced.models.module import parameters as parameters
from corp_deploy.traced.models.sites import Currency, Site
from corp_deploy.traced.programs.program import copy_module
from corp_deploy.traced.programs.recording import track_modules
from corp_deploy.traced.programs.sizes import MetaCalls, alike, sizes_key
from ground.ports import Port

from . import traced_model
from .family import sites_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCosts:
    """The costs of a model's sites, all in multiply-adds or all in parameters."""

    now: Mapping[str, int]  # the cost of each site at its present width
    layers: LayerCosts  # the costs of layers, which several sites may share
    biases: Mapping[str, int]  # the sizes of biases that layers get where a site that they read is narrowed, by name

    def of(self, site: Site, width: int) -> int:
        """Return the cost of a site at `width`, in proportion to its present cost, rounded down."""
        return self.now[site.name] * width // site.width

    def saved(self, sites: Iterable[Site], widths: Widths) -> float:
        """Return the cost saved by narrowing sites to `widths`, shared layers counted once, less added biases."""
        found = [site for site in sites if site.name in widths]
        left = {site.groups.key: widths[site.name] / site.width for site in found}
        added = {each.bias for site in found if left[site.groups.key] < 1.0 for each in site.readings}
        return self.layers.saved(left) - sum(self.biases.get(name, 0) for name in added)


def site_costs(model: nn.Module, currency: Currency) -> SiteCosts:
    """Return the costs of a model's sites; a site's cost is that of all layers that get narrower with it."""
    own, every = traced_model.tracing(model), sites_of(model).every
    layers = own.shares.macs if currency == "macs" else own.shares.parameters
    biases = {name: own.program.tensor(name).numel() for name in own.added if currency == "params"}
    now = {site.name: site.macs_now if currency == "macs" else site.parameters_now for site in every}
    return SiteCosts(now=now, layers=layers, biases=biases)


aten = torch.ops.aten
Product = Callable[[tuple[Any, ...], Tensor], int]

PRODUCTS: Mapping[Any, Product] = {
    aten.mm: lambda inputs, out: out.numel() * inputs[0].shape[-1],
    aten.addmm: lambda inputs, out: out.numel() * inputs[1].shape[-1],
    aten.bmm: lambda inputs, out: out.numel() * inputs[0].shape[-1],
    aten.baddbmm: lambda inputs, out: out.numel() * inputs[1].shape[-1],
    # A transposed convolution multiplies each input by weight[0], a plain one computes each output with weight[0].
    aten.convolution: lambda inputs, out: (inputs[0] if inputs[6] else out).numel() * inputs[1][0].numel(),
}
"""The functions (inputs, output) -> number of multiply-adds, by the operation that multiplies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MacCounts:
    """The multiply-adds of one input, by the module that ran them ('' is the model's own code).

    `chain` is the length of the longest chain of products from the input to the output in which each product depends on
    the one before. `shapes` are those of the outputs without the batch.
    """

    by_module: Mapping[str, int]
    chain: int
    shapes: tuple[tuple[int, ...], ...]

    @property
    def macs(self) -> int:
        return sum(self.by_module.values())

    def within(self, name: str) -> int:
        """Return the multiply-adds of one module and all modules in it."""
        return sum(count for path, count in self.by_module.items() if path == name or path.startswith(f"{name}."))


class _Counting(TorchDispatchMode):
    """A mode that adds up multiply-adds by the module on top of `running`, and the chain of products to each tensor."""

    def __init__(self, running: list[tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = running
        self.by_module: Counter[str] = Counter()
        self.chain_to: dict[Tensor, int] = {}  # keeps every tensor alive; on the meta device none has memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _outcome(func, args, kwargs or {})
        product = PRODUCTS.get(func.overloadpacket)
        if product is not None:
            self.by_module[self.running[-1][0]] += product(args, out)
        before = max((self.chain_to.get(leaf, 0) for leaf in _tensors((args, kwargs))), default=0)
        self.chain_to |= dict.fromkeys(_tensors(out), before + (product is not None))
        return out


# Blocks repeat each other, and looking up an operator's outputs is faster than computing them on the meta device.
_CALLS = MetaCalls()


def _outcome(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the outputs of an operator on the meta device, from a cache by its inputs' shapes, strides and types.

    Operators that change their inputs, or return anything but tensors, are not cached.
    """
    if func._schema.is_mutable:
        return func(*args, **kwargs)
    key = func, sizes_key((args, dict(kwargs)))
    known = _CALLS.get(key)
    if known is not None:
        return tree_map_only(Tensor, alike, known)
    out = func(*args, **kwargs)
    if all(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(out)):
        _CALLS.put(key, tree_map_only(Tensor, alike, out))
    return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def count_products(model: nn.Module, ports: Sequence[Port]) -> MacCounts:
    """Return the multiply-adds of one input, run by a copy on the meta device; attention runs as two products."""
    as_inputs = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    with torch.inference_mode(False), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        counted = copy_module(
            model, lambda each: each.detach().to("meta", as_inputs.get(each.dtype, each.dtype))
        ).eval()
        inputs = [torch.empty(1, *port.shape, dtype=getattr(torch, port.dtype), device="meta") for port in ports]
        with track_modules(counted) as running, _Counting(running) as counting:
            out = counted(*inputs)
        chain = max(counting.chain_to.get(leaf, 0) for leaf in _tensors(out))
    shapes = tuple(tuple(leaf.shape[1:]) for leaf in _tensors(out))
    return MacCounts(by_module=dict(counting.by_module), chain=chain, shapes=shapes)


def count_macs(model: nn.Module) -> MacCounts:
    """Return the multiply-adds of one input of a traced model by module, their longest chain and the output shapes."""
    return count_products(traced_model.counted_form(model), traced_model.input_spec(model).ports)


def macs(model: nn.Module) -> int:
    """Return the number of multiply-adds of one input of a traced model."""
    return count_macs(model).macs
