"""python -m corp_deploy (and torchrun -m corp_deploy)."""

from .cli import main

main(prog_name="corp-deploy")
