"""A site of which a constant stays: the mean of what it gives, which the bias of its last layer takes.

Legend: K inputs of a site's last layer, O its outputs.
"""

from torch import Tensor, nn

from corp_deploy.algebra.quadratic import variance

from .report import HeldOut, SiteReport


def mean_given(last: nn.Linear, mean_K: Tensor) -> Tensor:
    """What a dense last layer gives on average [O]."""
    mean_O = last.weight.detach().double() @ mean_K
    return mean_O if last.bias is None else mean_O + last.bias.detach().double()


def constant_report(
    site: str,
    part: str,
    dense: nn.Linear,
    *,
    width_dense: int,
    width_asked: float,
    mean_K: Tensor,
    covariance_KK: Tensor,
    held_out: tuple[Tensor, Tensor] | None,
) -> SiteReport:
    """All variance is lost. `held_out`: mean and covariance of other inputs."""
    weight_OK = dense.weight.detach().double()
    energy, judged = variance(weight_OK, covariance_KK), None
    if held_out is not None:
        other_K, other_KK = held_out
        other_energy = variance(weight_OK, other_KK)
        shift = float((weight_OK @ (other_K - mean_K)).square().sum())
        judged = HeldOut(energy=other_energy, error=other_energy + shift)
    return SiteReport(
        site=site,
        part=part,
        width_dense=width_dense,
        width_asked=width_asked,
        width=0,
        energy=energy,
        error_uncompensated=energy,
        error=energy,
        r2=0.0,
        condition=1.0,
        ridge=0.0,
        held_out=judged,
    )
