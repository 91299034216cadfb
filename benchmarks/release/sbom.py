"""The bill of materials of this environment in CycloneDX 1.6: this tool and every installed package.

python -m benchmarks.release.sbom -o sbom.cdx.json
"""

import os
from pathlib import Path

import click

from benchmarks.release.licences import policy
from corp_deploy.release.sbom import bill_of_environment
from ground.files import write_json
from ground.installed import installed_packages


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default="sbom.cdx.json", show_default=True)
def main(output: Path) -> None:
    """Write the bill of materials."""
    packages = installed_packages()
    write_json(output, bill_of_environment(packages))
    unsaid = [each.name for each in packages if not each.licence and each.name not in policy().unsaid]
    click.echo(f"{os.path.relpath(output)}: {len(packages)} packages")
    if unsaid:
        click.echo(f"without a licence in their metadata: {', '.join(unsaid)}", err=True)


if __name__ == "__main__":
    main()
