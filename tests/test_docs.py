"""Commands of pages that nothing here can run parse as written; what the page on typed graphs says of builders."""

import importlib.util
import re
import shlex
from itertools import pairwise
from pathlib import Path

import click
import pytest

from benchmarks.pages.engines_page import break_fusion
from corp_deploy.cli import main
from perf.gate.rule import rule_from_text
from tests.doubles import some
from tests.pages import blocks, pages

ROOT = Path(__file__).parents[1]
TYPED_GRAPHS = ROOT / "docs" / "how-to" / "typed-graphs.md"


def unrun() -> list[tuple[str, list[str]]]:
    """Our commands in blocks that are no console: they want a GPU, a server, or files of the reader's own."""
    found = []
    for page in pages():
        for block in blocks(page):
            if block.kind in ("sh", "text", "yaml"):
                lines = re.sub(r"\\\n *", "", block.text).splitlines()
                ours = (line.strip().removeprefix("- ") for line in lines)
                found += [(page.name, shlex.split(line)[1:]) for line in ours if line.startswith("corp-deploy ")]
    return found


def test_documented_commands_exist() -> None:
    assert {"bench", "export", "gate", "verify"} <= {words[0] for page, words in unrun() if page == TYPED_GRAPHS.name}


@pytest.mark.parametrize(("page", "words"), unrun(), ids=lambda each: " ".join(each)[:70] if each else "")
def test_documented_commands_parse(page: str, words: list[str]) -> None:
    name, command, rest = main.resolve_command(click.Context(main), words)
    some(command).make_context(name, rest)  # raises what a wrong option or value is refused with
    if name == "gate":
        assert all(rule_from_text(rule) for option, rule in pairwise(words) if option == "--fail-if")


def test_every_option_appears_on_a_written_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    without = [
        f"{name} {option.opts[0]}"
        for name, command in main.commands.items()
        for option in command.params
        if isinstance(option, click.Option)
        and not any(re.search(rf"{each}(?![\w-])", text) for each in (*option.opts, *option.secondary_opts))
    ]
    assert not without, without


def test_options_named_on_a_page_exist() -> None:
    text = TYPED_GRAPHS.read_text()
    ours = {option for command in main.commands.values() for each in command.params for option in each.opts}
    right = re.findall(r"\|([^|\n]*)\|\n", text)
    named = {word for cell in right for word in re.findall(r"(?<![-\w])--[a-z][\w-]*", cell)}
    assert named
    assert named <= ours


def test_removed_flags_are_absent() -> None:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt-rtx, which has TensorRT 11's object model, is not installed")
    import tensorrt_rtx

    gone = {"FP16", "INT8", "BF16", "FP8", "OBEY_PRECISION_CONSTRAINTS", "PREFER_PRECISION_CONSTRAINTS"}
    assert gone.isdisjoint(tensorrt_rtx.BuilderFlag.__members__)
    assert {"VERSION_COMPATIBLE", "SPARSE_WEIGHTS"} <= set(tensorrt_rtx.BuilderFlag.__members__)


def test_page_quotes_the_record_of_fusion_breaks() -> None:
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
