"""Every kind of file that this tool writes with a kind and a version of its own, found in its source; with what writes
and reads it, which formats.toml says by hand.

python -m benchmarks.pages.formats_page          writes docs/reference/files.md
python -m benchmarks.pages.formats_page --check  fails when a kind is not in formats.toml, or the page not what they say
"""

import ast
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.pages.markdown import table

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("calib", "corp_deploy", "export", "ground", "perf")
WORDS, PAGE = Path(__file__).with_name("formats.toml"), ROOT / "docs" / "reference" / "files.md"
READERS = {"record_from_bytes", "record_from_file", "record_from_text", "record_from_value"}


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A kind with its version where a file of the source writes or reads it."""

    kind: str
    version: int
    file: str


def _pairs(node: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """What an assignment gives to which name."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [(node.target, node.value)]
    if not isinstance(node, ast.Assign):
        return []
    (target, *_), value = node.targets, node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _assigned(tree: ast.Module) -> dict[str, Any]:
    """Texts and whole numbers by their names in a module."""
    return {
        name.id: value.value
        for node in tree.body
        for name, value in _pairs(node)
        if isinstance(name, ast.Name) and isinstance(value, ast.Constant)
    }


def _constants(trees: Mapping[str, ast.Module]) -> dict[str, dict[str, Any]]:
    """By file every name that stands for a text or a number there, imported ones too."""
    own = {file: _assigned(tree) for file, tree in trees.items()}
    known = {file: dict(values) for file, values in own.items()}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            folder = Path(file).parents[node.level - 1] if node.level else Path()
            source = str(folder / (node.module or "").replace(".", "/")) + ".py"
            for name in node.names:
                if name.name in own.get(source, {}):
                    known[file][name.asname or name.name] = own[source][name.name]
    return known


def _value(node: ast.expr | None, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _of_class(node: ast.ClassDef, names: Mapping[str, Any]) -> tuple[Any, Any]:
    """Of a struct whose kind is its tag, or a field of it with a default."""
    own = {each.arg: _value(each.value, names) for each in node.keywords}
    fields = {
        each.target.id: _value(each.value, names)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    kind = own.get("tag") if own.get("tag_field") == "kind" else fields.get("kind")
    return kind, fields.get("version")


def _of_node(node: ast.AST, names: Mapping[str, Any]) -> tuple[Any, Any]:
    """The kind and version that a record is written or read with here; None where none is."""
    if isinstance(node, ast.Dict):
        entries = {_value(key, names): value for key, value in zip(node.keys, node.values, strict=True)}
        if entries.keys() >= {"kind", "version"}:
            return _value(entries["kind"], names), _value(entries["version"], names)
    if isinstance(node, ast.ClassDef):
        return _of_class(node, names)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in READERS:
        given = {each.arg: each.value for each in node.keywords}
        return _value(given.get("kind"), names), _value(given.get("version", ast.Constant(1)), names)
    return None, None


def formats_of(sources: Mapping[str, str]) -> list[Found]:
    """Every kind and version in the sources, by file."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    constants = _constants(trees)
    found = set()
    for file, tree in trees.items():
        for node in ast.walk(tree):
            kind, version = _of_node(node, constants[file])
            if isinstance(kind, str) and isinstance(version, int):
                found.add(Found(kind, version, file))
    return sorted(found)


def formats() -> list[Found]:
    """All of the tool's."""
    files = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return formats_of({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files})


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """An entry of formats.toml: `golden` is the kind's file in tests/golden/files, `no_golden` why it has none."""

    about: str
    file: str
    written: str
    read: str
    other: str
    golden: str = ""
    no_golden: str = ""


def words() -> tuple[dict[str, Format], list[dict[str, str]]]:
    """Of every kind, and of files that have none."""
    content = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    own = {kind: Format(**entry) for kind, entry in content["kinds"].items()}
    return own, content["others"]


def wrong(found: Sequence[Found], told: Mapping[str, Format]) -> list[str]:
    """Complain of kinds that formats.toml lacks, that are no more, or that have two versions or no golden file."""
    versions = {each.kind: each.version for each in found}
    new = [f"{kind}: say in {WORDS.name} what it is" for kind in sorted(versions.keys() - told.keys())]
    gone = [f"{kind}: it is no more; take it out" for kind in sorted(told.keys() - versions.keys())]
    split = [f"{each.kind}: version {each.version} in {each.file}, {versions[each.kind]} elsewhere"
             for each in found if each.version != versions[each.kind]]  # fmt: skip
    unkept = [f"{kind}: name its golden file, or say why it has none" for kind, each in told.items()
              if bool(each.golden) == bool(each.no_golden)]  # fmt: skip
    return [*new, *gone, *split, *unkept]


HEAD = """# Files and their versions

Every file that the tool writes and reads again has a `kind` and a `version`. The first table below is generated by
`python -m benchmarks.pages.formats_page` from the source and `benchmarks/pages/formats.toml`; a test fails if a kind
or a version is missing.

## The rule

* A record's version is **a whole number of its own**, independent of the package's version and of other records'.
* It **rises only when an older reader would misread** the file: an entry removed, renamed, or given another meaning
  or unit. Adding an optional entry doesn't raise it; readers ignore unknown entries, except where the table says
  *closed*, so there any new entry raises the version.
* **Kind and version are checked before anything else** in a file. Another kind is refused, and so is a version that
  is not a valid number.
* **A file has one version**: any other is refused with exit code 2, before anything is written, with the command that
  writes it again: `bench.json: bench record of version 2, written by a newer corp-deploy; this tool reads version 1:
  install that one, or make the record again with ...`. No file is converted, and nothing is guessed about one.
* Files that the tool keeps only for itself (**state** in the table) are treated as missing if they have another
  version and can be recreated automatically. If they contain hours of work, they are refused, and the message says
  which file to remove.

`tests/golden/files` has a file of each kind, which is tested to read as it did when it was written, so that no format
changes without its version. [Compatibility](compatibility.md) says what holds for commands, options, exit codes and
Python.
"""


def page(found: Sequence[Found], told: Mapping[str, Format], others: Sequence[Mapping[str, str]]) -> str:
    """docs/reference/files.md."""
    versions = {each.kind: each.version for each in found}
    rows = [
        (
            f"`{kind}`, version {versions[kind]}",
            f"{each.file}: {each.about}",
            f"written by {each.written}; read by {each.read}",
            each.other,
        )
        for kind, each in told.items()
    ]
    columns = ("kind and version", "file", "commands", "another version")
    plain = [(each["file"], each["form"], each["about"]) for each in others]
    return "\n".join([
        HEAD, "## Files of a kind and version", "", table(columns, rows), "",
        "## Files of other forms", "", table(("file", "form", "what it is, and how it stays readable"), plain), "",
    ])  # fmt: skip


@click.command()
@click.option("--check", is_flag=True, help="Fail when the page is not what the source and formats.toml say.")
def main(check: bool) -> None:
    """Write docs/reference/files.md."""
    found, (told, others) = formats(), words()
    if complaints := wrong(found, told):
        raise click.ClickException("\n".join(complaints))
    written = page(found, told, others)
    if check:
        if PAGE.read_text(encoding="utf-8") != written:
            raise click.ClickException(f"{PAGE.name} is out of date; run python -m benchmarks.pages.formats_page")
        return
    PAGE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
