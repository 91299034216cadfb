"""corp-deploy inspect."""

import click

from corp_deploy.views.console import Output

from .help import Command
from .model_choice import ModelChoice, model_options
from .options import output_options


@click.command(cls=Command, first="model weights outputs trust-code json")
@model_options
@output_options
def inspect(model: ModelChoice, out: Output) -> None:
    """Show what of a model can be reduced, and why the rest can't.

    Its sites with their widths, parameters, MACs and preprocessing.

    Example: corp-deploy inspect --model deit_small_patch16_224 --weights deit_small.safetensors
    """
    from corp_deploy.families.inspection import inspection_of_model
    from corp_deploy.views.inspection import inspection_table, merging_lines, output_lines, size_line, stay_lines
    from corp_deploy.views.preprocessing import preprocessing_line, preprocessing_record

    checkpoint = model.look(out)
    record = inspection_of_model(checkpoint.model) | preprocessing_record(checkpoint)
    about = (*output_lines(record), *merging_lines(record), *stay_lines(record))
    lines = (*about, size_line(record), preprocessing_line(checkpoint))
    out.result(record, inspection_table(record), *lines)
