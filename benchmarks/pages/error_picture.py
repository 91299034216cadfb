"""The pictures of errors on a real encoder: by the share of the multiply-adds, and by the images of the fit."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from perf.report.plots import PlotSeries, ends_of, line_with_whiskers
from perf.report.svg import WIDTH, Drawing, element, grid_y, legend, logarithmic_scale, text
from perf.stats.stats import Interval, exact_interval

NAMES = (
    {"none": "no repair", "corp": "corp", "best": "best", "best, closed loop": "closed loop"},
    {"best, by site": "by site", "merging, growing": "merged tokens"},
)
"""Names of methods in the record and in the legend, by lines of the legend."""
TONES = ("hue6", "hue1", "hue0", "hue3", "hue2", "hue5", "hue4")
JUDGES = {"error": "the 16", "more_error": "30 others"}
Points = list[tuple[str, Interval]]


def _drawn(lines: Sequence[Mapping[str, Points]], labels: Sequence[str], title: str, x_label: str) -> Drawing:
    """Draw a line through the points of each name, and a line of the legend for each mapping of names."""
    left, right, top, bottom = 46, WIDTH - 14, 32 + 18 * len(lines), 276
    tones = iter(TONES)
    series = [[PlotSeries(name=name, tone=next(tones), points=line[name]) for name in line] for line in lines]
    every = [each for own in series for each in own]
    y = logarithmic_scale(ends_of(every), start=bottom, end=top)
    step = (right - left - 56) / max(len(labels) - 1, 1)
    places = {label: left + 28 + place * step for place, label in enumerate(labels)}
    marks: list[Markup] = [grid_y(y, left, right, "relative error")]
    for number, own in enumerate(series):
        names = legend([(each.name, each.tone) for each in own])
        marks.append(element("g", names, transform=f"translate(0 {18 * (number + 1)})"))
    marks += [text(x, bottom + 18, label, anchor="middle") for label, x in places.items()]
    marks.append(text((left + right) / 2, bottom + 36, x_label, anchor="middle"))
    marks += [mark for each in every for mark in line_with_whiskers(each, places, y, "relative error")]
    return Drawing(title=title, height=bottom + 44, marks=tuple(marks))


def _points(rows: Sequence[Mapping[str, Any]], method: str) -> Points:
    """Return the errors of a method, the largest share first."""
    own = sorted((row for row in rows if row["method"] == method), key=lambda row: -row["share"])
    return [(f"{row['share']:.0%}", exact_interval(row["class_error"])) for row in own]


def real_encoder(record: Mapping[str, Any]) -> Drawing:
    """Draw a line for each method through its measured shares, or a dot for a single share."""
    shares = sorted({row["share"] for row in record["rows"] if row["method"] == "none"}, reverse=True)
    rows = [row for row in record["rows"] if row["share"] in shares]
    lines = [{name: _points(rows, method) for method, name in names.items()} for names in NAMES]
    title = "DINOv2 ViT-S on photographs: relative error of the class token by share of the multiply-adds"
    return _drawn(lines, [f"{share:.0%}" for share in shares], title, "multiply-adds left")


def more_data(record: Mapping[str, Any]) -> Drawing:
    """Draw a line for each effort and set of judging photographs through the sets of images that were fitted to."""
    rows = sorted(record["rows"], key=lambda row: (row["crops"], row["photographs"]))
    hows = dict.fromkeys(row["how"] for row in record["rows"])

    def named(row: Mapping[str, Any]) -> str:
        return f"{row['crops']:,} of {row['photographs']}"

    lines = [
        {
            f"{how}, {judged_on}": [(named(row), exact_interval(row[field])) for row in rows if row["how"] == how]
            for field, judged_on in JUDGES.items()
        }
        for how in hows
    ]
    title = "DINOv2 ViT-S at 0.8 of the multiply-adds: relative error of the class token by the images of the fit"
    return _drawn(lines, list(dict.fromkeys(map(named, rows))), title, "crops of so many photographs")
