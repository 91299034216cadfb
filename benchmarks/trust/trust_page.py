"""Every place of this tool that opens a file, starts a process, runs code or asks a network, found in its source; with
what each trusts, which trust.toml says by hand.

python -m benchmarks.trust.trust_page          writes docs/security/trust.md
python -m benchmarks.trust.trust_page --check    fails when a place is not in trust.toml, or the page not what they say
"""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import click

from benchmarks.pages.markdown import table

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("calib", "corp_deploy", "export", "ground", "perf")
WORDS, PAGE = Path(__file__).with_name("trust.toml"), ROOT / "docs" / "security" / "trust.md"
Kind = Literal["reads", "writes", "starts", "runs", "asks"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_MODE = re.compile(r"[rwaxbt+]{1,3}")
# By a call's last name; with a dot, by its last two.
CALLS: Mapping[Kind, frozenset[str]] = {
    "reads": frozenset({
        "Image.open", "InferenceSession", "ZipFile", "array_from_file", "array_from_npy", "array_from_npz",
        "arrays_from_npz", "compile_model", "copyfile", "copytree", "core.read_model", "fromfile",
        "get_unsafe_globals_in_checkpoint", "is_zipfile", "load_external_data_for_model", "load_file",
        "load_model_from_string", "load_onnx", "members_of_tar", "memmap", "np.load", "npy.read_array", "onnx.load",
        "os.open", "pread", "parse_from_file", "read_bytes", "read_onnx", "read_text", "record_from_file", "safe_open",
        "PackageLoader", "sha256_of_file", "tarfile.open", "text_from_file", "torch.load", "getxattr",
        "builder.create_model", "from_pretrained",
    }),
    "writes": frozenset({
        "TemporaryDirectory", "aoti_compile_and_package", "copyfile", "copytree", "mkdtemp", "mkstemp", "onnx.save",
        "os.write", "replacing", "save_file", "np.save", "savez", "savez_compressed", "symlink_to", "hardlink_to",
        "write_bytes", "write_json", "write_text", "NamedTemporaryFile", "builder.create_model", "mkfifo",
    }),
    "starts": frozenset({
        "DataLoader", "Popen", "Process", "ProcessPoolExecutor", "fork", "get_context", "os.system", "os.execv",
        "os.execve", "os.posix_spawn", "subprocess.call", "subprocess.check_call", "subprocess.check_output",
        "subprocess.run", "aoti_compile_and_package", "builder.create_model", "torch.compile",
    }),
    "runs": frozenset({
        "CDLL", "aoti_load_package", "deserialize_cuda_engine", "eval", "exec", "import_module",
        "register_custom_ops_library", "add_extension",
    }),
    "asks": frozenset({
        "build_opener", "init_process_group", "urlopen", "socket.socket", "create_connection", "detect_credential",
        "use_sigstore_signer", "use_sigstore_verifier",
    }),
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """What one file does of one kind, by which calls."""

    file: str
    kind: Kind
    calls: tuple[str, ...] = ()


def _name(function: ast.expr) -> tuple[str, str]:
    """The last name of what is called, and the last two."""
    if isinstance(function, ast.Name):
        return function.id, function.id
    if not isinstance(function, ast.Attribute):
        return "", ""
    owner = function.value
    before = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return function.attr, f"{before}.{function.attr}"


def _opened(call: ast.Call) -> Iterator[Kind]:
    """The kinds of an open() or a Path's own, by the mode that is given to it."""
    last, _ = _name(call.func)
    given = call.args[1:] if isinstance(call.func, ast.Name) else call.args
    words = [*given, *(each.value for each in call.keywords if each.arg == "mode")]
    texts = [each.value for each in words if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    modes = [text for text in texts if _MODE.fullmatch(text)]
    if last != "open" or not (modes or isinstance(call.func, ast.Name)):
        return
    mode = modes[0] if modes else "r"
    if "r" in mode or "+" in mode:
        yield "reads"
    if set(mode) & set("wax+"):
        yield "writes"


def _is_of_text(call: ast.Call) -> bool:
    """Whether a method called eval is a model's: the builtin is a bare name."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("eval", "exec")


def _kinds(call: ast.Call) -> Iterator[tuple[Kind, str]]:
    last, two = _name(call.func)
    for kind in _opened(call):
        yield kind, "open"
    if _is_of_text(call):
        return
    for kind, names in CALLS.items():
        if last in names or two in names:
            yield kind, two if two in names else last


def places_of(source: str, file: str) -> list[Place]:
    """Every place of one file's source."""
    found: defaultdict[Kind, set[str]] = defaultdict(set)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            for kind, name in _kinds(node):
                found[kind].add(name)
    return [Place(file, kind, tuple(sorted(names))) for kind, names in found.items()]


def places() -> list[Place]:
    """Every place of the tool, file by file."""
    files = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return sorted(each for path in files for each in places_of(path.read_text(), str(path.relative_to(ROOT))))


@dataclass(frozen=True, slots=True)
class Words:
    """trust.toml: what whom is trusted for by short words, and for each file and kind one of those and a remark."""

    trusts: Mapping[str, str]
    places: Mapping[str, Mapping[str, Sequence[str]]]

    def of(self, place: Place) -> tuple[str, str]:
        short, remark = self.places[place.file][place.kind]
        return short, remark


def words() -> Words:
    content = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    return Words(content["trusts"], content["places"])


def unlisted(found: Sequence[Place], told: Words) -> list[str]:
    """Places that trust.toml lacks, that are no more, or whose short word it does not explain."""
    listed = {(file, kind): of_kind[0] for file, kinds in told.places.items() for kind, of_kind in kinds.items()}
    known = {(place.file, place.kind): place for place in found}
    new = [
        f"{file} {kind} ({', '.join(known[file, kind].calls)}): say in {WORDS.name} what it trusts"
        for file, kind in sorted(known.keys() - listed.keys())
    ]
    gone = [f"{file} {kind}: it is no more; take it out" for file, kind in sorted(listed.keys() - known.keys())]
    vague = [f"{file} {kind}: {word!r} is not explained" for (file, kind), word in listed.items()
             if word not in told.trusts]  # fmt: skip
    return [*new, *gone, *vague]


HEAD = """# Files, processes, code and networks, and what each use trusts

`python -m benchmarks.trust.trust_page` finds every place in the source that opens or writes a file, starts a process,
runs code or uses a network, and writes this page. What each place trusts is written by hand in
`benchmarks/trust/trust.toml`; a test fails if a place is missing there. [SECURITY.md](../../SECURITY.md) explains the
consequences.
"""
TITLES: Mapping[Kind, str] = {
    "reads": "Reads files",
    "writes": "Writes files",
    "starts": "Starts processes",
    "runs": "Runs code",
    "asks": "Uses a network",
}


def page(found: Sequence[Place], told: Words) -> str:
    """docs/security/trust.md."""
    explained = table(("word", "what is trusted"), [(f"**{word}**", text) for word, text in told.trusts.items()])
    parts = [HEAD, explained, ""]
    for kind in KINDS:
        rows = []
        for place in found:
            if place.kind == kind:
                short, remark = told.of(place)
                rows.append((f"`{place.file}`", ", ".join(f"`{call}`" for call in place.calls), short, remark))
        parts += [f"## {TITLES[kind]}", "", table(("file", "calls", "trusts", "what it is"), rows), ""]
    return "\n".join(parts)


@click.command()
@click.option("--check", is_flag=True, help="Fail when the page is not what the source and trust.toml say.")
def main(check: bool) -> None:
    """Write docs/security/trust.md."""
    found, told = places(), words()
    if wrong := unlisted(found, told):
        raise click.ClickException("\n".join(wrong))
    written = page(found, told)
    if check:
        if PAGE.read_text(encoding="utf-8") != written:
            raise click.ClickException(f"{PAGE.name} is out of date; run python -m benchmarks.trust.trust_page")
        return
    PAGE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
