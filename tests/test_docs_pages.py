"""Every page of docs/ does what it says: its commands and its Python run as written, one after the other."""

import re
from pathlib import Path

import numpy as np
import pytest

from corp_deploy.cli import main
from examples.digits.images import load
from tests.page_files import PREPARED
from tests.pages import DOCS, ROOT, blocks, follow, pages, written
from tests.printed import lacking

ELSEWHERE = {
    "start.md"  # from the wheel, in a fresh environment: test_wheel.py
}
FOLLOWED = [
    page
    for page in pages()
    if page.relative_to(DOCS).as_posix() not in ELSEWHERE
    and any(block.kind in ("console", "python") for block in blocks(page))
]


def digits(directory: Path) -> None:
    """What every page may count on: the digits example, images to calibrate on, and others with labels to judge by."""
    (directory / "examples").symlink_to(ROOT / "examples")
    train, test = load("train"), load("held-out")
    np.savez(directory / "images.npz", images=train.images[:128])
    np.savez(directory / "held-out.npz", images=test.images[:64], labels=test.labels[:64])


@pytest.mark.slow("graph", "engine", "process")
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits(tmp_path)
    if (prepare := PREPARED.get(page.relative_to(DOCS).as_posix())) is not None:
        prepare(tmp_path)
    follow(page, tmp_path, monkeypatch)


def test_blocks_are_of_a_kind_that_is_looked_at() -> None:
    """A command in a block of another kind would be run by nobody."""
    kinds = {"console", "python", "toml", "json", "yaml", "sh", "text", "mermaid", "xml"}
    for page in pages():
        for block in blocks(page):
            assert block.kind in kinds, (page.name, block.kind)
            own = re.search(r"^\$? ?corp-deploy ", block.text, re.MULTILINE)
            assert block.kind in ("console", "sh", "yaml", "text") or not own, (page.name, block.text)
        fences = re.findall(r"^ *```(\w*)", written(page), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), f"{page.name}: a fence without a kind or an end"


def test_pages_that_are_prepared_are_there() -> None:
    assert all((DOCS / page).is_file() for page in PREPARED)


def test_every_option_that_a_page_names_is_one() -> None:
    """In running text too."""
    ours = {
        option
        for name, command in main.commands.items()
        for options in (name.split(), *((*each.opts, *each.secondary_opts) for each in command.params))
        for option in options
    }
    others = {
        "--gpus", "--nproc-per-node", "--nnodes", "--max-restarts", "--help", "--help-all", "--version", "--check",
        "--output", "--home", "--only",
    }  # fmt: skip
    for page in pages():
        if page.name == "typed-graphs.md":  # names trtexec's, too; its own test looks at ours
            continue
        prose = re.sub(r"```.*?```", "", written(page), flags=re.DOTALL)
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", prose))
        assert named <= ours | others, (page.name, named - ours - others)


def test_pictures_are_shown(tmp_path: Path) -> None:
    """No picture that no page shows, none shown that isn't there."""
    shown = {name for page in pages() for name in re.findall(r"pictures/([\w.-]+)", page.read_text())}
    shown |= set(re.findall(r"docs/pictures/([\w.-]+)", (ROOT / "README.md").read_text()))
    there = {path.name for path in (DOCS / "pictures").glob("*")} if (DOCS / "pictures").is_dir() else set()
    assert shown == there


def test_what_is_shown_has_to_be_printed() -> None:
    printed = (
        "reading ━━━ 3/3\n┃ site         ┃ lost    ┃\n│ blocks.0.mlp │ 3.1e-03 │\n│ blocks.1.mlp │ 0.24    │\n"
        "│              │ by far  │\nwarning: 12 of\n  64 images, sha256 9f5ba9a44e942808, tool 1.7.1\n"
    )
    shown = [
        "│ blocks.0.mlp │ 0.0035 │\n...\nwarning: 12 of 64 images, sha256 aa00bb11cc22dd33, tool 1.5.0.2",
        "│ blocks.1.mlp │ ... │\nwarning: 12 ... 64 images",
        "│ blocks.1.mlp │ 0.25  │\n│              │ by far │",
    ]
    assert [lacking(each, printed) for each in shown] == [[], [], []]
    for other in (
        "│ blocks.0.mlp │ 0.31 │",
        "│ blocks.2.mlp │ 0.0031 │",
        "│ 0.0031 │",
        "warning: 24 of 64",
        "12 of 64 texts",
    ):
        assert lacking(other, printed), other
    assert lacking("│ blocks.0.mlp │ 0.31 │\nwarning: 1 of 2", printed, varies=True) == []
    assert lacking("│ blocks.3.mlp │ 0.31 │", printed, varies=True)
