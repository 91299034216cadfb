"""The table of the commands' start-up times."""

from collections.abc import Sequence
from statistics import median

from benchmarks.pages.markdown import Row, paragraphs, table

TORCH, WITH_TIMM = "import torch", "import torch, timm"
HELP = " --help"


def rows_by_command(record: Row, *, bytecode: bool) -> dict[str, Row]:
    return {row["command"]: row for row in record["rows"] if row["bytecode"] == bytecode}


def startup(record: Row) -> str:
    """Return a table with the baselines, a row for each command on a small input, and one for `--help`."""
    compiled, bare = (rows_by_command(record, bytecode=each) for each in (True, False))
    rows = [_row(f"`{name}`", [compiled[name]], [bare[name]]) for name in compiled if not name.endswith(HELP)]
    helped = [name for name in compiled if name.endswith(HELP)]
    rows.append(
        _row(f"`--help` of {len(helped)} commands", *([each[name] for name in helped] for each in (compiled, bare)))
    )
    text = (
        f"CPU seconds of whole processes, {record['threads']} thread{'s'[: record['threads'] > 1]}, "
        f"{record['environment']['cpu']}; the digits example, {record['images']} images. A ratio is the median over "
        f"{record['rounds']['with']} rounds of interleaved runs. The load average was "
        f"{record['environment']['load_average']:.1f} at the end:"
    )
    head = ["process", "CPU s", "wall s", f"of `{TORCH}`", f"of `{WITH_TIMM}`", "CPU s without bytecode"]
    return paragraphs(text, table(head, rows))


def _row(name: str, compiled: Sequence[Row], bare: Sequence[Row]) -> list[str]:
    """Return a row with the medians over several runs."""
    ratios = [median(row["ratio"][each]["cpu_s"] for row in compiled) for each in (TORCH, WITH_TIMM)]
    cpu_s, wall_s = (median(row[clock] for row in compiled) for clock in ("cpu_s", "wall_s"))
    without = median(row["cpu_s"] for row in bare)
    return [name, f"{cpu_s:.2f}", f"{wall_s:.2f}", *(f"{ratio:.2f}" for ratio in ratios), f"{without:.2f}"]
