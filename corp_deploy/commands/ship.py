"""corp-deploy ship."""

from pathlib import Path

import click

from corp_deploy.invocation.budget_choice import BudgetChoice
from corp_deploy.invocation.calibration import PassOptions
from corp_deploy.invocation.inputs import Drawn
from corp_deploy.invocation.running import BenchOptions
from corp_deploy.invocation.ship import ShipOptions
from corp_deploy.release.baseline import Baseline
from corp_deploy.views.console import Output
from ground.errors import BadInput

from .declared import record_options
from .help import Command
from .model_choice import ModelChoice, dense_options
from .options import DIRECTORY, output_options, trust_engine_option
from .release import make


@click.command(cls=Command, first="weights images held-out macs params target precision batch samples output")
@click.argument("model")
@dense_options
@record_options("options", ShipOptions)
@record_options("budget", BudgetChoice, "macs", "params", "latency", "latency_tables")
@record_options("drawn", Drawn)
@record_options("run", PassOptions, "device", device="Where the calibration runs.")
@record_options("timed", BenchOptions, "batches", "time_limit")
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory of the release, and of its recipe.toml.")
@trust_engine_option
@output_options
def ship(
    model: ModelChoice,
    options: ShipOptions,
    budget: BudgetChoice,
    drawn: Drawn,
    run: PassOptions,
    timed: BenchOptions,
    output: Path,
    out: Output,
) -> None:
    """Make a release of a model and a folder of images. MODEL is calibrated, reduced, exported, proved, timed beside
    what it was, judged, and packed for a server.

    MODEL is named as --model of the other commands. Without a budget 70 % of the MACs are kept. Images held out of all
    before prove the result; which, is drawn by --seed.

    OUTPUT/recipe.toml says all that was done. Change it, and release does again what the change touches; the same
    command once more goes on where an interrupted one was.

    Exit codes are the gate's (0 pass, 1 fail, 3 inconclusive, 5 not comparable), and 4 when stages wait for a machine
    with the target.

    Example: corp-deploy ship deit_small_patch16_224 --weights deit_small.safetensors --images photos/ --macs 0.7
    -o shipped
    """
    from corp_deploy.release.names import RECIPE
    from corp_deploy.release.run import Job
    from corp_deploy.release.ship import ToShip, again, recipe_to_ship

    request = ToShip(source=model, options=options, drawn=drawn, budget=budget, timed=timed, run=run)
    recipe, path = recipe_to_ship(request, output), output / RECIPE
    closing = f"to change anything: edit {path}, then run {again(recipe, output)}; it does only what changed"
    try:
        code = make(Job(recipe=recipe, path=path, root=output, baseline=Baseline(), warn=out.warn), out, closing)
    except BadInput as error:
        # What is refused before any work is so of options: the recipe was not written.
        raise BadInput(str(error) if path.exists() else str(error).replace(f"{path.resolve()}: ", "")) from error
    click.get_current_context().exit(code)
