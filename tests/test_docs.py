"""The page on typed graphs: every command parses as written, and gets as far as its model or its builder; the site."""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner

from benchmarks.engines_page import break_fusion
from corp_deploy.cli import main
from ground.errors import Missing
from perf.gate.rule import rule_from_text

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "how-to" / "typed-graphs.md"]
REACHED = "as far as the model"


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                assert line.startswith("$ corp-deploy "), line
                found.append((page.name, shlex.split(line.removeprefix("$ corp-deploy "))))
    return found


def test_there_are_commands() -> None:
    assert len(commands()) >= 15


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda each: " ".join(each)[:70] if each else "")
def test_a_command_parses(page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object, **__: object) -> NoReturn:
        raise Missing(REACHED)

    name, *rest = words
    main.commands[name].make_context(name, list(rest))  # raises what a wrong option or value is refused with
    for verb in ("corp_deploy.store.dense_model.load_dense", "export.engine.build.build_engine"):
        monkeypatch.setattr(verb, reached)
    monkeypatch.setattr("corp_deploy.proof.compatibility.build_engine", reached)
    monkeypatch.chdir(tmp_path)
    if name in ("export", "build"):
        result = CliRunner().invoke(main, words)
        assert REACHED in result.output, (page, result.output)
    if name == "gate":
        assert all(rule_from_text(rule) for rule in rest[2::2])


def test_options_that_the_page_names_are_options() -> None:
    text = PAGES[0].read_text()
    ours = {option for command in main.commands.values() for each in command.params for option in each.opts}
    right = re.findall(r"\|([^|\n]*)\|\n", text)
    named = {word for cell in right for word in re.findall(r"(?<![-\w])--[a-z][\w-]*", cell)}
    assert named
    assert named <= ours


def test_the_flags_that_are_said_to_be_gone_are_gone() -> None:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt-rtx, which has TensorRT 11's object model, is not installed")
    import tensorrt_rtx

    gone = {"FP16", "INT8", "BF16", "FP8", "OBEY_PRECISION_CONSTRAINTS", "PREFER_PRECISION_CONSTRAINTS"}
    assert gone.isdisjoint(tensorrt_rtx.BuilderFlag.__members__)
    assert {"VERSION_COMPATIBLE", "SPARSE_WEIGHTS"} <= set(tensorrt_rtx.BuilderFlag.__members__)


def test_the_record_of_fusion_breaks_shows_what_the_page_says() -> None:
    import json

    record = json.loads((ROOT / "benchmarks" / "results" / "break_fusion.json").read_text())
    rows = {(row["break"], row["target"]): row for row in record["rows"]}
    for target in ("86", "89"):
        whole, inside = rows["", target], rows["blocks.0.attn/Softmax", target]
        assert len(whole["fused_attention"]) == record["depth"]
        assert len(inside["fused_attention"]) == record["depth"] - 1
        assert whole["kernels"] < rows["blocks.0.attn", target]["kernels"] < inside["kernels"]
        assert (inside["outputs"], len(inside["fusion_breaks"])) == (["logits"], 1)
    assert "| `blocks.0.attn/Softmax` |" in break_fusion(record)
