"""Numbers as they may be written: one type for each quantity, in options, lists, rules and recipes alike."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from corp_deploy.cli import main
from corp_deploy.commands.options import Paths, Value
from corp_deploy.invocation.engine import PROFILE
from corp_deploy.invocation.method_choice import MULTIPLES
from corp_deploy.invocation.source import JSON, OUTPUT_NAMES
from corp_deploy.invocation.values import ListOf, Values
from corp_deploy.release.recipe import SECTIONS
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.recipe_keys import keys_of
from export.engine.options import LARGEST_BATCH
from export.graph.to_onnx import OPSETS
from ground import quantity as quantities
from ground.errors import BadInput
from ground.quantity import BATCH, Count, Real
from perf.gate.rule import rule_from_text
from tests.command import invoked, refuses
from tests.refusals import rejects

WORDED = (click.Path, click.Choice, click.types.BoolParamType, Paths)
# fmt: off
TEXTS = {
    "metric", "again", "break_fusion", "dense", "expect_name", "expect_version", "groups", "init_model", "issuer",
    "keep_fp32", "keep_rest", "merge_tokens", "model", "name", "names", "only", "sites", "reference", "repair", "rules",
    "select", "server", "sign", "sm", "sparse", "title", "verify", "within", "weights_key", "output_limit",
    "exclude_output", "shard",
}
# fmt: on
NO_NUMBERS = (
    *("1_0", "٣", "１", "nan", "inf", "-inf", "1e400", "-0", "+1", "-1e-3", "9" * 400, "9" * 5000),
    *("", " ", "0x10", "1 0", "1,,2", "1;2", "one", "1.2.3", "--1", "1e", "\x00"),
)


def form_of(values: Values) -> str | None:
    """How a number is written among these values; None where they are no numbers."""
    if isinstance(values, Count | Real):
        return "{}"
    if isinstance(values, ListOf):
        return "1,{}"
    return "mlp={}" if values is MULTIPLES else "1:{}:8" if values is PROFILE else None


def form(parameter: click.Parameter) -> str | None:
    return form_of(parameter.type.values) if isinstance(parameter.type, Value) else None


def parameters() -> Iterator[tuple[str, click.Parameter]]:
    for name, command in sorted(main.commands.items()):
        for parameter in command.params:
            yield name, parameter


NUMBERED = [(name, each) for name, each in parameters() if form(each)]


def test_every_numeric_parameter_has_a_quantity() -> None:
    others = [(name, each) for name, each in parameters() if not form(each) and not isinstance(each.type, WORDED)]
    others = [(name, each) for name, each in others if getattr(each.type, "values", None) not in (JSON, OUTPUT_NAMES)]
    free = [f"{name} {each.name}" for name, each in others if each.name not in TEXTS]
    assert not free, f"{free}: give numbers a quantity; words that are none go into TEXTS here"


OF_QUANTITIES = {repr(getattr(each.type, "values", None)): each for _, each in NUMBERED}  # one option of each


@pytest.mark.parametrize(("command", "option"), NUMBERED, ids=lambda each: getattr(each, "name", each))
def test_every_option_refuses_invalid_numbers(command: str, option: click.Parameter) -> None:
    """All of them by one option of each quantity, by the others one."""
    form_of_option = form(option)
    assert form_of_option
    signed = option.name in ("mean", "logit_threshold")
    for text in NO_NUMBERS if option in OF_QUANTITIES.values() else NO_NUMBERS[:1]:
        if signed and text in ("-0", "-1e-3"):
            continue
        result = invoked(*command.split(), f"{option.opts[0]}={form_of_option.format(text)}", code=2)
        assert option.opts[0] in result.stderr, (text, result.stderr)
        assert len(result.stderr) < 1000, "what was typed is not echoed whole"


@pytest.mark.parametrize("value", ["8,8", "1,8,8", "1,99999999999", "1," + "9" * 400, "65537", "0"])
def test_batch_lists_are_parsed(value: str) -> None:
    refuses("--batch", "bench", "--batch", value)


@pytest.mark.parametrize("value", ["mlp=8,mlp=16", "mlp", "=8", "mlp=8,", "width=8", "mlp==8", "head=0"])
def test_width_multiples_are_parsed(value: str) -> None:
    refuses("--align", "sweep", "--align", value)


def test_bounds_are_open_or_closed_as_declared() -> None:
    assert quantities.SHARE_REMOVED.from_text("0") == 0.0
    assert quantities.SHARE_KEPT.from_text("1.") == 1.0
    assert Real(low=-1.0, high=1.0).from_text("-.5e-1") == -0.05
    assert Count(low=0, high=7).from_text("007") == 7
    for quantity, text in ((quantities.SHARE_REMOVED, "1"), (quantities.SHARE_KEPT, "0"), (quantities.RIDGE, "1e-400")):
        rejects(r"expected a (share|number) in [(\[]0, ", quantity.from_text, text)
    assert not BATCH.holds(True)
    assert not quantities.SHARE.holds(float("nan"))
    assert not quantities.ERROR.holds(10**400)


def test_rooms_agree_on_the_largest_batch_and_opsets() -> None:
    assert BATCH.high == LARGEST_BATCH
    assert (quantities.OPSET.low, quantities.OPSET.high) == (OPSETS[0], OPSETS[-1])


@pytest.mark.parametrize(
    "rule",
    [
        *("p50@b1 > 1e999", "size_bytes > -1e400", "p50@b1 > ٣", "size_bytes > dense * 1e999", "p50@b1 > 1_0"),
        *("p50@b٣ > 1", "p50@b99999999999 > 1", f"p50@b1 > {'9' * 5000}", "p50@b1 > +1", "p50@b1 > baseline * nan"),
    ],
)
def test_gate_rules_accept_the_same_numbers(rule: str) -> None:
    with pytest.raises(BadInput, match="rule ") as caught:
        rule_from_text(rule)
    assert len(str(caught.value)) < 500


LEAST = '[model]\nmodel = "x"\n[calibration]\nimages = "a"\n[held_out]\nimages = "b"\n[reduce]\nmlp = 0.5\n'
KEYS = [(table, word, key) for table, keys in SECTIONS.items() for word, key in keys_of(keys).items()]
NUMERIC_KEYS = [
    (table, word)
    for table, word, key in KEYS
    if re.match(r"a (whole )?(number|share) (from|in) ", key.schema["description"])
]


def test_every_numeric_recipe_key_has_bounds() -> None:
    assert len(NUMERIC_KEYS) > 20
    for table, word, key in KEYS:
        for value in (math.nan, math.inf, 10**400, *(() if word == "logit_threshold" else (-1,))):
            rejects(rf"^{table}\.{word} is .*, expected ", key.decoded, table, value, Path())


@pytest.mark.parametrize("value", ["nan", "-1", "9" * 5000, "true", "'1'"])
def test_recipes_accept_the_same_numbers(tmp_path: Path, value: str) -> None:
    path = tmp_path / "r.toml"
    for table, word in NUMERIC_KEYS:
        if (word, value) == ("logit_threshold", "-1"):
            continue
        lines = LEAST.replace("mlp = 0.5\n", "") + ("" if f"[{table}]" in LEAST else f"[{table}]\n")
        path.write_text(lines.replace(f"[{table}]\n", f"[{table}]\n{word} = {value}\n"))
        rejects(rf"r\.toml: (not TOML|{table}\.{word} is )", load_recipe, path)


@pytest.mark.parametrize("value", ["[1, 99999999999]", "[0]", "[true]", "[1, 1]", "[1.0]"])
@pytest.mark.parametrize("table", ["parity", "bench"])
def test_recipe_with_impossible_batches_is_refused_on_reading(tmp_path: Path, table: str, value: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(f"{LEAST}[{table}]\nbatches = {value}\n")
    rejects(f"{table}.batches is ", load_recipe, path)
