"""The rooms' own source, parsed once."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("calib", "corp_deploy", "export", "ground", "perf")


@cache
def trees(*rooms: str) -> dict[Path, ast.Module]:
    """By the files' places in the repository; of all rooms where none is named."""
    paths = sorted(path for room in rooms or ROOMS for path in (ROOT / room).rglob("*.py"))
    return {path.relative_to(ROOT): _parsed(path) for path in paths}


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
