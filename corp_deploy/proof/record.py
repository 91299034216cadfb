"""A parity proof on disk and on the terminal."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.table import Table

from ground.files import replacing, write_json
from perf.parity.parity import Parity, Verdict

from .chain import Proof

# A proof in which nothing could fail proves nothing: inconclusive.
EXIT_CODES: dict[Verdict, int] = {"PASS": 0, "FAIL": 1, "UNJUDGED": 3}


def save_proof(proof: Proof, path: Path) -> None:
    """Write the per-image figures (.npz), then the record that names them."""
    side = path.with_suffix(".npz")
    with replacing(side) as temporary:
        np.savez_compressed(temporary, **proof.figures)  # type: ignore[arg-type]
    write_json(path, replace(proof.parity, per_image=side.name).to_json())


def parity_table(parity: Parity) -> Table:
    """One row a link, then the structural tests that didn't pass."""
    table = Table("link", "against", "relative error", "max abs", "cosine", "top-1 agreement", "verdict", "why")
    for link in parity.links:
        errors = link.measures
        table.add_row(
            f"{link.name} ({link.kind})",
            link.reference,
            f"{errors.relative_error:.2e}",
            f"{errors.max_abs:.2e}",
            f"{errors.cosine_mean:.6f}",
            f"{errors.top1_agreement:.2%}",
            link.status,
            link.reason,
        )
    for finding in parity.structure:
        if finding.status != "PASS":
            table.add_row(finding.test, finding.candidate, "", "", "", "", finding.status, finding.reason)
    return table
