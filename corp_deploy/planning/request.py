"""What is planned: the options of a reduction, and what follows from them."""

from dataclasses import dataclass
from pathlib import Path

from calib.moments import Moments
from corp_deploy.invocation.budget_choice import Currency
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.polish.options import PolishOptions
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method

from .latency import LatencyTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRequest:
    """The options of a reduction; its `method`, which is not quite theirs where tokens merge; `where`: on what latency
    is measured, None where another cost counts; `polish`: how the reduced model is polished.
    """

    options: ReduceOptions
    method: Method
    where: LatencyTarget | None = None
    polish: PolishOptions | None = None

    @property
    def priced_in(self) -> Currency:
        """The cost that a budget is of, or that a limit makes least."""
        return self.options.currency or ("macs" if self.where is None else "latency")

    def loop(self, moments: Moments) -> Loop | None:
        """The closed loop that fits to the dense stream, None for another or none; it splits images as moments do."""
        if self.options.loop != "asymmetric":
            return None
        return Loop(reads=self.options.reads, half_ids=None if moments.half is None else moments.half.image_ids)


def request_of(options: ReduceOptions, *, method: Method | None = None, seed: int = 0) -> ReductionRequest:
    """The request that options make; `method` in place of theirs. The seed draws the order of a polish's inputs."""
    tables = options.latency_tables
    return ReductionRequest(
        options=options,
        method=options.method_asked if method is None else method,
        where=None
        if tables is None
        else LatencyTarget(backend="onnxruntime", batches=(options.batch or 1,), cache=Path(tables)),
        polish=options.polish_options(seed=seed),
    )
