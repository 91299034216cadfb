"""What is declared once: each option of a record is one of its command, of Python and of recipes, and refuses alike."""

import inspect
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import corp_deploy
from corp_deploy.cli import main
from corp_deploy.invocation.calibration import CalibrateFiles, CalibrateOptions
from corp_deploy.invocation.export_choice import ExportOptions
from corp_deploy.invocation.option import Option, Record, options_of
from corp_deploy.invocation.option_support import spelled
from corp_deploy.invocation.proof import LimitOptions
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.invocation.running import BenchOptions
from corp_deploy.release.recipe_tables import ReduceTable
from ground.errors import BadInput
from ground.quantity import Count, Real

RECORDS: dict[str, type[Record]] = {
    "calibrate": CalibrateOptions,
    "reduce": ReduceOptions,
    "export": ExportOptions,
    "verify": LimitOptions,
    "bench": BenchOptions,
}
EVERY = [(name, each) for name, record in RECORDS.items() for each in options_of(record).values()]


@pytest.mark.parametrize(("name", "option"), EVERY, ids=lambda each: getattr(each, "name", each))
def test_an_option_is_one_of_the_command_and_of_python(name: str, option: Option) -> None:
    (typed,) = [each for each in main.commands[name].params if each.name == option.name]
    assert isinstance(typed, click.Option)
    assert (spelled(option.typed) in typed.opts, typed.help) == (True, option.help)
    parameter = inspect.signature(getattr(corp_deploy, name)).parameters[option.name]
    assert parameter.default == option.default
    assert f"`{option.name}`: " in (getattr(corp_deploy, name).__doc__ or "")
    kept = option.converted(None)
    assert kept is None or option.of.holds(kept)


NUMBERS = [(name, each) for name, each in EVERY if isinstance(each.of, Count | Real)]


@pytest.mark.parametrize(("name", "option"), NUMBERS, ids=lambda each: getattr(each, "name", each))
def test_a_number_out_of_its_bounds_is_refused_alike(name: str, option: Option) -> None:
    """In Python, where a value counts, as on the command line, where a text does."""
    assert isinstance(option.of, Count | Real)
    beyond = option.of.high * 2
    given: dict[str, Any] = {option.name: beyond}
    with pytest.raises(BadInput) as refused:
        RECORDS[name](**given)
    typed = CliRunner().invoke(main, [name, spelled(option.typed), str(beyond)])
    words = " ".join(typed.stderr.split())
    assert (typed.exit_code, f"expected {option.of}" in words) == (2, True)
    assert str(refused.value) == f"{spelled(option.typed)}: '{beyond}': expected {option.of}"


def test_what_has_to_be_given_has_no_default_and_is_asked_for_by_name() -> None:
    assert CalibrateFiles("moments.safetensors").values == {"output": Path("moments.safetensors")}
    assert CalibrateFiles("moments.safetensors").non_default == {}
    with pytest.raises(BadInput, match=r"^--output: nothing is given, expected a text that is not empty$"):
        CalibrateFiles(None)  # type: ignore[arg-type]


def test_a_recipe_has_every_key_and_makes_the_same() -> None:
    kinds = {"select": ("", "_mlp", "_head", "_conv", "_heads"), "repair": ("", "_mlp", "_conv", "_heads")}
    kinds |= {"align": ("_mlp", "_head", "_conv")}
    known = [each for each in options_of(ReduceOptions).values() if each.in_recipe]
    keys = [f"{each.name}{kind}" for each in known for kind in kinds.get(each.name, ("",))]
    assert list(ReduceTable.__struct_fields__) == keys
    table = ReduceTable(mlp=0.5, select_mlp="wanda", align_head=8, closed_loop=True, sparse="mlp=2:4")
    assert table.choice == ReduceOptions(
        mlp=0.5, select="mlp=wanda", align={"mlp": 64, "head": 8, "conv": 32}, closed_loop="asymmetric",
        sparse="mlp=2:4",
    )  # fmt: skip
