"""Why an INT8 graph fails on this CPU that is right as it is typed: kernels whose sums of sixteen bits saturate."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from perf.parity.parity import Link
from perf.timing.watch import has_vnni

from .candidates import Candidate


def with_reasons(
    links: Sequence[Link], candidate: Candidate, as_typed: Callable[[], Sequence[Link]]
) -> tuple[Link, ...]:
    """The links of a candidate. Of a failing one that passes as it is typed the reason says so; the verdict stays, as
    it is true of this CPU. `as_typed` makes the same links of the same graph without kernels of INT8.
    """
    if not candidate.computes_int8 or all(link.status != "FAIL" for link in links):
        return tuple(links)
    return tuple(
        replace(link, reason=f"{link.reason}; {_cause(other, candidate)}")
        if link.status == "FAIL" and other.status == "PASS"
        else link
        for link, other in zip(links, as_typed(), strict=True)
    )


def _cause(as_typed: Link, candidate: Candidate) -> str:
    """What the kernels do, and what helps."""
    vnni, errs = has_vnni(), f"as it is typed it errs {as_typed.measures.relative_error:.2g}: this CPU's INT8 kernels"
    if candidate.weight_bits < 8 or vnni:
        return f"{errs} compute something else, serve it on another one"
    does, where = ("saturate (no VNNI)", "one that has it") if vnni is False else ("differ", "another one")
    return f"{errs} {does}, serve it on {where}, or export with --weight-bits 7"
