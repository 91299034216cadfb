"""corp-deploy inspect."""

import click

from corp_deploy.views.console import Output, output_options

from .options import ModelChoice, model_options


@click.command()
@model_options
@output_options
def inspect(model: ModelChoice, out: Output) -> None:
    """Show a model's sites, widths, parameters, MACs and preprocessing, and why a block can't be reduced.

    Example: corp-deploy inspect --model deit_small_patch16_224 --weights deit_small.safetensors
    """
    from rich.table import Table

    from corp_deploy.families.inspection import inspection_of_model
    from corp_deploy.views.preprocessing import preprocessing_line, preprocessing_record

    checkpoint = model.load(out)
    found = inspection_of_model(checkpoint.model) | preprocessing_record(checkpoint)
    table = Table("site", "width", "parameters", "MACs", "can't be reduced because")
    for row in found["sites"]:
        table.add_row(row["site"], row["width"], f"{row['parameters']:,}", f"{row['macs'] / 1e6:,.1f} M", row["reason"])
    for row in found["fixed"]:
        table.add_row(row["name"], "fixed", f"{row['parameters']:,}", f"{row['macs'] / 1e6:,.1f} M", "no site")
    macs = f"{found['macs'] / 1e9:.3f} GMAC"
    size = f"{found['architecture']}: {found['parameters']:,} parameters, {macs} for one image"
    out.result(found, table, size, preprocessing_line(checkpoint))
