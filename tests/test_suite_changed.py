"""`make test-changed`: which test files a change selects, in a small repository of its own."""

import subprocess
from pathlib import Path

import coverage
import pytest
from click.testing import CliRunner

from benchmarks.suite import changed
from benchmarks.suite.changed import Imports, Selection, changed_files, default_base, mapped_tests

FILES = {
    "shelf/__init__.py": "",
    "shelf/limits.py": "LIMIT = 3\n",
    "shelf/books.py": "from .limits import LIMIT\n\ndef few(count): return count < LIMIT\n",
    "shelf/lamps.py": "def lit(): return True\n",
    "shelf/desk.py": "def read():\n    from . import lamps\n    return lamps.lit()\n",
    "shelf_tests/__init__.py": "",
    "shelf_tests/conftest.py": "from shelf_tests import plugs\n",
    "shelf_tests/plugs.py": "",
    "shelf_tests/shared.py": "from shelf.books import few\n",
    "shelf_tests/test_books.py": "from shelf_tests.shared import few\n\ndef test_few(): assert few(2)\n",
    "shelf_tests/test_desk.py": "from shelf import desk\n\ndef test_read(): assert desk.read()\n",
    "shelf_tests/test_words.py": "from pathlib import Path\n\nROOT = Path(__file__).parents[1]\n",
    "README.md": "A shelf.\n",
    "settings.toml": "",
}
BOOKS, DESK, WORDS = (f"shelf_tests/test_{name}.py" for name in ("books", "desk", "words"))


def git(root: Path, *words: str) -> None:
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(("git", *named, *words), cwd=root, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    git(tmp_path, "init", "--initial-branch", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "Add a shelf")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "selected"),
    [
        ("shelf/limits.py", (BOOKS, WORDS)),  # a constant, which no test runs a line of
        ("shelf/lamps.py", (DESK, WORDS)),  # imported inside a function
        ("shelf_tests/shared.py", (BOOKS, WORDS)),
        (BOOKS, (BOOKS, WORDS)),
        ("shelf/__init__.py", (DESK, BOOKS, WORDS)),
        ("README.md", (WORDS,)),
    ],
)
def test_change_selects_files_that_import_it_or_read_the_root(
    repository: Path, path: str, selected: tuple[str, ...]
) -> None:
    assert Imports(repository, ("shelf",), "shelf_tests").select([path]) == Selection(files=selected)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("settings.toml", "settings.toml is no Python file"),
        ("shelf/deleted.py", "shelf/deleted.py is no Python file"),
        ("shelf_tests/conftest.py", "every test depends on shelf_tests/conftest.py"),
        ("shelf_tests/plugs.py", "every test depends on shelf_tests/plugs.py"),
    ],
)
def test_change_without_import_information_selects_everything(repository: Path, path: str, reason: str) -> None:
    selection = Imports(repository, ("shelf",), "shelf_tests").select([BOOKS, path])
    assert selection.files == (BOOKS, DESK, WORDS)
    assert selection.everything.startswith(reason)


def test_nearest_test_files_run_first(repository: Path) -> None:
    near = repository / "shelf_tests/test_zoo.py"
    near.write_text("from shelf.books import few\n\ndef test_few(): assert few(2)\n")
    selection = Imports(repository, ("shelf",), "shelf_tests").select(["shelf/books.py"])
    assert selection.files == ("shelf_tests/test_zoo.py", BOOKS, WORDS)


def test_coverage_map_selects_tests_that_ran_the_changed_file(repository: Path) -> None:
    (repository / "shelf_tests/test_new.py").write_text("from shelf import books\n")
    imports = Imports(repository, ("shelf",), "shelf_tests")
    ran = {"shelf/books.py": {DESK}, "shelf/lamps.py": {BOOKS, WORDS}}
    expected = ("shelf_tests/test_new.py", DESK, WORDS)
    assert imports.select(["shelf/books.py"], ran).files == expected, "test_new.py is newer than the map"
    assert imports.select(["shelf/limits.py"], ran).files == imports.select(["shelf/limits.py"]).files, "unmapped"
    assert imports.select([BOOKS], ran).files == (BOOKS, WORDS)


def test_coverage_map_excludes_lines_run_by_imports(tmp_path: Path) -> None:
    data = coverage.CoverageData(str(tmp_path / "tests.cov"))
    books, limits = (str(tmp_path / "shelf" / name) for name in ("books.py", "limits.py"))
    data.set_context("")
    data.add_lines({books: [1, 2], limits: [1]})
    data.set_context(f"{BOOKS}::test_few[3]|run")
    data.add_lines({books: [2]})
    data.write()
    assert mapped_tests(tmp_path / "tests.cov", tmp_path) == {"shelf/books.py": {BOOKS}}


def test_files_are_compared_with_the_merge_base(repository: Path) -> None:
    assert changed_files(repository, default_base(repository)) == []
    git(repository, "checkout", "-b", "branch")
    (repository / "shelf/books.py").write_text("")
    git(repository, "commit", "--all", "--message", "Empty books")
    git(repository, "mv", "shelf/lamps.py", "shelf/lights.py")
    (repository / "new.py").write_text("")
    expected = ["new.py", "shelf/books.py", "shelf/lamps.py", "shelf/lights.py"]
    assert changed_files(repository, default_base(repository)) == expected
    assert changed_files(repository, "HEAD") == [name for name in expected if name != "shelf/books.py"]
    git(repository, "branch", "--delete", "--force", "main")
    assert default_base(repository) == "HEAD"


@pytest.fixture
def run(repository: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are run in the repository in place of pytest."""
    commands: list[list[str]] = []
    started = subprocess.run

    def record(words: list[str], **options: object) -> object:
        if words[0] != "pytest":
            return started(words, **options)  # type: ignore[call-overload]
        commands.append(words)
        return subprocess.CompletedProcess(words, 5 if DESK in words else 1)

    monkeypatch.setattr(changed, "ROOT", repository)
    monkeypatch.setattr(changed, "ROOMS", ("shelf",))
    monkeypatch.setattr(changed, "OTHERS", ())
    monkeypatch.setattr(changed, "TESTS", "shelf_tests")
    monkeypatch.setattr(changed, "MAP", repository / "tests.cov")
    monkeypatch.setattr(subprocess, "run", record)
    return commands


def test_command_runs_the_selected_files_and_reports_their_number(repository: Path, run: list[list[str]]) -> None:
    words = ["--", "pytest", "-m", "not slow"]
    done = CliRunner().invoke(changed.main, words)
    assert (done.exit_code, run) == (0, [])
    assert done.stderr.startswith("0 of 3 test files by imports, without a map, 0 changed since ")
    (repository / "shelf/books.py").write_text("")
    done = CliRunner().invoke(changed.main, words)
    assert (done.exit_code, run) == (1, [["pytest", "-m", "not slow", BOOKS, WORDS]])
    assert done.stderr.startswith("2 of 3 test files by imports, without a map, 1 changed since ")
    (repository / "settings.toml").write_text("changed = true")
    done = CliRunner().invoke(changed.main, words)
    assert done.exit_code == 0, "pytest collected nothing"
    assert "3 of 3 test files" in done.stderr
    assert "settings.toml is no Python file" in done.stderr
