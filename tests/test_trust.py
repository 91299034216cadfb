"""Places that start processes, run code or use a network stand on the page; no place unpickles or asks a shell."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.sources import ROOT, trees

PAGE = ROOT / "docs" / "security" / "trust.md"
# By a call's last name; with a dot, by its last two.
CALLS: Mapping[str, frozenset[str]] = {
    "Starts processes": frozenset({
        "DataLoader", "Popen", "Process", "ProcessPoolExecutor", "fork", "get_context", "os.system", "os.execv",
        "os.execve", "os.posix_spawn", "subprocess.call", "subprocess.check_call", "subprocess.check_output",
        "subprocess.run", "aoti_compile_and_package", "builder.create_model", "torch.compile",
    }),
    "Runs code": frozenset({
        "CDLL", "aoti_load_package", "deserialize_cuda_engine", "eval", "exec", "import_module",
        "register_custom_ops_library", "add_extension",
    }),
    "Uses a network": frozenset({
        "build_opener", "init_process_group", "urlopen", "socket.socket", "create_connection", "detect_credential",
        "use_sigstore_signer", "use_sigstore_verifier", "mlflow.start_run", "url_to_fs",
    }),
}  # fmt: skip
FORBIDDEN = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load", "yaml.load", "marshal.loads", "shelve.open",
    "extractall", "extract", "os.system", "os.popen", "torch.hub.load", "dill.load", "cloudpickle.loads",
}  # fmt: skip


def name_of(function: ast.expr) -> tuple[str, str]:
    """Return the last name of what is called, and the last two."""
    words = ast.unparse(function).split(".") if isinstance(function, ast.Name | ast.Attribute) else [""]
    return words[-1], ".".join(words[-2:])


def kinds_of(tree: ast.AST) -> set[str]:
    """Return the kinds of places in a source; a method called eval is a model's."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [name_of(each) for each in calls if ast.unparse(each).rpartition(".")[2] not in ("eval", "exec")
             or isinstance(each, ast.Name)]  # fmt: skip
    return {kind for kind, known in CALLS.items() for pair in names if known & set(pair)}


def test_trust_page_lists_exactly_every_place() -> None:
    _, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    told = {section.partition("\n")[0]: re.findall(r"^\| `([\w/.]+)`", section, re.MULTILINE) for section in sections}
    found = {path: kinds_of(tree) for path, tree in trees().items()}
    for kind in CALLS:
        assert told[kind] == sorted(str(path) for path, kinds in found.items() if kind in kinds), kind


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        *(("subprocess.run(x)", "Starts processes"), ("multiprocessing.Process(target=x)", "Starts processes")),
        *(("exec(x)", "Runs code"), ("runtime.deserialize_cuda_engine(x)", "Runs code")),
        ("urllib.request.urlopen(x)", "Uses a network"),
        *(("model.eval()", ""), ("re.compile('x')", ""), ("text.replace('a', 'b')", "")),
    ],
)
def test_new_place_is_found(line: str, kind: str) -> None:
    assert kinds_of(ast.parse(line)) == ({kind} if kind else set())


def wrong_in(call: ast.Call) -> list[str]:
    last, two = name_of(call.func)
    given = {each.arg: getattr(each.value, "value", None) for each in call.keywords}
    found = [two] if two in FORBIDDEN or last in FORBIDDEN else []
    found += ["torch.load"] if two == "torch.load" and given.get("weights_only") is not True else []
    found += ["np.load"] if two == "np.load" and given.get("allow_pickle") is not False else []
    found += ["allow_pickle"] if given.get("allow_pickle") is True else []
    return found + (["shell"] if given.get("shell") else [])


def test_no_code_unpickles_unpacks_or_uses_a_shell() -> None:
    """torch.load is told weights_only, numpy not to unpickle, processes get words and no shell."""
    calls = [(path, node) for path, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert [f"{path}:{call.lineno}: {what}" for path, call in calls for what in wrong_in(call)] == []
    imports = [
        (str(path), ast.unparse(node))
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and "pickle" in ast.unparse(node)
    ]
    assert imports == [("corp_deploy/store/weight_file.py", "from pickle import UnpicklingError")]


def test_policy_names_existing_files() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for name in {word for word in text.replace("`", " ").split() if word.startswith(("test_", "tests/test_"))}:
        assert (ROOT / "tests" / Path(name.rstrip(",.")).name).is_file(), name
    for option in ("--trust-code", "--trust-engine", "--trust-paths"):
        assert option in text
