"""Links of a parity record between rows of outputs, with defaults for whatever a test doesn't vary."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perf.parity.link import Link, LinkKind, measure_link
from perf.parity.tolerance import user_tolerance

FREE = user_tolerance()
Rows = NDArray[np.floating]


def link_between(
    reference_rows: Rows, candidate_rows: Rows | Mapping[int, Rows], /, *, kind: LinkKind = "reduced", **more: Any
) -> Link:
    """Measure and judge the link from a dense to a reduced model, whose rows may be given by batch size."""
    by_batch = candidate_rows if isinstance(candidate_rows, Mapping) else {1: candidate_rows}
    more = {"name": kind, "reference": "dense", "candidate": "reduced", "tolerance": user_tolerance(), **more}
    return measure_link(kind=kind, reference_rows=reference_rows, candidate_by_batch=by_batch, **more)
