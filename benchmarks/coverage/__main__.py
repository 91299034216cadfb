"""Which architectures go through the whole chain, from sites to engines.

    python -m benchmarks.coverage --output benchmarks/results/coverage.json

Small instances with random weights (transformers' ones where that is installed): sites, calibration on random inputs,
half of everything removed by three presets, FP32 and FP16 graphs beside torch, TensorRT-RTX plans of the dense and of
the reduced one. A row is added after each; rows that the record has are kept.
"""

import fnmatch
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click

from benchmarks.harness import Record
from corp_deploy.machine import versions

from .chain import row_of
from .instances import INSTANCES

KIND, KEY = "benchmarks/coverage", ("source", "name")


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--rows", "pattern", default="*", show_default=True, help="Names that fit this pattern.")
@click.option("--again", is_flag=True, help="Make rows that are there anew.")
def main(output: Path, pattern: str, again: bool) -> None:
    record = Record(output, KIND, {"versions": versions()})
    for instance in INSTANCES:
        key = {"source": instance.source, "name": instance.name}
        if not fnmatch.fnmatchcase(instance.name, pattern) or (record.has("rows", key) and not again):
            continue
        if instance.source != "timm" and find_spec(instance.source) is None:
            click.echo(f"{instance.name}: skipped, {instance.source} is not installed")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            record.put("rows", row_of(instance, Path(scratch)), KEY)
        click.echo(f"{instance.name}: done")


if __name__ == "__main__":
    main()
