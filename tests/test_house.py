"""The house: its rooms, and what may stand in which."""

import ast
import graphlib

import grimp
import pytest

from tests.sources import ROOMS, ROOT, trees

# Modules of timm's and of this project's own families; what a site is made of goes by other names outside of families.
OF_FAMILIES = {"fc1", "fc2", "qkv", "proj", "patch_embed", "pos_embed", "cls_token", "ls1", "ls2", "norm1", "norm2"}
KINDS = {"ChannelSite", "HeadSite", "ChannelKind", "HeadKind", "ChannelTaps", "HeadTaps", "PatchTaps"}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*ROOMS, cache_dir=None)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_have_no_cycles(graph: grimp.ImportGraph, room: str) -> None:
    inside = {module for module in graph.modules if module.split(".")[0] == room}
    imports = {module: graph.find_modules_directly_imported_by(module) & inside for module in inside}
    if room == "corp_deploy":
        imports["corp_deploy"] = set()  # its public face reaches up to a model's directory, and only it does
    graphlib.TopologicalSorter(imports).prepare()


def test_corp_deploy_has_few_entries() -> None:
    aside = {"__pycache__", "py.typed"}
    entries = [path.name for path in (ROOT / "corp_deploy").iterdir() if path.name not in aside]
    assert len(entries) <= 20, sorted(entries)


def test_package_initialisers_are_empty() -> None:
    """An empty __init__ keeps `--help` light."""
    for room in ("corp_deploy", "export", "perf"):
        for initial in (ROOT / room).glob("*/__init__.py"):
            assert not [node for node in ast.parse(initial.read_text()).body if not isinstance(node, ast.Expr)], initial


def test_only_families_name_modules_of_models() -> None:
    spelled = [
        f"{path}:{node.lineno} .{node.attr}"
        for path, tree in trees().items()
        if path.parts[:2] != ("corp_deploy", "families")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in OF_FAMILIES
    ]
    assert not spelled


def test_no_if_chains_over_kinds_of_site() -> None:
    """What differs by kind is asked of the kind; the lists of Sites are the one place that sorts."""
    ladders = [
        f"{path}:{node.lineno}"
        for path, tree in trees("calib", "corp_deploy").items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "type")
        for kind in ast.walk(node)
        if isinstance(kind, ast.Name) and kind.id in KINDS
    ]
    assert {place.partition(":")[0] for place in ladders} <= {"corp_deploy/traced/models/sites.py"}, ladders


def test_no_docstring_begins_with_a_riddle() -> None:
    """Ruff's D rules check functions alone; these words begin neither a noun phrase nor an imperative."""
    riddles = {"What", "Of", "Whether", "How", "Which"}
    found = [
        f"{path}:{text.lineno}: {text.value.value}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for text in node.body
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        if text.value.value.split(maxsplit=1)[0] in riddles
    ]
    assert not found, "\n".join(found)
