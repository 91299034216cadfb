"""The table of levers and kinds of sites: what works there errs little, what doesn't has the tool's reason."""

import re

import pytest

from benchmarks.pages.levers_page import levers
from benchmarks.quality.levers import KINDS, LEVERS, cells


def test_keys_that_all_heads_share_are_reduced_with_their_queries() -> None:
    """One layer's keys and values, spread out to as many heads as queries have."""
    every = {
        cell["lever"]: cell
        for cell in cells("grouped heads", {name: LEVERS[name] for name in ("`--preset none`", "`--preset best`")})
    }
    assert every["`--preset best`"]["error"] < every["`--preset none`"]["error"] < 0.9


@pytest.mark.slow("graph")
@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_is_an_error_or_a_reason(kind: str) -> None:
    asked = ("`--preset best`", "`--macs`", "`--sparse 2:4`", "`--rescale`", "`--merge-tokens`", "BF16")
    rows = list(cells(kind, {name: LEVERS[name] for name in asked}))
    by_lever = {row["lever"]: row for row in rows}
    for lever in ("`--preset best`", "`--macs`", "`--sparse 2:4`", "BF16"):
        assert by_lever[lever]["error"] < 0.7, (kind, by_lever[lever])
    is_of_tokens = KINDS[kind].share in ("mlp", "attn")
    assert ("reason" in by_lever["`--rescale`"]) is is_of_tokens or kind == "squeeze and excitation"
    assert is_of_tokens or "no attention of tokens" in by_lever["`--merge-tokens`"]["reason"]
    page = levers({"rows": rows})
    for row in rows:
        line = next(line for line in page.splitlines() if line.startswith(f"| {row['lever']}"))
        told = line.split("|")[2].strip()
        assert re.fullmatch(r"\[\d+\]" if "reason" in row else r"[\d.e-]+", told), line
