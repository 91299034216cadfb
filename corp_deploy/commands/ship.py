"""The command ship."""

from pathlib import Path
from typing import Annotated

import click

from corp_deploy.invocation.budget_choice import BudgetChoice
from corp_deploy.invocation.calibration import PassOptions
from corp_deploy.invocation.engine import ShipFiles, ShipOptions
from corp_deploy.invocation.input_choice import Drawn
from corp_deploy.invocation.running import BenchOptions
from corp_deploy.views.console import Output

from .command import ModelChoice, command, some
from .options import trust_engine_option
from .release import make_release


@command(first="weights images held-out macs params within target precision batch output")
@click.argument("model")
@trust_engine_option
def ship(
    model: ModelChoice,
    options: ShipOptions,
    budget: Annotated[BudgetChoice, some("macs", "params", "latency", "within", "latency_tables")],
    drawn: Drawn,
    run: Annotated[PassOptions, some("device", device="Where the calibration runs.")],
    timed: Annotated[BenchOptions, some("batches", "time_limit", "launches")],
    files: ShipFiles,
    out: Output,
) -> int:
    """Make a release of a model and a folder of images.

    MODEL is calibrated, reduced, exported, proved, timed beside the dense model, judged, and packed for a server.

    MODEL is named as --model of the other commands. Without a budget 70 % of the MACs are kept. Images that nothing was
    fitted to, drawn by --seed, prove the result. With --within these images choose the smallest model, and the images
    of --held-out prove it.

    OUTPUT/recipe.toml has all settings of the release. If you change it, the command release runs the stages again that
    the change affects. The same command continues after an interruption.

    Exit codes are the gate's (0 pass, 1 fail, 3 inconclusive, 5 not comparable), and 4 when stages need another
    machine, which has the GPU or runtime of the target.

    Example: corp-deploy ship deit_small_patch16_224 --weights deit_small.safetensors --images photos/ --macs 0.7
    -o shipped
    """
    from corp_deploy.release.incremental import locked_release
    from corp_deploy.release.ship import ShipRequest, job_to_ship, rerun_command

    request = ShipRequest(source=model, options=options, drawn=drawn, budget=budget, timed=timed, run=run)
    output = Path(files.output)
    with locked_release(output), job_to_ship(request, output, out.warn) as job:
        again = rerun_command(job.recipe, output)
        return make_release(
            job, out, f"to change anything, edit {job.path}; this does again only what changed: {again}"
        )
