"""Perplexity of a small Llama, trained on the text of Python's help letter by letter, by method.

Two heads share each key and value. Methods remove half or less of the MLPs' channels, of the heads' groups, of both, or
of the dimensions of queries and keys. Every method uses the same moments, and is judged on text that neither training
nor calibration used.

    python -m benchmarks.decoders.trained_decoder --output benchmarks/results/trained_decoder.json
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calib.moments import Moments
from calib.rows import Sequences, cut_into_rows, sample_sequences
from corp_deploy.families import decoder
from corp_deploy.families.decoder import DecoderArchitecture, DecoderArguments, TextDecoder
from corp_deploy.families.rotary import Rope
from corp_deploy.families.tokenizer import Tokenization
from corp_deploy.machine import versions
from corp_deploy.proof.candidates import Candidate
from corp_deploy.proof.perplexity import LanguageLimits, measure_perplexities
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from ground.files import write_json
from ground.precision import FLOAT32
from perf.timing.watch import environment
from tests import decoders

STEPS, BATCH, LENGTH, WARM_UP = 1200, 32, 96, 50
CALIBRATED, JUDGED = 96, 60  # sequences
SPARSITIES = (0.3, 0.5)
METHODS = ("none", "grail", "corp", "best")
CLOSED = "best, closed loop"
PARTS: dict[str, tuple[str, ...]] = {
    "MLP": ("mlp",),
    "groups": ("heads",),
    "MLP and groups": ("mlp", "heads"),
    "Q/K": ("attention",),
}


def architecture(layers: int = 3, hidden: int = 192, groups: int = 4) -> DecoderArchitecture:
    """Return a Llama with two heads of 16 dimensions in each group."""
    return DecoderArchitecture(
        vocabulary=decoders.LETTERS, positions=LENGTH, width=64, heads=2 * groups, groups=groups, head=16,
        hidden=hidden, layers=layers, rope=Rope(),
    )  # fmt: skip


def letters(start: float, stop: float) -> Tensor:
    """Return the letters between two shares of the text."""
    text = decoders.text(0, 10**9)
    return torch.tensor([ord(letter) for letter in text[int(start * len(text)) : int(stop * len(text))]])


def _batches(ids_n: Tensor, steps: int, draw: torch.Generator) -> Iterator[Tensor]:
    for _ in range(steps):
        starts = torch.randint(0, len(ids_n) - LENGTH - 1, (BATCH,), generator=draw)
        yield torch.stack([ids_n[start : start + LENGTH + 1] for start in starts.tolist()])


def trained(own: DecoderArchitecture, *, steps: int = STEPS) -> TextDecoder:
    """Train on the first 80 % of the text; the weights depend only on the number of steps."""
    torch.manual_seed(0)
    model = TextDecoder(own)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.05)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, steps, pct_start=WARM_UP / max(steps, 2 * WARM_UP))
    for ids in _batches(letters(0.0, 0.8), steps, torch.Generator().manual_seed(0)):
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval().requires_grad_(False)


def sequences(start: float, stop: float, count: int) -> Sequences:
    """Return this number of sequences, evenly spread over a part of the text."""
    rows = cut_into_rows(letters(start, stop).numpy(), LENGTH, where="text")
    return sample_sequences(rows[:: max(1, len(rows) // count)][:count], where="text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A trained decoder, its moments, and its calibration sequences."""

    checkpoint: Checkpoint
    moments: Moments
    calibrated: Sequences

    @classmethod
    def of(cls, model: TextDecoder) -> "Trained":
        arguments = DecoderArguments(decoder=model.architecture, text=Tokenization(length=LENGTH, sha256="0" * 64))
        architecture = decoder.architecture_of_decoder("llama", arguments)
        traced = decoder.traced_decoder(model, arguments.text)
        checkpoint = Checkpoint(model=traced, architecture=architecture, lineage={})
        own = sequences(0.8, 0.9, CALIBRATED)
        moments = calibrate(checkpoint, own, batch_size=16, statistics=Statistics(attention_system=True))
        return cls(checkpoint=checkpoint, moments=moments, calibrated=own)

    def reduced(self, preset: str, sparsity: float, parts: Sequence[str], *, closed_loop: bool = False) -> nn.Module:
        """Reduce these parts by a preset at a sparsity."""
        asked: dict[str, Any] = {f"{part}_sparsity": sparsity for part in parts}
        method = method_from_preset(preset, align_hidden=8, align_head=4, aligned=True, **asked)
        if closed_loop:
            return reduce_traced(self.checkpoint.model, self.calibrated, method, loop=Loop()).model
        return reduce(self.checkpoint.model, self.moments, method).model

    def judged(self, models: dict[str, nn.Module]) -> list[dict[str, Any]]:
        """Measure the perplexity of the dense model and of these on unused text."""
        steps = [
            Candidate(
                label=name,
                name=name,
                form="torch",
                path=Path(name),
                float_type=FLOAT32,
                checkpoint=Checkpoint(model=model, architecture=self.checkpoint.architecture, lineage={}),
            )
            for name, model in models.items()
        ]
        judges = sequences(0.9, 1.0, JUDGED)
        proof = measure_perplexities(self.checkpoint, steps, judges, LanguageLimits(), batch=12)
        rows: list[dict[str, Any]] = proof.as_json()["rows"]
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    begun = time.monotonic()
    own = Trained.of(trained(architecture()))
    seconds = time.monotonic() - begun
    models: dict[str, nn.Module] = {}
    told: dict[str, dict[str, Any]] = {}
    for part, sparsity, method in product(PARTS, SPARSITIES, (*METHODS, CLOSED)):
        if (method, part) == ("grail", "Q/K"):
            continue  # its method reduces no queries and keys
        label = f"{part} {sparsity:g} {method}"
        told[label] = {"part": part, "sparsity": sparsity, "method": method}
        preset = "best" if method == CLOSED else method
        models[label] = own.reduced(preset, sparsity, PARTS[part], closed_loop=method == CLOSED)
    record = {
        "kind": "corp-deploy/benchmark-trained-decoder",
        "steps": STEPS,
        "training_s": seconds,
        "calibrated": CALIBRATED,
        "rows": [row | told.get(row["model"], {}) for row in own.judged(models)],
        "versions": versions(),
        "environment": environment(),
    }
    write_json(asked.output, record)


if __name__ == "__main__":
    main()
