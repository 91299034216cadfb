"""What a kind of site has to offer: a reduction is (site, moments, method, width) -> Reduced."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from calib.moments import Moments, SiteMoments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.algebra.regression_sums import RegressionSums
from corp_deploy.families.steps import Branch
from corp_deploy.families.widths import Width

from .branch_sums import Halves
from .method import Method
from .report import SiteReport
from .streams import Streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The new modules of one site by name, the last linear layer among them, and what to report.

    `kept_K`: the channels that stay, None where none are kept as they were.
    """

    modules: dict[str, nn.Module]
    last: nn.Linear
    reports: list[SiteReport]
    kept_K: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnStreams:
    """A site reduced on the streams of a closed loop: its new layer, and what the reduced stream lacks of the dense one
    behind it, on what enters its last linear layer. `energy` is the dense stream's there.
    """

    new: Reduced
    lacking: Halves[RegressionSums]
    energy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCurve:
    """What one part of a site loses by its width, narrowest first, in the part's own unit.

    `alone`: the site with this part at each of these widths and all else whole, for a probe to try. `places`: where
    each width on offer (see `Kind.offers`) stands among them.
    """

    errors: tuple[float, ...]
    alone: tuple[Width, ...]
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.errors) == len(self.alone), self
        assert all(place < len(self.errors) for place in self.places), self


class Kind(Protocol):
    """What can be done to sites of one kind; every function is given such a site alone."""

    eliminates: ClassVar[bool]
    """Whether there is an order of removal that serves every width."""
    moments_type: ClassVar[type[SiteMoments]]
    reads_every_token: ClassVar[bool]
    """Whether a branch's layer reads all tokens, whichever are read behind the branch."""

    def sparsity(self, method: Method) -> float | None:
        """The share that uniform sparsities remove here."""
        ...

    def uniform(self, site: Any, method: Method) -> Width | None:
        """The width for the method's own sparsity, aligned; None where the method leaves the site alone."""
        ...

    def widths(self, site: Any, method: Method) -> tuple[Width, ...]:
        """Every width that one number may stand for, narrowest first."""
        ...

    def offers(self, site: Any, method: Method) -> tuple[Width, ...]:
        """Every width that a budget may choose, the site's own last; parts that can be apart have each their own."""
        ...

    def refusal(self, site: Any, method: Method) -> str:
        """Why the method can't do here what it does elsewhere, or nothing."""
        ...

    def note(self, site: Any, method: Method, width: Any) -> str | None:
        """What stays as it is although something was asked of it."""
        ...

    def reduced(
        self,
        site: Any,
        moments: Any,
        method: Method,
        width: Any,
        *,
        known: Elimination | None = None,
        held_out: Any = None,
        halves: Any = None,
    ) -> Reduced:
        """The site at one width, repaired by its moments. `known` spares `obs` its elimination; `held_out`, moments of
        other inputs, judges it again; `halves`, the moments of either half of the images, choose how strong ridges are.
        """
        ...

    def completed(self, site: Any, new: Reduced, moments: Moments, method: Method, where: torch.device) -> Reduced:
        """With what else of the site is fitted, by statistics of its own."""
        ...

    def elimination(self, site: Any, moments: Any, method: Method) -> Elimination | None:
        """The whole order of removal, which serves every width; None where the kind has none."""
        ...

    def curves(self, site: Any, moments: Any, method: Method, known: Elimination | None) -> list[ErrorCurve]:
        """What each width loses, a curve a part; none where there is no choice of width."""
        ...

    def layer(self, site: Any, layer: nn.Module, method: Method, width: Any) -> nn.Module:
        """The site's layer at one width with random weights, to be timed."""
        ...

    def rebuilt(self, branch: Branch, site: Any, streams: Streams, method: Method, width: Any) -> Reduced:
        """Reduced by the statistics of what enters the branch on the model as reduced so far."""
        ...

    def on_streams(
        self,
        branch: Branch,
        site: Any,
        step: Branch,
        streams: Streams,
        method: Method,
        width: Any,
        *,
        refit: Sequence[float] | None = None,
    ) -> OnStreams:
        """The same, the dense stream taken through `step` on the way; `branch` may have an aligned layer of its own.

        `refit`: the ridges by one of which a dense last layer is fitted to that stream before anything is chosen by it.
        """
        ...
