"""Scales, ticks and labels of plots, and plots of long names, odd values and failed rows."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.parity.link import Link
from perf.parity.tolerance import user_tolerance
from perf.report import plots
from perf.report.plots import HUES, PlotSeries, Spot
from perf.report.svg import (
    WIDTH,
    Drawing,
    Scale,
    cut_in_middle,
    element,
    linear_scale,
    logarithmic_scale,
    tick_label,
    width_of,
)
from perf.stats.stats import Interval
from tests.links import link_between


def test_linear_and_logarithmic_axes_place_values() -> None:
    scale = Scale(low=0, high=10, start=100, end=200)
    assert [scale.at(v) for v in (0, 5, 10, 99, -3)] == [100, 150, 200, 200, 100]
    log = Scale(low=1e-4, high=1, start=0, end=400, log=True)
    assert [round(log.at(v), 6) for v in (1e-4, 1e-3, 1e-2, 1, 0)] == [0, 100, 200, 400, 0]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=8))
def test_every_range_gets_ticks_inside_it(values: list[float]) -> None:
    for scale in (linear_scale(values, start=0, end=100), linear_scale(values, start=0, end=100, zero=False),
                  logarithmic_scale(values, start=0, end=100)):  # fmt: skip
        assert scale.low <= min(values) * (1 + 1e-12)
        assert max(values) <= scale.high * (1 + 1e-12)
        assert 1 <= len(scale.ticks) <= 12, (scale, scale.ticks)
        slack = 1e-9 * (scale.high - scale.low)
        assert all(scale.low - slack <= tick <= scale.high + slack for tick in scale.ticks)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.001, "0.001"), (2500, "2500"), (25000, "25k"), (1e-6, "1e-6"), (2e9, "2G"), (1_200_000, "1.2M")],
)
def test_labels_are_short(value: float, words: str) -> None:
    assert tick_label(value) == words


def around(value: float) -> Interval:
    return Interval(value=value, low=value * 0.9, high=value * 1.1)


def links() -> list[Link]:
    """Make one link whose candidate is not finite and one without a limit."""
    rows = np.random.default_rng(0).standard_normal((5, 4))
    broken = link_between(rows, rows * math.nan, kind="whole", name="fp16", tolerance=user_tolerance(max_error=0.01))
    return [broken, link_between(rows, rows, kind="whole")]


HOSTILE = "'\"><script>&amp;]]>"
DRAWN: list[Callable[[], Drawing]] = [
    lambda: plots.draw_curve([PlotSeries(name="dense", tone="dense", points=[("1", around(3.0)), ("8", around(20.0))])],
                        title="t", unit="ms", x_label="batch", log=True),
    lambda: plots.draw_curve([PlotSeries(name="dense", tone="dense", points=[("1", around(3.0))])],
                        title="t", unit="ms", x_label="batch", log=False),
    lambda: plots.draw_gains({"batch 1": (around(1.4), around(1.0)), "batch 8": (None, None)}, 2.0),
    lambda: plots.draw_distributions({"batch 1": {"dense": [2.0] * 9 + [500.0], "reduced": [1.0]}}),
    lambda: plots.draw_sites({"blocks.0.mlp": (0.3, 0.0)}),
    lambda: plots.draw_links(links(), x_label="x"),
    lambda: plots.draw_scatter({HOSTILE: [Spot(x=0.4, value=0.0, filled=True, tip=HOSTILE)],
                           "corp": [Spot(x=0.9, value=0.3, filled=False, tip="b")]}, title=HOSTILE, unit="error",
                          x_label="share", least=1e-6),
]  # fmt: skip


@pytest.mark.parametrize("draw", DRAWN)
def test_plots_are_valid_xml_within_their_frame(draw: Callable[[], Drawing]) -> None:
    svg = draw().inline()
    ElementTree.fromstring(svg)
    assert "nan" not in svg
    assert "inf" not in svg.replace("infinite", "")
    assert all(-1 <= float(x) <= WIDTH + 1 for x in re.findall(r'\b(?:x|x1|x2|cx)="([-\d.]+)"', svg))


LONG = "encoder.layers.11.self_attention.qk.of.a.module.with.a.long.name"
SLOW = Interval(value=123456.0, low=100000.0, high=150000.0)
WIDE: list[Callable[[], Drawing]] = [
    lambda: plots.draw_sites({"blocks.10.attn.qk": (0.3, 0.01), LONG: (0.4, 0.02)}),
    lambda: plots.draw_links([replace(each, name=f"{LONG} {each.name}") for each in links()], x_label="x"),
    lambda: plots.draw_gains({"batch 65536": (around(1.4), around(1.0))}, 2.0),
    lambda: plots.draw_distributions({"batch 65536": {LONG: [123456.0] * 9, f"{LONG}2": [98765.0] * 9}}),
    lambda: plots.draw_curve(
        [PlotSeries(name=LONG, tone="dense", points=[(f"{5000 * n:,}", SLOW) for n in range(1, 31)]),
         PlotSeries(name=f"{LONG}2", tone="reduced", points=[("5,000", around(0.00125))])],
        title="t", unit="images/s", x_label="batch", log=False,
    ),
    lambda: plots.draw_scatter(
        {f"{LONG}{place}": [Spot(x=0.4, value=1.25e-5, filled=True, tip="a")] for place in range(6)},
        title="t", unit="error", x_label="share", least=1e-6,
    ),
]  # fmt: skip


def extents(drawing: Drawing) -> list[tuple[float, float, float, str]]:
    """Return height, left end, right end and words of every text in a drawing, by estimated letter widths."""
    found = []
    for each in ElementTree.fromstring(drawing.inline()).iter():
        if each.tag.endswith("text"):
            x, words = float(each.attrib["x"]), each.text or ""
            before = {"start": 0.0, "middle": 0.5, "end": 1.0}[each.attrib["text-anchor"]]
            left = x - before * width_of(words)
            found.append((float(each.attrib["y"]), left, left + width_of(words), words))
    return found


@pytest.mark.parametrize("draw", [*DRAWN, *WIDE])
def test_labels_stay_in_the_frame_and_do_not_overlap(draw: Callable[[], Drawing]) -> None:
    texts = sorted(extents(draw()))
    for _, left, right, words in texts:
        assert left >= -1, words
        assert right <= WIDTH + 1, words
    for (y, _, end, one), (below, start, _, other) in pairwise(texts):
        assert y != below or end <= start + 1, (one, other)


def test_shortened_label_keeps_both_ends_and_its_full_tooltip() -> None:
    svg = WIDE[0]().inline()
    assert ">blocks.10.attn.qk</text>" in svg
    assert re.search(r">encoder\.[\w.]*…[\w.]*long\.name</text>", svg)
    assert f"<title>{LONG}: 0.4 before" in svg


@pytest.mark.parametrize(
    ("label", "width", "shown"),
    [
        ("blocks.0", 100.0, "blocks.0"),
        ("abcdefgh", 36.0, "ab…gh"),
        ("abcdefgh", 1.0, "a…"),
        ("模型模型", 44.0, "模…型"),
    ],
)
def test_long_label_is_shortened_in_the_middle(label: str, width: float, shown: str) -> None:
    assert cut_in_middle(label, width) == shown


def test_failed_row_and_its_reason_stay_visible() -> None:
    svg = DRAWN[2]().inline()
    assert "batch 8" in svg
    assert "no run" in svg
    assert "not finite of 0.01" in DRAWN[5]().inline()


def test_one_interrupted_call_does_not_flatten_a_distribution() -> None:
    """The tick labels end near the bulk, instead of at 250 times the median."""
    labels = [float(x) for x in re.findall(r">([\d.]+)</text>", DRAWN[3]().inline())]
    assert max(labels) < 10


@pytest.mark.parametrize("draw", DRAWN)
def test_standalone_plot_contains_its_colours(draw: Callable[[], Drawing]) -> None:
    drawing = draw()
    root = ElementTree.fromstring(drawing.standalone.split("?>", 1)[1])
    tags = [each.tag.split("}")[1] for each in root.iter()]
    assert tags[:3] == ["svg", "style", "rect"]
    assert tags[3:] == [each.tag.split("}")[1] for each in ElementTree.fromstring(drawing.inline()).iter()][1:]
    style = root.find("{http://www.w3.org/2000/svg}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in str(style.text)
    tones = set(re.findall(r'class="([a-z0-9 ]+)"', drawing.inline()))
    assert {word for tone in tones for word in tone.split()} <= {*re.findall(r"\.([a-z0-9]+)", str(style.text)), "name"}


def test_every_hue_has_a_css_class() -> None:
    clouds = {str(i): [Spot(x=0.1 * i, value=0.1, filled=True, tip="")] for i in range(HUES + 1)}
    drawing = plots.draw_scatter(clouds, title="t", unit="error", x_label="x", least=1e-6)
    assert len(set(re.findall(r'class="(hue\d+)"', drawing.inline()))) == HUES
    assert all(f".hue{place} " in drawing.standalone for place in range(HUES))


def test_elements_escape_text_and_attributes() -> None:
    """Numbers get one decimal, and underscores in attribute names become hyphens."""
    drawn = element("text", HOSTILE, class_=HOSTILE, text_anchor="end", x=1)
    root = ElementTree.fromstring(drawn)
    assert (root.text, root.attrib) == (HOSTILE, {"class": HOSTILE, "text-anchor": "end", "x": "1.0"})
    assert str(element("g", element("line", y1=0.25))) == '<g><line y1="0.2"/></g>'
