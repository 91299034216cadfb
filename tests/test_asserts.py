"""Nothing that has to be done is done inside an assert: python -O leaves them all out."""

import ast
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from corp_deploy.cli import main
from tests import tiny
from tests.sources import ROOT, trees

PURE = {
    "all", "any", "bool", "callable", "covers", "get_args", "int", "is_dataclass", "isfinite", "isinstance", "keys",
    "len", "min",
}  # fmt: skip
PURE |= {"numel", "pairwise", "is_rotatable", "set", "sum", "type"}


def properties() -> set[str]:
    """Names that are computed when they are read, anywhere in the rooms."""
    functions = [n for tree in trees().values() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    return {n.name for n in functions if any(getattr(d, "id", None) == "property" for d in n.decorator_list)}


def work_in_asserts(tree: ast.Module, computed: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assert):
            continue
        bare = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
        if isinstance(bare, ast.Attribute) and bare.attr in computed:
            yield f"line {node.lineno}: {ast.unparse(node.test)}"
        for each in ast.walk(node.test):
            if isinstance(each, ast.NamedExpr | ast.Await | ast.Yield):
                yield f"line {node.lineno}: {ast.unparse(each)}"
            if isinstance(each, ast.Call):
                name = each.func.attr if isinstance(each.func, ast.Attribute) else getattr(each.func, "id", "")
                if name not in PURE:
                    yield f"line {node.lineno}: {ast.unparse(each)}"


@pytest.mark.slow("models")
def test_asserts_have_no_side_effects() -> None:
    computed = properties()
    found = {str(path): list(work_in_asserts(tree, computed)) for path, tree in trees().items()}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line", ["assert c.set_address(1)", "assert recipe.choices", "assert not recipe.choices", "assert (n := 3)"]
)
def test_side_effect_in_an_assert_is_found(line: str) -> None:
    assert list(work_in_asserts(ast.parse(line), {"choices"}))


PROGRAM = "import sys; from tests.test_asserts import carry_out; carry_out(sys.stdin.read())"
LINES = """
0 calibrate --model dense --images images.npy -o m.safetensors -q
0 reduce --model dense --moments m.safetensors --mlp 0.5 --attn 0.5 --align head=8,mlp=16 -o reduced -q
0 verify dense reduced --images images.npy --batch 1,3 --min-agreement 0 -o parity.json -q
1 gate parity.json --fail-if relative_error>=0 -q
2 reduce --model dense --moments m.safetensors --mlp nan -o other -q
2 release contradiction.toml -o release --dry-run -q
"""
RECIPE = """
[model]
model = "dense"
[calibration]
images = "images.npy"
[held_out]
images = "images.npy"
[reduce]
preset = "corp"
attn = 0.5
heads = "square"
"""


def carry_out(lines: str) -> None:
    """Each line is an exit code and the words of a command."""
    for line in lines.split("\n"):
        expected, *words = line.split()
        result = CliRunner().invoke(main, words)
        if result.exit_code != int(expected):
            raise RuntimeError(f"{line}: exit code {result.exit_code}: {result.output}")


def inputs_in(folder: Path) -> Path:
    folder.mkdir()
    tiny.written(folder, 12)
    (folder / "contradiction.toml").write_text(RECIPE)
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow("process")
def test_pipeline_is_byte_identical_under_optimised_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimised, plain = inputs_in(tmp_path / "optimised"), inputs_in(tmp_path / "plain")
    subprocess.run(
        [sys.executable, "-O", "-c", PROGRAM], input=LINES.strip(), cwd=optimised,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, check=True,
    )  # fmt: skip
    monkeypatch.chdir(plain)
    carry_out(LINES.strip())
    made = digests(optimised)
    assert made == digests(plain)
    assert {"m.safetensors", "reduced/model.safetensors", "parity.npz"} <= made.keys()
