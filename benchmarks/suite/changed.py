"""Run the tests that changed files can reach.

    python -m benchmarks.suite.changed [--base REF] -- .venv/bin/pytest -m "not slow"

`make test-map` records which test files run lines of which source files. A changed source file then selects the test
files that ran a line of it inside a function. Only one test file computes a result that several share, so the map may
miss a test; CI runs all. Without a map, and for files newer than it, a test file is selected if it imports the changed
file, directly or indirectly, including imports inside functions. A test file that uses the repository's root may read
any file and is always selected.
"""

import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import coverage
import grimp

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("calib", "corp_deploy", "export", "ground", "perf")
OTHERS, TESTS = ("benchmarks", "examples"), "tests"
EVERY_TEST = ("conftest", "quick")
"""Modules of tests/ that every test depends on, together with the modules of tests/ that these import."""
READS_ROOT = re.compile(r"\bROOT\b|parents\[1\]|\btests\.pages\b")
MAP = ROOT / "build" / "tests.cov"
NOTHING_COLLECTED = 5  # the exit code of pytest if it deselects all tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Test files to run, in this order; `everything` has the reason if they are all, and is empty otherwise."""

    files: tuple[str, ...]
    everything: str = ""


class Imports:
    """The imports between modules of a repository."""

    def __init__(self, root: Path, packages: Sequence[str], tests: str) -> None:
        self.root, self.tests = root, tests
        self.graph = grimp.build_graph(*packages, tests, cache_dir=None)
        self.files = {
            f"{tests}.{path.stem}": f"{tests}/{path.name}" for path in sorted((root / tests).glob("test_*.py"))
        }
        shared = {f"{tests}.{name}" for name in EVERY_TEST}
        self.shared = shared.union(*(self._upstream(name) for name in shared & self.graph.modules))

    def _upstream(self, module: str) -> set[str]:
        return {name for name in self.graph.find_upstream_modules(module) if name.startswith(f"{self.tests}.")}

    def reached_from(self, path: str) -> dict[str, int] | str:
        """Return the distance in imports of every test module that reaches a file, or the reason why all may."""
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if path.endswith(".md"):
            return {}
        if not path.endswith(".py") or module not in self.graph.modules:
            return f"{path} is no Python file that imports tell of"
        if module in self.shared:
            return f"every test depends on {path}"
        inside = self.graph.find_descendants(module) if path.endswith("/__init__.py") else set()
        return {name: steps for name, steps in self._importers({module, *inside}).items() if name in self.files}

    def _importers(self, modules: set[str]) -> dict[str, int]:
        found, front, steps = dict[str, int](), modules, 0
        while front:
            found |= dict.fromkeys(front, steps)
            front = {each for module in front for each in self.graph.find_modules_that_directly_import(module)}
            front, steps = front - found.keys(), steps + 1
        return found

    def select(self, changed: Iterable[str], ran: Mapping[str, Collection[str]] | None = None) -> Selection:
        """Return the test files, nearest first; `ran` is a map of `mapped_tests`."""
        ran = ran or {}
        known = {file for files in ran.values() for file in files}
        distances: dict[str, int] = {}
        for path in changed:
            reached = self.reached_from(path)
            if isinstance(reached, str):
                return Selection(files=tuple(self.files.values()), everything=reached)
            if path in ran:
                new = {name: steps for name, steps in reached.items() if self.files[name] not in known}
                far = len(self.graph.modules)
                reached = new | {n: reached.get(n, far) for n, file in self.files.items() if file in ran[path]}
            for name, steps in reached.items():
                distances[name] = min(steps, distances.get(name, steps))
            readers = {name: len(self.graph.modules) for name, file in self.files.items() if self._reads_root(file)}
            distances = readers | distances
        return Selection(files=tuple(self.files[name] for name in sorted(distances, key=lambda x: (distances[x], x))))

    def _reads_root(self, file: str) -> bool:
        return READS_ROOT.search((self.root / file).read_text(encoding="utf-8")) is not None


def mapped_tests(data: Path, root: Path) -> dict[str, set[str]]:
    """Return the test files that ran a line of each source file; sources that were only imported are left out."""
    measured = coverage.CoverageData(str(data))
    measured.read()
    found: dict[str, set[str]] = {}
    for path in measured.measured_files():
        contexts = set[str]().union(*measured.contexts_by_lineno(path).values())
        if files := {context.partition("::")[0] for context in contexts if context}:
            found[Path(path).relative_to(root).as_posix()] = files
    return found


def _git(root: Path, *words: str) -> str:
    return subprocess.run(("git", *words), cwd=root, check=True, capture_output=True, text=True).stdout


def default_base(root: Path) -> str:
    """Return the commit where the branch left main, or HEAD on main and without a main."""
    heads = _git(root, "for-each-ref", "--format=%(refname:short)", "refs/heads/main")
    return _git(root, "merge-base", "HEAD", "main").strip() if heads else "HEAD"


def changed_files(root: Path, base: str) -> list[str]:
    """Return the paths of changed, deleted and new files in the repository."""
    differing = _git(root, "diff", "--name-only", "--no-renames", "-z", base, "--")
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({path for path in (differing + new).split("\0") if path})


@click.command(help=__doc__)
@click.option("--base", help="The commit that files are compared with.  [default: where the branch left main]")
@click.argument("pytest", nargs=-1, required=True)
def main(base: str | None, pytest: tuple[str, ...]) -> None:
    base = base or default_base(ROOT)
    imports, changed = Imports(ROOT, (*ROOMS, *OTHERS), TESTS), changed_files(ROOT, base)
    ran = mapped_tests(MAP, ROOT) if MAP.is_file() else {}
    selection = imports.select(changed, ran)
    how = "by the lines that they ran" if ran else "by imports, without a map"
    count = f"{len(selection.files)} of {len(imports.files)} test files {how}, {len(changed)} changed since {base}"
    click.echo(f"{count}: {selection.everything}" if selection.everything else count, err=True)
    if selection.files:
        code = subprocess.run([*pytest, *selection.files], cwd=ROOT, check=False).returncode
        sys.exit(0 if code == NOTHING_COLLECTED else code)


if __name__ == "__main__":
    main()
