"""PURE: location of the block where a link breaks, by errors of block outputs relative to each block's noise."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.precision import FLOAT16, QUANTISED, FloatType
from ground.records import Figure

from .tolerance import CEILINGS

Arrays = Mapping[str, NDArray[np.floating]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockError:
    """A block's relative Frobenius error, infinite if only the candidate isn't finite, and its expected `noise`."""

    key: str
    error: float
    noise: float
    nonfinite: bool

    @property
    def site(self) -> str:
        return self.key.partition(":")[0]

    @property
    def times(self) -> float:
        return self.error / self.noise


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultLocation:
    """The site where a failing link breaks, None if no block stands out, with a `command` that may fix it."""

    link: str
    site: str | None
    measure: str
    value: Figure
    noise: Figure
    largest_activation: Figure
    half_limit: Figure
    reason: str
    command: str


def compare_blocks(
    reference: Arrays,
    candidate: Arrays,
    *,
    noise: Mapping[str, float] | float = FLOAT16.unit_roundoff,
    float_type: FloatType = FLOAT16,
) -> list[BlockError]:
    """Compare the blocks that both sides have, in the reference's order.

    `noise` is the expected error of each block, or one bound for all. Raises BadInput if no block is shared or shapes
    differ.
    """
    shared = [key for key in reference if key in candidate]
    if not shared:
        reference_keys, candidate_keys = (", ".join(list(side)[:4]) for side in (reference, candidate))
        raise BadInput(
            f"the two sides share no block: {reference_keys}... and {candidate_keys}...; compare two forms of the same "
            "model"
        )
    return [
        _block_error(key, reference[key], candidate[key], _noise_of_block(noise, key, float_type)) for key in shared
    ]


def locate_fault(
    link: str,
    blocks: list[BlockError],
    *,
    activations: Mapping[str, float],
    fix_command: str = "",
    factor: float = 4.0,
    float_type: FloatType = FLOAT16,
) -> FaultLocation:
    """Locate the first block whose error exceeds `factor` times its noise or isn't finite; `site` is None without one.

    `activations` has the largest absolute value in each site. `fix_command` may have `{site}` in it.
    """
    first_bad = next((block for block in blocks if block.nonfinite or not block.error <= factor * block.noise), None)
    block = first_bad or max(blocks, key=lambda block: block.times)
    if first_bad is None:
        largest = max(activations.values(), default=0.0)
        reason = f"no block is off by {factor:g} times its noise; {block.site} is nearest, {block.times:.2g} times"
    else:
        largest = activations.get(block.site, 0.0)
        reason = _fault_reason(block, largest, float_type)
    return FaultLocation(
        link=link,
        site=None if first_bad is None else block.site,
        measure="nonfinite" if block.nonfinite else "relative_error",
        value=block.error,
        noise=block.noise,
        largest_activation=largest,
        half_limit=float_type.largest,
        reason=reason,
        command="" if first_bad is None else fix_command.replace("{site}", block.site),
    )


def keep_until_it_passes(
    attempt: Callable[[tuple[str, ...]], FaultLocation | None], *, most: int = 16
) -> tuple[tuple[str, ...], FaultLocation | None]:
    """Return the sites to keep in float32 so that `attempt(kept)` returns None, and the fault left, if any.

    The search ends if an attempt finds no new site or `most` sites are kept.
    """
    kept: tuple[str, ...] = ()
    located = attempt(kept)
    while located is not None and located.site is not None and located.site not in kept and len(kept) < most:
        kept = (*kept, located.site)
        located = attempt(kept)
    return kept, located


def _block_error(
    key: str, reference: NDArray[np.floating], candidate: NDArray[np.floating], noise: float
) -> BlockError:
    if reference.shape != candidate.shape:
        raise BadInput(
            f"block {key}: got {candidate.shape}, expected {reference.shape} as in the reference; run the same images"
        )
    nonfinite = bool(np.isfinite(reference).all()) and not bool(np.isfinite(candidate).all())
    if nonfinite:
        return BlockError(key=key, error=math.inf, noise=noise, nonfinite=True)
    size = max(float(np.linalg.norm(reference.astype(np.float64))), np.finfo(np.float64).tiny)
    off = float(np.linalg.norm(candidate.astype(np.float64) - reference)) / size
    return BlockError(key=key, error=off, noise=noise, nonfinite=False)


def _noise_of_block(noise: Mapping[str, float] | float, key: str, float_type: FloatType) -> float:
    if isinstance(noise, float | int):
        return float(noise)
    return min(max(noise.get(key, float_type.unit_roundoff), float_type.unit_roundoff), CEILINGS[float_type])


def _fault_reason(block: BlockError, largest: float, float_type: FloatType) -> str:
    if float_type in QUANTISED.values():
        largest = 0.0  # quantised ranges are set by their scales, so that no value exceeds them
    limit = f"{'over' if largest > float_type.largest else 'within'} {float_type.name}'s {float_type.largest:,.6g}"
    activation = f"; its largest activation is {largest:,.6g}, {limit}" if largest else ""
    if block.nonfinite:
        return f"{block.site} is the first to give NaN or Inf{activation}"
    return (
        f"{block.site} is the first to be off: relative error {block.error:.2g}, {block.times:.3g} times its noise "
        f"{block.noise:.2g}{activation}"
    )
