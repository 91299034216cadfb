"""Option records: their rules, and their agreement with the command line, Python and recipes."""

import inspect
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
from click.testing import CliRunner

import corp_deploy
from corp_deploy.cli import main
from corp_deploy.commands.command import command, some
from corp_deploy.invocation.calibration import CalibrateFiles, CalibrateOptions
from corp_deploy.invocation.export_choice import ExportOptions
from corp_deploy.invocation.input_choice import InputOptions
from corp_deploy.invocation.option import Option, Record, options_of
from corp_deploy.invocation.option_support import spelled
from corp_deploy.invocation.proof import LimitOptions
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.invocation.running import BenchOptions
from corp_deploy.planning.request import build_request
from corp_deploy.release.recipe_keys import keys_of, record_of
from ground.errors import BadInput
from ground.quantity import Count, Real
from tests.refusals import rejects

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"macs": 0.5, "params": 0.5, "latency": 0.5}, "--macs and --params and --latency are several budgets"),
        ({"macs": 0.5, "mlp": 0.5}, "--macs chooses the widths itself; give it without --mlp, --attn and --conv"),
        ({"params": 0.5, "attn": 0.1}, "--params chooses the widths itself"),
        ({"latency": 0.5}, "--latency needs --latency-tables DIR"),
        ({"mlp": 0.5, "closed_loop": "symmetric", "held_out": Path("h")}, "--closed-loop: its sites meet"),
        ({"mlp": 0.5, "closed_loop": True, "held_out": Path("h")}, "--closed-loop: the closed loop holds out"),
        ({"mlp": 0.5, "align": {"mlp": 0}}, "expected, each at most once, mlp= a whole number from 1"),
    ],
)
def test_contradictory_reduction_options_are_refused(options: dict[str, Any], message: str) -> None:
    rejects(re.escape(message), ReduceOptions.from_options, options)


@pytest.mark.parametrize(
    ("options", "images", "attention"),
    [
        ({"mlp": 0.5}, False, False),
        ({"attn": 0.0}, False, True),
        ({"mlp": 0.5, "heads": "auto"}, True, True),
        ({"macs": 0.5}, True, True),
        ({"mlp": 0.5, "closed_loop": True}, True, False),
        ({"mlp": 0.5, "closed_loop": False}, False, False),
        ({"mlp": 0.5, "preset": "fold"}, True, False),
    ],
)
def test_reduction_options_name_their_inputs_and_sites(options: dict[str, Any], images: bool, attention: bool) -> None:
    choice = ReduceOptions.from_options(options)
    assert (choice.needs_images, choice.touches_attention) == (images, attention)


def test_planning_receives_the_requested_options() -> None:
    request = build_request(
        ReduceOptions(
            heads="auto", align={"mlp": 8, "head": 4}, ridge=1e-3, latency=0.7, latency_tables="tables", batch=8,
            closed_loop="asymmetric", reads="pooled", allow_partial=True,
        )
    )  # fmt: skip
    assert (request.options.auto_heads, request.method.geometry) == (True, "padded")
    assert (request.method.align_hidden, request.method.align_head, request.method.ridge_rel) == (8, 4, 1e-3)
    assert (request.priced_in, request.options.share) == ("latency", 0.7)
    assert request.where is not None
    assert (request.where.batches, request.where.cache) == ((8,), Path("tables"))
    plain = build_request(ReduceOptions.from_options({"mlp": 0.5, "select": {"mlp": "wanda"}, "preset": "corp"}))
    assert plain.where is None
    assert (plain.method.mlp_selection, plain.method.mlp_sparsity) == ("wanda", 0.5)


def test_option_rules_import_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import corp_deploy.invocation.reduction, corp_deploy.invocation.running"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_options_are_decoded_to_values() -> None:
    """Options stand in the order of the parameters, a command's own among them, and the exit code is returned."""

    @command()
    @click.option("--size", type=int)
    @click.option("--loud", is_flag=True, expose_value=False)
    @click.option("--other", default="o")
    def shown(size: int, inputs: Annotated[InputOptions, some("images", "samples", seed="N.")], other: str) -> int:
        """Help of its own."""
        click.echo(f"{size} {asdict(inputs)} {other}")
        return 3

    done = CliRunner().invoke(shown, ["--size", "3", "--images", "."])
    assert (done.exit_code, done.stdout) == (3, f"3 {asdict(InputOptions(images=Path('.')))} o\n")
    help_text = CliRunner().invoke(shown, ["--help"]).stdout
    assert "Help of its own." in help_text
    places = [help_text.index(each) for each in ("--size", "--images", "--samples", "--loud", "--other")]
    assert places == sorted(places)


# An option is declared once, in its record; the command, the Python function and recipes all have it.

RECORDS: dict[str, type[Record]] = {
    "calibrate": CalibrateOptions,
    "reduce": ReduceOptions,
    "export": ExportOptions,
    "verify": LimitOptions,
    "bench": BenchOptions,
}
EVERY = [(name, each) for name, record in RECORDS.items() for each in options_of(record).values()]


@pytest.mark.parametrize(("name", "option"), EVERY, ids=lambda each: getattr(each, "name", each))
def test_command_and_python_share_every_option(name: str, option: Option) -> None:
    (typed,) = [each for each in main.commands[name].params if each.name == option.name]
    assert isinstance(typed, click.Option)
    assert (spelled(option.typed) in typed.opts, typed.help) == (True, option.help)
    parameter = inspect.signature(getattr(corp_deploy, name)).parameters[option.name]
    assert parameter.default == option.default
    assert f"`{option.name}`: " in (getattr(corp_deploy, name).__doc__ or "")
    default = option.converted(None)
    assert default is None or option.of.holds(default)


NUMBERS = [(name, each) for name, each in EVERY if isinstance(each.of, Count | Real)]


@pytest.mark.parametrize(("name", "option"), NUMBERS, ids=lambda each: getattr(each, "name", each))
def test_out_of_range_number_is_refused_alike(name: str, option: Option) -> None:
    """Python and the command line refuse the number in the same words."""
    assert isinstance(option.of, Count | Real)
    beyond = option.of.high * 2
    values: dict[str, Any] = {option.name: beyond}
    with pytest.raises(BadInput) as refused:
        RECORDS[name](**values)
    typed = CliRunner().invoke(main, [name, spelled(option.typed), str(beyond)])
    assert (typed.exit_code, f"expected {option.of}" in " ".join(typed.stderr.split())) == (2, True)
    assert str(refused.value) == f"{spelled(option.typed)}: '{beyond}': expected {option.of}"


def test_required_option_has_no_default_and_is_named_if_missing() -> None:
    assert CalibrateFiles("moments.safetensors").values == {"output": Path("moments.safetensors")}
    assert CalibrateFiles("moments.safetensors").non_default == {}
    with pytest.raises(BadInput, match=r"^--output: nothing is given, expected a text that is not empty$"):
        CalibrateFiles(None)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"^--output: got CalibrateFiles, expected a path, or what a function returned"):
        CalibrateFiles(CalibrateFiles("moments.safetensors"))  # type: ignore[arg-type]


def test_recipe_has_a_key_for_every_option_and_kind() -> None:
    kinds = {"select": ("", "_mlp", "_head", "_conv", "_heads"), "repair": ("", "_mlp", "_conv", "_heads")}
    kinds |= {"align": ("_mlp", "_head", "_conv")}
    known = [each for each in options_of(ReduceOptions).values() if each.in_recipe]
    assert [*keys_of(ReduceOptions)] == [f"{each.name}{kind}" for each in known for kind in kinds.get(each.name, ("",))]
    keys = {"mlp": 0.5, "select_mlp": "wanda", "align_head": 8, "closed_loop": True, "sparse": "mlp=2:4"}
    align = {"mlp": 64, "head": 8, "conv": 32}
    options = {"mlp": 0.5, "select": "mlp=wanda", "align": align, "closed_loop": "asymmetric", "sparse": "mlp=2:4"}
    assert record_of(ReduceOptions, "reduce", keys) == ReduceOptions.from_options(options)
