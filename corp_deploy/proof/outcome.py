"""The outcome of a proof: its record, the figures beside it, and exit codes by verdict. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ground.errors import EXIT_FAILED, EXIT_INCONCLUSIVE
from ground.feeds import Outputs
from ground.files import replacing, write_json
from perf.parity.parity import Parity
from perf.parity.tolerance import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The parity record, the per-image figures for the file beside it, and the outputs of a chain's steps by label."""

    parity: Parity
    figures: dict[str, NDArray[np.generic]]
    answers: Mapping[str, Outputs] = field(default_factory=dict)


# A proof without a limit proves nothing: inconclusive.
EXIT_CODES: dict[Verdict, int] = {
    "PASS": 0,
    "FAIL": EXIT_FAILED,
    "INCONCLUSIVE": EXIT_INCONCLUSIVE,
    "UNJUDGED": EXIT_INCONCLUSIVE,
}


def save_proof(proof: Proof, path: Path) -> None:
    """Write the per-image figures (.npz), then the record that names them."""
    side = path.with_suffix(".npz")
    with replacing(side) as temporary:
        np.savez_compressed(temporary, **proof.figures)  # type: ignore[arg-type]
    write_json(path, replace(proof.parity, per_image=side.name).to_json())
