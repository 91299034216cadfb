"""The papers' tables for a given model, in the papers' layout, next to the printed tables.

    python -m benchmarks.reproduce --example digits -o build/digits --record benchmarks/results/reproduce_digits.json
    python -m benchmarks.reproduce --model deit_base_patch16_224 --weights deit_base.safetensors --name DeiT-B
        --calibration imagenet/train-4000 --images imagenet/val --labels val.npy --snapshots 100,500,1000,2000 -o out

A run continues after the finished commands of a stopped one. `--bench none` times nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click
import numpy as np

from benchmarks.quality import procedural_images
from benchmarks.quality.training import PLAIN, trained
from corp_deploy.demo.run import EXAMPLE, write_images
from corp_deploy.machine import versions
from ground.files import write_json, write_text
from perf.timing.watch import environment

from . import tables as grids
from .page import page
from .runs import Subject, calibrated
from .tables import TABLES, MadeTable

SMALL = (100, 400)


def _digits(home: Path) -> Subject:
    home.mkdir(parents=True, exist_ok=True)
    write_images(home)
    return _subject("digits ViT", EXAMPLE / "model", home, home / "calibration.npz", home / "held-out.npz")


def _procedural(home: Path) -> Subject:
    home.mkdir(parents=True, exist_ok=True)
    trained(home / "model", PLAIN)
    for part, count, name in (("train", 600, "calibration"), ("held-out", 600, "held-out")):
        labelled = procedural_images.made(part, count)
        np.savez(home / f"{name}.npz", images=labelled.images, labels=labelled.labels)
    return _subject("procedural ViT", home / "model", home, home / "calibration.npz", home / "held-out.npz")


def _subject(name: str, model: Path, home: Path, calibration: Path, held_out: Path) -> Subject:
    return Subject(
        name=name,
        model=(str(model),),
        calibration=calibration,
        held_out=held_out,
        labels=held_out,
        home=home / "runs",
        snapshots=SMALL,
        align="mlp=8,head=8,conv=8",
        time_limit=2.0,
    )


EXAMPLES = {"digits": _digits, "procedural": _procedural}


def reproduced(subject: Subject, keys: Sequence[str], into: Path) -> list[MadeTable]:
    """Return the tables of these keys; the page is written after each."""
    calibrated(subject)
    tables: list[MadeTable] = []
    for key in keys:
        tables.append(TABLES[key](subject))
        write_text(into / "page.md", page(f"The papers' tables of {subject.name}", tables))
        click.echo(f"{tables[-1].title}: {len(tables[-1].rows)} rows", err=True)
    return tables


@click.command()
@click.option("--example", type=click.Choice([*EXAMPLES]), default=None, help="A model and data of this repository.")
@click.option("--model", default=None, help="As for corp-deploy.")
@click.option("--weights", type=click.Path(exists=True), default=None)
@click.option("--name", default=None, help="The name of the model in the tables.")
@click.option("--calibration", type=click.Path(exists=True, path_type=Path), default=None)
@click.option("--images", type=click.Path(exists=True, path_type=Path), default=None, help="Labelled, held out.")
@click.option("--labels", type=click.Path(exists=True, path_type=Path), default=None)
@click.option("--snapshots", default="100,500,1000,2000", show_default=True, help="Numbers of images of Table 3.")
@click.option("--tables", default=",".join(TABLES), show_default=True)
@click.option("--bench", default="onnxruntime", show_default=True, help="As sweep --bench; none times nothing.")
@click.option("--quick", is_flag=True, help="Fewer sparsities and ratios.")
@click.option("--record", type=click.Path(path_type=Path), default=None, help="Also write the tables as JSON here.")
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True)
def main(
    example: str | None,
    model: str | None,
    weights: str | None,
    name: str | None,
    calibration: Path | None,
    images: Path | None,
    labels: Path | None,
    snapshots: str,
    tables: str,
    bench: str,
    quick: bool,
    record: Path | None,
    output: Path,
) -> None:
    """Print the tables and write page.md."""
    keys = list(dict.fromkeys({"5": "10"}.get(key, key) for key in tables.split(",")))
    if unknown := [key for key in keys if key not in TABLES]:
        raise click.UsageError(f"--tables {unknown[0]}: expected some of {', '.join(TABLES)}")
    if quick:
        grids.STEPS, grids.RATIOS = (0.3, 0.5, 0.7), (0.3, 0.5, 0.7)
    timed = None if bench == "none" else bench
    if example is not None:
        subject = replace(EXAMPLES[example](output), bench=timed)
    elif model is None or calibration is None or images is None or labels is None:
        raise click.UsageError("give --example, or --model, --calibration, --images and --labels")
    else:
        subject = Subject(
            name=name or model,
            model=(model, *(("--weights", weights) if weights else ())),
            calibration=calibration,
            held_out=images,
            labels=labels,
            home=output / "runs",
            snapshots=tuple(map(int, snapshots.split(","))),
            bench=timed,
        )
    made = reproduced(subject, keys, output)
    text = page(f"The papers' tables of {subject.name}", made)
    if record is not None:
        rows = [{name: value for name, value in asdict(table).items() if name != "printed"} for table in made]
        about = {"subject": subject.name, "versions": versions(), "environment": dict(environment())}
        write_json(record, {"kind": "benchmarks/reproduce", "version": 1, **about, "tables": rows})
        write_text(record.with_suffix(".md"), text)
    click.echo(text)


if __name__ == "__main__":
    main()
