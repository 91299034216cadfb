"""Commands name a missing option, and `bench` needs no file to write."""

from pathlib import Path

import click
import pytest

from corp_deploy.cli import main
from tests.command import run
from tests.export_served import write_onnx

REQUIRED = [
    (name, option)
    for name, command in main.commands.items()
    for option in command.params
    if isinstance(option, click.Option) and option.required
]


@pytest.mark.parametrize(
    "words",
    [
        ("calibrate", "--model", "m", "--images", "x"), ("reduce", "--model", "m", "--moments", "x"),
        ("export", "--model", "m"), ("build", "m.onnx"), ("latency-table", "--model", "m"), ("package", "x"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_output_option_is_required(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert "Missing option '--output' / '-o'." in done.output


def test_bench_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = write_onnx(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    few = ("--batch", 1, "--time-limit", 0.2, "--half-width", 0.9, "--min-rounds", 6, "--block-ms", 1)
    done = run("bench", graph, graph, "--names", "one,same", *few)
    assert done.exit_code == 0, done.output
    assert "speed-up" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(("name", "option"), REQUIRED, ids=lambda each: each if isinstance(each, str) else each.opts[0])
def test_missing_option_is_named(name: str, option: click.Option) -> None:
    context = click.Context(main.commands[name], info_name=name)
    with pytest.raises(click.MissingParameter) as error:
        option.handle_parse_result(context, {}, [])
    assert option.opts[0] in error.value.format_message()
