"""Ways to reduce a subject: a preset, in one pass or in a closed loop, at uniform widths or widths by site."""

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from benchmarks.quality.subjects import Subject
from corp_deploy.families.counting import macs
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.plan import make_plan
from corp_deploy.planning.request import build_request
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.spec.widths import Widths
from corp_deploy.traced.models.narrowed_model import at_widths


@dataclass(frozen=True, slots=True)
class Way:
    """A line of a table; `by_site` spends the MACs of uniform widths by the cost curves of the sites."""

    name: str
    preset: str = "best"
    loop: Loop | Literal["symmetric"] | None = None
    by_site: bool = False
    polished: bool = False

    def reduced(self, subject: Subject, method: Method, widths: Widths | None = None) -> nn.Module:
        """Return the model reduced by this method, at its own widths or at the given ones."""
        model, inputs = subject.dense.model, subject.inputs
        if self.loop is None:
            return reduce(model, subject.moments, method, widths=widths, images=inputs).model
        loop = None if self.loop == "symmetric" else self.loop
        looped = reduce_traced(model, inputs, method, widths=widths, loop=loop).model
        return polished(model, looped, inputs, PolishOptions()).model if self.polished else looped


def uniform_share(model: nn.Module, method: Method) -> float:
    """Return the share of the MACs that the uniform widths of a method leave."""
    return macs(at_widths(model, uniform_widths(model, method))) / macs(model)


def widths_by_site(subject: Subject, method: Method, share: float) -> Widths | None:
    """Return widths by site that leave a share of the MACs."""
    asked = replace(build_request(ReduceOptions(macs=share)), method=method)
    return make_plan(subject.dense, subject.moments, asked, subject.inputs).widths
