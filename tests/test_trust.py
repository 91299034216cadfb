"""Every place that opens, writes, starts, runs or asks is listed with what it trusts."""

import ast
from pathlib import Path

import pytest

from benchmarks.trust import trust_page
from benchmarks.trust.trust_page import KINDS, PAGE, ROOT, Place, Words, page, places, places_of, unlisted, words
from tests.sources import trees


@pytest.fixture(scope="module")
def found() -> list[Place]:
    return places()


def test_every_place_says_what_it_trusts(found: list[Place]) -> None:
    assert unlisted(found, words()) == []


def test_the_page_is_what_the_source_says(found: list[Place]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(found, words()), "run python -m benchmarks.trust.trust_page"
    assert {place.kind for place in found} == set(KINDS)


NEW = {
    "reads": ("open('x')", "path.open('rb')", "path.read_bytes()", "np.load('x')", "torch.load('x')", "Image.open(x)",
              "onnx.load(x)", "tarfile.open(x)", "zipfile.ZipFile(x)", "safe_open(x)", "record_from_file(x, y)"),
    "writes": ("open('x', mode='w')", "path.write_text('x')", "replacing(path)", "open('x', 'r+')"),
    "starts": ("subprocess.run(x)", "subprocess.Popen(x)", "multiprocessing.Process(target=x)", "os.execv(x, y)",
               "os.fork()"),
    "runs": ("exec(x)", "eval(x)", "ctypes.CDLL(x)", "runtime.deserialize_cuda_engine(x)"),
    "asks": ("socket.socket()", "urllib.request.urlopen(x)"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in NEW.items() for line in lines])
def test_a_new_place_is_found(kind: str, line: str) -> None:
    assert kind in {place.kind for place in places_of(f"def f():\n    return {line}\n", "new.py")}


@pytest.mark.parametrize("line", ["model.eval()", "subject.open()", "text.replace('a', 'b')", "re.compile('x')"])
def test_what_opens_nothing_is_none(line: str) -> None:
    assert places_of(line, "new.py") == []


def test_what_is_new_gone_or_vague_is_told(found: list[Place]) -> None:
    told = words()
    new = Place("calib/new.py", "reads", ("open",))
    assert set(unlisted([*found, new], told)) - set(unlisted(found, told)) == {
        "calib/new.py reads (open): say in trust.toml what it trusts"
    }
    assert any("it is no more" in each for each in unlisted(found[1:], told))
    vague = Words({}, {new.file: {"reads": ("hope", "")}})
    assert unlisted([new], vague) == ["calib/new.py reads: 'hope' is not explained"]


FORBIDDEN = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load", "yaml.load", "marshal.loads", "shelve.open",
    "extractall", "extract", "os.system", "os.popen", "torch.hub.load", "dill.load", "cloudpickle.loads",
}  # fmt: skip


def test_no_place_unpickles_unpacks_or_asks_a_shell() -> None:
    """torch.load is told weights_only, numpy not to unpickle, processes get words and no shell."""
    wrong = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                wrong += [f"{path}:{node.lineno}: {what}" for what in _wrong(node)]
    assert wrong == []


def _wrong(call: ast.Call) -> list[str]:
    last, two = trust_page._name(call.func)
    given = {each.arg: getattr(each.value, "value", None) for each in call.keywords}
    found = [two] if two in FORBIDDEN or last in FORBIDDEN else []
    found += ["torch.load"] if two == "torch.load" and given.get("weights_only") is not True else []
    found += ["np.load"] if two == "np.load" and given.get("allow_pickle") is not False else []
    found += ["allow_pickle"] if given.get("allow_pickle") is True else []
    return found + (["shell"] if given.get("shell") else [])


def test_the_pickle_module_is_asked_for_its_errors_alone() -> None:
    imports = [
        (str(path), ast.unparse(node))
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and "pickle" in ast.unparse(node)
    ]
    assert imports == [("corp_deploy/store/weight_file.py", "from pickle import UnpicklingError")]


def test_the_policy_names_what_there_is() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for name in {word for word in text.replace("`", " ").split() if word.startswith(("test_", "tests/test_"))}:
        assert (ROOT / "tests" / Path(name.rstrip(",.")).name).is_file(), name
    for option in ("--trust-code", "--trust-engine", "--trust-paths"):
        assert option in text
