"""The collection of statistics: one forward pass, in which hooks add the activations of named sites to sums."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from ground.errors import BadInput

from .active import ACTIVE_EPS
from .fingerprints import Fingerprints
from .inputs import Inputs, ReadBatch, chunks, input_count, padded_to, refuse_dtypes, run_model, to_device
from .moments import Moments
from .patch_sums import PatchSums
from .products import (
    Kernel,
    PartialTokenWeights,
    PassWeights,
    TokenWeights,
    kernel_for,
    matmul_precision,
    pass_weights,
    weights_by_tokens,
)
from .sites import Role, Site, SiteKind, evaluating, listening_to_merges, listening_to_sites
from .sums import ChannelSums, HeadSums

Precision = Literal["float32", "tf32", "bfloat16"]
CPU_FORWARD_SIZE = 8
PIXEL_RANGE = "pixel_range"  # entry of the lineage: least and largest value of all images
SiteSums = ChannelSums | HeadSums | PatchSums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The statistics to sum: `attention_system` adds CORP's per-image system (see HeadMoments) at all attention sites.

    `kept` [H,K] by site adds it at these sites, over these dims only. A channel is active where |x| > `eps`. The
    `precision` is that of the forward pass. `token_weights` returns the weights of a batch's tokens in all statistics.
    """

    attention_system: bool = False
    kept: Mapping[str, Tensor] | None = None
    eps: float = ACTIVE_EPS
    precision: Precision = "float32"
    token_weights: TokenWeights | None = None

    def as_text(self) -> str:
        kept = {name: kept_HK.tolist() for name, kept_HK in sorted((self.kept or {}).items())}
        digest = hashlib.sha256(repr(kept).encode()).hexdigest()
        weights = "" if self.token_weights is None else " token weights"
        return f"{self.attention_system} {digest} {self.eps!r} {self.precision}{weights}"


PLAIN = Options()


class _AllCollected(Exception):
    """The end of a forward pass whose rest computes no activation of a site."""


class Collector:
    """A context in which `update` runs batches through `model` and sums the activations at `sites`.

    On a CPU batches are cut into pieces of 8 inputs, the last one padded, so that no kernel sees a shape that depends
    on the batch size. The inputs of a piece are multiplied together in float32, so cutting a batch elsewhere changes
    wide Grams by about 1e-7 of their scale. A merged token counts once for each token that it replaces. The first pass
    runs to its end, later ones stop behind the last site. Leaving the context removes all hooks.
    """

    def __init__(
        self, model: nn.Module, sites: Sequence[Site], *, device: torch.device | str, options: Options = PLAIN
    ) -> None:
        self.device = torch.device(device)
        self.sums = build_sums(sites, options)
        self.images = 0
        self.fingerprints = Fingerprints()
        self.pixel_range: tuple[float, float] | None = None
        self.model, self.sites, self.options = model, sites, options
        self._weights: Mapping[int, PassWeights] | None = None
        self._is_partial = False
        self._without_tokens = {site.name for site in sites if not site.by_token}
        self._merges = {site.name: site.merge for site in sites if site.merge is not None}
        self._merged: dict[nn.Module, PassWeights | None] = {}
        self.kernel: Kernel | None = None
        self._real_inputs = self._batch_size = 0
        self._collected: list[tuple[str, Role]] = []
        self._stop_after: int | None = None
        self._to_the_end = False
        self._outputs: list[Tensor] = []
        self._stack = ExitStack()
        for name, parameter in model.named_parameters():
            if parameter.device.type != self.device.type:
                raise BadInput(
                    f"{name}: the model is on {parameter.device}, expected {self.device}; move it there first"
                )

    def __enter__(self) -> Self:
        if self.kernel is None:
            width = max((site.summed_width for site in self.sites), default=0)
            self.kernel = kernel_for(width) if self.device.type == "cpu" else "blas"
        for sums in self.sums.values():
            sums.kernel = self.kernel
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.model))
            stack.enter_context(listening_to_sites(self.sites, self._on_activation))
            stack.enter_context(listening_to_merges(self.sites, self._on_merge))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def outputs_of(self, inputs: Inputs) -> Tensor:
        """Add a batch, run to the end, and return the model's outputs."""
        self._to_the_end, self._outputs = True, []
        try:
            self.add(inputs)
            return torch.cat(self._outputs)
        finally:
            self._to_the_end, self._outputs = False, []

    def add(self, inputs: Inputs) -> None:
        refuse_dtypes(inputs)
        count = input_count(inputs)
        size = CPU_FORWARD_SIZE if self.device.type == "cpu" else count
        for piece in chunks(inputs, size):
            self._real_inputs = input_count(piece)
            self._weights = self._weights_of(piece)
            self._forward(padded_to(piece, size))
        for sums in self.sums.values():
            sums.flush()
        self.images += count
        if self.device.type == "cpu":
            self.refuse_nonfinite()

    def update(self, batch: ReadBatch[Inputs]) -> None:
        """Add a batch's activations to the sums, and its contents' digests to the fingerprints."""
        added = Fingerprints.from_inputs(batch.ids, batch.inputs)
        if len(batch.ids):
            self.add(batch.inputs)
            if isinstance(batch.inputs, Tensor) and batch.inputs.ndim == 4:
                low, high = map(float, batch.inputs.aminmax())
                least, most = self.pixel_range or (low, high)
                self.pixel_range = min(least, low), max(most, high)
        self.fingerprints = Fingerprints.concatenated([self.fingerprints, added])

    @contextmanager
    def in_copy(self) -> Iterator[None]:
        """Make `update` change a copy of the sums, which is dropped when the context ends."""
        sums, rest = self.sums, (self.images, self.fingerprints, self.pixel_range)
        self.sums = {name: each.copied() for name, each in sums.items()}
        try:
            yield
        finally:
            self.sums = sums
            self.images, self.fingerprints, self.pixel_range = rest

    def refuse_nonfinite(self) -> None:
        collected = list(dict.fromkeys(name for name, _ in self._collected))
        flags = torch.stack([self.sums[name].is_finite() for name in collected]).tolist() if collected else []
        for name, finite in zip(collected, flags, strict=True):
            if not finite:
                raise BadInput(
                    f"{name}: NaN or Inf in the activations within the first {self.images} inputs; (a) the weights "
                    "or an input hold NaN or Inf, or (b) values or their squares overflow: are the inputs normalised "
                    "as the model expects? In a half-precision forward pass, try float32"
                )

    def moments(self, lineage: Mapping[str, str]) -> Moments:
        """Return the moments so far, on the CPU; they share the memory of sums that are on the CPU."""
        if not self.images:
            raise BadInput("inputs to calibrate on: got none, expected at least one")
        self.refuse_nonfinite()
        for name, sums in self.sums.items():
            if not sums.tokens:
                raise BadInput(
                    f"{name}: the token weights of all {self.images} inputs are zero, so there is nothing to sum"
                )
        sites = {name: sums.moments() for name, sums in self.sums.items()}
        seen = {} if self.pixel_range is None else {PIXEL_RANGE: ":".join(map(repr, self.pixel_range))}
        prints = self.fingerprints.sorted()
        return Moments(sites=sites, lineage={**lineage, **seen}, images=self.images, fingerprints=prints)

    def resume_from(self, moments: Moments, kernel: Kernel) -> None:
        self.kernel = kernel
        for name, sums in self.sums.items():
            sums.load(moments.sites[name], self.device)
        self.images, self.fingerprints = moments.images, moments.fingerprints
        if (ends := moments.lineage.get(PIXEL_RANGE)) is not None:
            low, high = map(float, ends.split(":"))
            self.pixel_range = low, high

    def _weights_of(self, inputs: Inputs) -> Mapping[int, PassWeights] | None:
        token_weights = self.options.token_weights
        weight_BN = None if token_weights is None else token_weights(inputs)
        self._is_partial = isinstance(weight_BN, PartialTokenWeights)
        if isinstance(weight_BN, PartialTokenWeights):
            weight_BN = weight_BN.weight_BN
        elif weight_BN is None:
            return None
        elif self._without_tokens:
            name = min(self._without_tokens)
            raise BadInput(
                f"{name}: a convolution reads a map, whose places have no weights; calibrate without token weights"
            )
        return weights_by_tokens(weight_BN, input_count(inputs), self.device)

    def _forward(self, inputs: Inputs) -> None:
        self._collected, self._batch_size = [], input_count(inputs)
        forward = matmul_precision("high" if self.options.precision == "tf32" else "highest")
        cast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bfloat16")
        with suppress(_AllCollected), torch.no_grad(), forward, cast:
            output = run_model(self.model, to_device(inputs, self.device))
            if self._to_the_end:
                self._outputs.append(output[: self._real_inputs].float())
        for site in self.sites:
            for role in site.taps:
                if (runs := self._collected.count((site.name, role))) != 1:
                    raise BadInput(f"{site.name}: {role} was computed {runs} times in one forward pass, expected once")
        self._stop_after = len(self._collected)

    def _on_activation(self, name: str, role: Role, activation: Tensor) -> None:
        if not activation.is_floating_point() or len(activation) != self._batch_size or not activation.shape[-2]:
            raise BadInput(
                f"{name}: {role} is {activation.dtype} {list(activation.shape)} for a batch of {self._batch_size}, "
                "expected floating point with the batch in front and at least one token or place"
            )
        self._collected.append((name, role))
        with torch.autocast(self.device.type, enabled=False), matmul_precision("highest"):
            weights = None if name in self._without_tokens else self._weights_at(name, role, activation.shape[-2])
            weights = None if self._is_partial and activation.ndim > 4 else weights
            if weights is not None and activation.ndim > 4:
                raise BadInput(f"{name}: {role} comes in windows, whose tokens can't have weights")
            self.sums[name].add(role, activation[: self._real_inputs], weights)
        if len(self._collected) == self._stop_after and not self._to_the_end:
            raise _AllCollected

    def _on_merge(self, merge: nn.Module, sizes_BN: Tensor | None) -> None:
        self._merged[merge] = None if sizes_BN is None else pass_weights(sizes_BN[: self._real_inputs], self.device)

    def _weights_at(self, name: str, role: Role, tokens: int) -> PassWeights | None:
        if name in self._merges:
            return self._merged[self._merges[name]]
        if self._is_partial and self._weights is not None:
            return self._weights.get(tokens)
        if self._weights is not None and tokens not in self._weights:
            raise BadInput(
                f"{name}: {role} has {tokens} tokens, the token weights are for {max(self._weights)}; "
                "give one weight a token"
            )
        return None if self._weights is None else self._weights[tokens]


def build_sums(sites: Sequence[Site], options: Options = PLAIN) -> dict[str, SiteSums]:
    names, kept = [site.name for site in sites], options.kept or {}
    if not names or len(set(names)) != len(names):
        raise BadInput(f"sites: got {names}, expected at least one and every name once")
    unknown = [name for name in kept if name not in names]
    if unknown:
        raise BadInput(f"kept dims: no such sites {', '.join(unknown)}; there are {', '.join(names)}")
    empty: dict[SiteKind, Callable[[Any], SiteSums]] = {
        "mlp": lambda _: ChannelSums(eps=options.eps),
        "attention": lambda site: HeadSums(
            system=options.attention_system or site.name in kept,
            kept_HK=kept.get(site.name),
            slots_WN=site.slots_WN,
            causal=site.causal,
            plane_scale=site.plane_scale,
        ),
        "convolution": lambda site: PatchSums(site, eps=options.eps),
    }
    return {site.name: empty[site.kind](site) for site in sites}


def collect(
    model: nn.Module,
    sites: Sequence[Site],
    batches: Iterable[Inputs],
    *,
    device: torch.device | str,
    options: Options = PLAIN,
) -> Moments:
    """Return the moments of `sites` over `batches`, by one forward pass for each batch.

    Raises BadInput for inputs that are empty, disagree in their batch or aren't float32, for weights that don't fit,
    and for NaN or Inf activations, with the first site's name.
    """
    with Collector(model, sites, device=device, options=options) as collector:
        for inputs in batches:
            collector.add(inputs)
        return collector.moments({})
