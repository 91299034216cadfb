"""The picture of errors on a real encoder, by the share of the multiply-adds."""

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


def _points(rows: Sequence[Mapping[str, Any]], method: str) -> list[tuple[str, Interval]]:
    """Return the errors of a method, the largest share first."""
    own = sorted((row for row in rows if row["method"] == method), key=lambda row: -row["share"])
    return [(f"{row['share']:.0%}", exact_interval(row["class_error"])) for row in own]


def real_encoder(record: Mapping[str, Any]) -> Drawing:
    """Draw a line for each method through its measured shares, or a dot for a single share."""
    left, right, top, bottom = 46, WIDTH - 14, 50, 276
    shares = sorted({row["share"] for row in record["rows"] if row["method"] == "none"}, reverse=True)
    rows = [row for row in record["rows"] if row["share"] in shares]
    tones = iter(TONES)
    lines = [
        [PlotSeries(name=name, tone=next(tones), points=_points(rows, method)) for method, name in names.items()]
        for names in NAMES
    ]
    series = [each for line in lines for each in line]
    y = logarithmic_scale(ends_of(series), start=bottom, end=top)
    step = (right - left - 36) / (len(shares) - 1)
    places = {f"{share:.0%}": left + 18 + place * step for place, share in enumerate(shares)}
    marks: list[Markup] = [grid_y(y, left, right, "relative error")]
    for number, line in enumerate(lines):
        names = legend([(each.name, each.tone) for each in line])
        marks.append(element("g", names, transform=f"translate(0 {18 * number})"))
    marks += [text(x, bottom + 18, label, anchor="middle") for label, x in places.items()]
    marks.append(text((left + right) / 2, bottom + 36, "multiply-adds left", anchor="middle"))
    marks += [mark for each in series for mark in line_with_whiskers(each, places, y, "relative error")]
    title = "DINOv2 ViT-S on photographs: relative error of the class token by share of the multiply-adds"
    return Drawing(title=title, height=bottom + 44, marks=tuple(marks))
