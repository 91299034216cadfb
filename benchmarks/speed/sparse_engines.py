"""What TensorRT-RTX makes of 2:4 weights: plans with and without the flag for sparse weights, target by target.

    python -m benchmarks.speed.sparse_engines --output benchmarks/results/sparse_engines.json

Two blocks of a ViT-S in FP16 whose linear layers are all 2:4. The flag is set past `build`, which refuses it.
"""

import hashlib
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from torch import nn

from corp_deploy.algebra.sparse_patterns import magnitude_mask
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.sparsity import Sparsity
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.onnx_file import export_checkpoint
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from export.engine.session import Session
from ground.files import write_json

ARCHITECTURE = Architecture(name="vit_small_patch16_224", kwargs={"depth": 2, "num_classes": 10})
TARGETS = ("86", "89", "120")
PROFILE = BatchProfile(smallest=1, tuned=8, largest=64)


@torch.no_grad()
def _sparse_model() -> nn.Module:
    torch.manual_seed(0)
    model = dense_from_architecture(ARCHITECTURE)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.startswith("blocks."):
            layer.weight.mul_(magnitude_mask(layer.weight, Sparsity(kept=2, of=4)))
    return model


def _built(graph: Path, target: str, *, flag: bool) -> dict[str, Any]:
    """One plan: its digest, and how many of the builder's lines say anything of sparsity."""
    sessions: list[Session] = []
    configured = Session._config

    def config(session: Session, *given: Any) -> Any:
        sessions.append(session)
        made = configured(session, *given)
        if flag:
            made.set_flag(session.trt.BuilderFlag.SPARSE_WEIGHTS)
        return made

    with patch.object(Session, "_config", config):
        choices = BuildOptions(backend="tensorrt-rtx", sms=(target,), profiles=(PROFILE,))
        record = build_engine(graph, choices).record
    tactics = re.findall(r"TacticName: (.*?),", sessions[0].messages.text)
    return {
        "target": target,
        "flag": flag,
        "version": record.library_version,
        "plan_bytes": record.plan_bytes,
        "plan_sha256": record.plan_sha256,
        "tactics_sha256": hashlib.sha256("\n".join(tactics).encode()).hexdigest(),
        "kernels": record.kernels,
        "sparse_layers": record.sparse_layers,
        "lines_on_sparsity": len(re.findall(r"spars", sessions[0].messages.text, re.IGNORECASE)),
    }


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(output: Path) -> None:
    """Build every plan and write the record."""
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "model.onnx"
        export_checkpoint(
            Checkpoint(model=_sparse_model(), architecture=ARCHITECTURE, lineage={}), graph, precision="fp16"
        )
        rows = [_built(graph, target, flag=flag) for target in TARGETS for flag in (False, True)]
    write_json(output, {"kind": "benchmarks/sparse-engines", "version": 1, "rows": rows})


if __name__ == "__main__":
    main()
