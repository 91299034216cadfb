"""Build scripts with hostile words parse as shell and pass every word to their programs unchanged."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from export.engine.options import BatchProfile
from export.graph.ports import GraphPort
from export.triton.server_releases import PENDING_NAME, SCRIPT_NAME, _environment, build_script
from tests.doubles import some
from tests.export_served import run_script

HOSTILE = (
    "plain",
    "it's",
    'a "b" c',
    "; touch stolen;",
    "$(touch stolen)",
    "`touch stolen`",
    "${HOME}",
    "a\ntouch stolen\n#",
    "a\r\x1b[31m",
    "* ? [a] ~ & | > stolen <",
    ") touch stolen ;;",
    "\\",
    "--option",
    "名前",
    "{{ name }} {% raw %}",
)
GRAPH = b"a graph"


def script_of(word: str, **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "name": f"m{word}",
        "version": 3,
        "inputs": (
            GraphPort(name=f"i{word}", dtype="float32", shape=("batch", 3, 4, 4)),
            GraphPort(name="attention_mask", dtype="int64", shape=("batch", 7)),
        ),
        "profiles": (BatchProfile(smallest=1, tuned=4, largest=8), BatchProfile(smallest=8, tuned=16, largest=32)),
        "onnx_sha256": hashlib.sha256(GRAPH).hexdigest(),
        "cc_filenames": {f"8.6{word}": "other.plan", "12.0": f"p{word}.plan"},
        "image_tag": f"26.07{word}",
        "pending": True,
    }
    return build_script(**arguments | changes)


def test_shell_parses_the_build_script(tmp_path: Path) -> None:
    for word in HOSTILE:
        for changes in ({"cc_filenames": {}, "pending": False}, {"profiles": ()}):
            (tmp_path / "script").write_text(script_of(word, **changes), encoding="utf-8")
            done = subprocess.run(["bash", "-n", tmp_path / "script"], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), word


@pytest.mark.parametrize("word", HOSTILE)
def test_every_argument_arrives_unchanged(word: str, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "graph" / "3"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(GRAPH)
    (folder / PENDING_NAME).write_text("a config\n")
    (folder / SCRIPT_NAME).write_text(script_of(word), encoding="utf-8")
    target = tmp_path / "models" / f"m{word}" / "3"
    assert run_script(folder / SCRIPT_NAME, tmp_path, "inside") == [
        f"--onnx={folder}/model.onnx", f"--saveEngine={target}/p{word}.plan.part", "--stronglyTyped",
        "--skipInference", "--profile=0", f"--minShapes=i{word}:1x3x4x4,attention_mask:1x7",
        f"--optShapes=i{word}:4x3x4x4,attention_mask:4x7", f"--maxShapes=i{word}:8x3x4x4,attention_mask:8x7",
        "--profile=1", f"--minShapes=i{word}:8x3x4x4,attention_mask:8x7",
        f"--optShapes=i{word}:16x3x4x4,attention_mask:16x7", f"--maxShapes=i{word}:32x3x4x4,attention_mask:32x7",
    ]  # fmt: skip
    assert (target / f"p{word}.plan").read_text() == "built\n"
    assert (target.parent / "config.pbtxt").read_text() == "a config\n"
    image, *inside = some(run_script(folder / SCRIPT_NAME, tmp_path))[-4:]
    assert image == f"nvcr.io/nvidia/tritonserver:26.07{word}"
    assert inside == ["sh", f"/models/m{word}_onnx/3/{SCRIPT_NAME}", "inside"]
    assert not list(tmp_path.rglob("stolen"))


def test_plain_names_are_not_quoted() -> None:
    """The commands read as somebody would write them by hand."""
    text = script_of("", profiles=(BatchProfile(smallest=1, tuned=4, largest=8),))
    assert "'" not in text.replace("server's", "").replace("'%s  %s\\n'", "")
    assert "# Inside the server's container: sh m_onnx/3/build_plan.sh inside\n" in text
    assert "\n    --profile=0 --minShapes=i:1x3x4x4,attention_mask:1x7 " in text
    assert "\n    12.0) plan=p.plan ;;\n" in text


def test_missing_template_variable_is_an_error() -> None:
    template = _environment().from_string("{{ absent | sh }}")
    with pytest.raises(UndefinedError, match="absent"):
        template.render()
