"""Names and labels that tell the candidates of one proof apart."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ground.errors import BadInput

from .candidates import Candidate
from .own_noise import DENSE

WHOLE = "whole"  # the name of the link from the dense model to the last candidate


def _renamed(candidate: Candidate, parts: Sequence[str]) -> Candidate:
    """Return the candidate with the last parts of its path as its name."""
    path = candidate.path
    is_file = candidate.form != "torch"
    name = candidate.name.removeprefix(path.parent.name if is_file else path.name)
    label = candidate.label.removeprefix(f"{path.parent.name}/{path.name}" if is_file else path.name)
    *folders, last = parts
    words = [*folders, Path(last).stem if is_file else last]
    return replace(candidate, name=f"{'-'.join(words)}{name}", label=f"{'/'.join(parts)}{label}")


def _unreserved(candidate: Candidate) -> Candidate:
    """Return the candidate with a name and a label that differ from the reference's and the whole chain's."""
    if candidate.label == DENSE:
        candidate = replace(candidate, label=f"candidate {DENSE}")
    return replace(candidate, name="candidate whole") if candidate.name == WHOLE else candidate


def with_distinct_names(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates; those that share a name or a label are named by as much of their paths as differs.

    Raises BadInput if a path is given twice.
    """
    twice = [path for path, count in Counter(os.path.abspath(each.path) for each in candidates).items() if count > 1]
    if twice:
        raise BadInput(f"{twice[0]}: given twice as a candidate; give each candidate once")
    paths = [Path(os.path.normpath(each.path)) for each in candidates]  # as typed: no link is resolved
    names, labels = Counter(each.name for each in candidates), Counter(each.label for each in candidates)
    chosen, depth = [_unreserved(each) for each in candidates], 0
    deepest = max(len(path.parts) for path in paths) if paths else 0
    while not len({each.name for each in chosen}) == len({each.label for each in chosen}) == len(chosen):
        depth += 1
        assert depth <= deepest, paths
        chosen = [
            _renamed(each, path.parts[-depth:]) if names[each.name] > 1 or labels[each.label] > 1 else _unreserved(each)
            for each, path in zip(candidates, paths, strict=True)
        ]
    return chosen
