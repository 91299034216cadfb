"""The sites of every model of timm in full size, traced on the meta device without weights.

    python -m benchmarks.coverage.names --output benchmarks/results/coverage_names.json

One name of every module of timm comes first, then a second one of each, and so on. A separate process measures each
name, with limits of time and memory. The record is written after every row; rows in the record are measured again only
if they match `--again`. Seconds are CPU seconds of one core.
"""

import fnmatch
import json
import resource
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
import timm
import torch
from torch import nn

from corp_deploy.families import timm_library
from corp_deploy.families.traced_model import sites_of, tracing
from corp_deploy.machine import versions
from corp_deploy.traced.models.module import traced_module
from ground.errors import BadInput
from ground.files import write_text

from .alone import Row, alone
from .classes import share_within

KIND = "benchmarks/coverage-names"
MOST_S, MOST_BYTES = 120, 12 * 2**30
MIB = 2**20
COLUMNS = ("name", "class", "build_s", "trace_s", "find_s", "grown_mib", "share", "sites", "refused", "unknown", "said")
"""`grown_mib` is the growth of resident memory from before the model is built, `share` that of the multiply-adds within
sites. `sites` and `refused` count places that can be reduced, by kind, and that can't, by reason. `unknown` has ops
without a rule, `said` the reason why there is no site.
"""


def ordered(pattern: str) -> Iterator[str]:
    """Yield the first name of every module, then the second ones, and so on."""
    every = set(timm.list_models())
    by_module = [
        [name for name in timm.list_models(module=module) if name in every and fnmatch.fnmatchcase(name, pattern)]
        for module in timm.list_modules()
    ]
    seen = (name for each in zip_longest(*by_module) for name in each if name is not None)
    yield from dict.fromkeys(seen)


def built(name: str) -> nn.Module:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return timm.create_model(name).eval()


def measured(name: str) -> Row:
    """Return the row of a name."""
    before, began = resident(), time.process_time()
    plain = built(name)
    row: Row = {"name": name, "class": type(plain).__name__, "build_s": round(time.process_time() - began, 2)}
    model, began = traced_module(plain, timm_library.facts), time.process_time()
    try:
        found_of = tracing(model)
        traced = time.process_time()
        found = found_of.analysis
    except BadInput as error:
        return row | {"said": str(error)[:200]}
    row |= {"trace_s": round(traced - began, 2), "find_s": round(time.process_time() - traced, 2)}
    row |= {"grown_mib": round((peak() - before) / MIB), "share": round(share_within(found), 3)}
    offered = sites_of(model)
    refused = Counter(each.reason for each in offered.refused)
    kinds = Counter(each.groups.kind for each in offered.every)
    return row | {"sites": kinds, "refused": refused, "unknown": dict(found.flow.unknown)}


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def row_of(name: str) -> Row:
    """Measure a name in a separate process, with limits of time and memory."""
    return {"name": name} | alone(lambda: measured(name), most_s=MOST_S, most_bytes=MOST_BYTES)


class Names:
    """A record with a line for each name."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, dict[str, Row]()
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            assert record["kind"] == KIND, (path, record["kind"])
            self.rows = {line[0]: dict(zip(COLUMNS, line, strict=False)) for line in record["rows"]}

    def put(self, row: Row) -> None:
        self.rows[row["name"]] = row
        head = json.dumps({"kind": KIND, "version": 1, "versions": versions(), "columns": COLUMNS}, indent=2)
        lines = ",\n".join(f"    {json.dumps(_line(each))}" for each in self.rows.values())
        write_text(self.path, f'{head[:-2]},\n  "rows": [\n{lines}\n  ]\n}}\n')


def _line(row: Mapping[str, Any]) -> Sequence[Any]:
    """Return a row's values up to the last one that is not empty."""
    line = [row.get(column) for column in COLUMNS]
    return line[: max(place for place, value in enumerate(line) if value) + 1]


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--names", "pattern", default="*", show_default=True, help="Names that fit this pattern.")
@click.option("--again", default="", help="Measure names that fit this pattern anew.")
def main(output: Path, pattern: str, again: str) -> None:
    torch.set_num_threads(1)
    record = Names(output)
    measured("test_vit")  # so that forked processes need no imports
    for name in ordered(pattern):
        if name not in record.rows or fnmatch.fnmatchcase(name, again):
            record.put(row_of(name))
            click.echo(" ".join(map(str, _line(record.rows[name]))))


if __name__ == "__main__":
    main()
