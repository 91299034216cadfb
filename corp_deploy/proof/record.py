"""A parity proof on disk, and the exit code for its verdict."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ground.errors import EXIT_FAILED, EXIT_INCONCLUSIVE
from ground.files import replacing, write_json
from perf.parity.tolerance import Verdict

from .chain import Proof

# A proof in which nothing could fail proves nothing: inconclusive.
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
