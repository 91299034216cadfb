"""Texts of the report of releases over time: its verdicts, and how releases, figures and changes are written."""

from collections.abc import Sequence

from ground.quantity import format_number
from perf.record.runs import Scalar
from perf.stats.changes import LEAST_VALUES
from perf.stats.stats import Interval
from perf.stats.trend import RECENT

from .content import VerdictLine
from .numbers import MINUS, NOTHING, percent_text, size_text
from .past_figures import BYTES, JOULES, RATE, SHARE
from .past_releases import Line, Move, PastReleases

MEASURED = (RATE, JOULES, "ms")  # the units that are written
SHOWN_PLACES, DIGEST, SHOWN_OF_DIGEST = 4, 64, 8


def in_line(past: PastReleases, line: Line, title: str) -> str:
    """Return a title, with the line's name if there are several."""
    return title if len(past.lines) == 1 else f"{title}: {line.name}"


def release_text(line: Line, place: int) -> str:
    return f"release {place + 1} ({line.releases[place].label})"


def releases_text(line: Line, places: Sequence[int]) -> str:
    if len(places) == len(line.releases) > 1:
        return "all releases"
    more = f" and {len(places) - SHOWN_PLACES} more" if len(places) > SHOWN_PLACES else ""
    return ", ".join(release_text(line, place) for place in places[:SHOWN_PLACES]) + more


def change_text(move: Move, *, bounds: bool = True) -> str:
    """Return a change as a signed share, of an agreement in points, with its 95 % interval unless it is exact."""
    ratio, is_share = move.ratio, move.series.unit == SHARE
    scale = 100 * (move.before.value if is_share else 1)
    mid, low, high = (f"{scale * (end - 1):+.1f}".replace("-", MINUS) for end in (ratio.value, ratio.low, ratio.high))
    change = f"{mid} {'points' if is_share else '%'}"
    return f"{change} ({low} to {high})" if bounds and ratio.low < ratio.high else change


def move_text(move: Move) -> str:
    return f"{move.name} {change_text(move)}"


def moves_texts(moves: Sequence[Move]) -> list[str]:
    """Return a text for each figure, of several batch sizes without intervals."""
    named = dict[str, list[Move]]()
    for move in moves:
        named.setdefault(move.series.name, []).append(move)
    return [move_text(each[0]) if len(each) == 1 else _of_batches(name, each) for name, each in named.items()]


def _of_batches(name: str, moves: Sequence[Move]) -> str:
    changes = [f"{move.batch} {change_text(move, bounds=False)}" for move in moves]
    return f"{name} at batch {', '.join(changes)}"


def scalar_text(value: Scalar) -> str:
    text = NOTHING if value is None else str(value)
    return f"{text[:SHOWN_OF_DIGEST]}…" if len(text) == DIGEST and text.isalnum() else text


def heading_text(name: str, unit: str) -> str:
    return f"{name}, {unit}" if unit in MEASURED else name


def value_with_interval(value: Interval | None, unit: str, *, bounds: bool = True) -> str:
    """Return a figure, with its interval on a second line if it is not exact."""
    if value is None:
        return NOTHING
    if unit == BYTES:
        return size_text(value.value)
    ends = (value.value, value.low, value.high)
    mid, low, high = (percent_text(end) if unit == SHARE else format_number(end, 4) for end in ends)
    return mid if low == high or not bounds or not value.is_bounded else f"{mid}\n{low} to {high}"


def verdict_of_newest(past: PastReleases, line: Line) -> VerdictLine:
    newest, count = line.releases[-1], len(line.releases)
    here = f"Newest of {count} releases: {newest.label}" if count > 1 else f"The only release: {newest.label}"
    here = f"{line.name}. {here}" if len(past.lines) > 1 else here
    worse, better = ([move for move in line.standing if move.is_worse == is_worse] for is_worse in (True, False))
    clauses = [
        f"{word} {_moves_text(line, moves)}" for word, moves in (("worse:", worse), ("better:", better)) if moves
    ]
    if not line.is_judged:
        clauses.append(f"times are judged from {LEAST_VALUES} releases on, and `bench compare` compares two")
    elif not clauses:
        clauses.append(f"no figure changed at the newest {min(RECENT, count)} releases and still differs")
    clauses += [f"no {names}" for places, names, _ in line.gaps if count - 1 in places and len(places) < count]
    headline, verdict = ("Regression", "FAIL") if worse else ("No regression", "PASS")
    if not worse and (line.lacks_newest or not line.is_judged):
        headline, verdict = "Not judged", "UNJUDGED"
    why = f"{here}, {newest.bench.created[:10]}; {'; '.join(clauses)}."
    return VerdictLine(headline=headline, verdict=verdict, why=why)


def _moves_text(line: Line, moves: Sequence[Move]) -> str:
    places = sorted({move.point.first for move in moves})
    since = {place: [move for move in moves if move.point.first == place] for place in places}
    return "; ".join(f"{', '.join(moves_texts(own))} since {release_text(line, at)}" for at, own in since.items())
