"""What k:n sparsity did to each layer, in numbers and in words."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from corp_deploy.algebra.sparsity import Target

from .coverage import by_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSparsity:
    """A layer of the model by its path: its pattern such as 2:4, or none and the `reason`.

    Errors are mean squares per token on the calibration inputs of what the layer gives against its target: of its
    weights as they were (`error_dense`), of those of them that stay (`error_masked`), and as refitted; `energy` is the
    target's own. `macs`: multiply-adds of one input, zeros counted.
    """

    layer: str
    kind: str
    pattern: str = ""
    reason: str = ""
    reordered: bool = False
    energy: float = 0.0
    error_dense: float = 0.0
    error_masked: float = 0.0
    error: float = 0.0
    macs: int = 0
    macs_of_zeros: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsityReport:
    """Every layer of the kinds that were asked for, in the order they run."""

    rule: str
    permute: str
    target: Target
    layers: tuple[LayerSparsity, ...]

    @property
    def patterns(self) -> dict[str, str]:
        """By layer, of those that have one."""
        return {each.layer: each.pattern for each in self.layers if each.pattern}

    @property
    def macs(self) -> int:
        """Multiply-adds of the sparse layers, zeros counted."""
        return sum(each.macs for each in self.layers if each.pattern)

    @property
    def macs_of_zeros(self) -> int:
        """Those that a kernel for the pattern may leave away; engines pick one where it is faster."""
        return sum(each.macs_of_zeros for each in self.layers)

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values; MACs stand apart from the model's own, of which zeros take nothing off."""
        layers = [asdict(each) for each in self.layers]
        own = {"rule": self.rule, "permute": self.permute, "target": self.target}
        return own | {"sparse_macs": self.macs, "macs_of_zeros": self.macs_of_zeros, "layers": layers}

    def sentences(self) -> Iterator[str]:
        """For people."""
        sparse = [each for each in self.layers if each.pattern]
        patterns = ", ".join(dict.fromkeys(each.pattern for each in sparse))
        lost = fmean(each.error / (each.energy or 1.0) for each in sparse)
        masked = fmean(each.error_masked / (each.energy or 1.0) for each in sparse)
        yield (
            f"{patterns} sparse: {len(sparse)} of {len(self.layers)} layers, their mean error {lost:.2%} of what they "
            f"give, {masked:.2%} before the refit"
        )
        yield (
            f"zeros: {self.macs_of_zeros / 1e6:,.1f} M of the sparse layers' {self.macs / 1e6:,.1f} M MACs, which "
            "engines skip only where they pick sparse kernels; no other MACs take them off"
        )
        for reason, names in by_reason({each.layer: each.reason for each in self.layers if each.reason}):
            yield f"{names} not sparse: {reason}"
        for pattern in dict.fromkeys(each.pattern for each in sparse if each.pattern != "2:4"):
            yield f"{pattern}: for analysis, no engine has kernels for it; 2:4 has"
