"""The command, python -m corp_deploy and torchrun -m corp_deploy. Signals are heard before the rest is imported."""

import sys

from ground.signals import ending, raising_on_signals


def main() -> None:
    try:
        with raising_on_signals():
            from .cli import main as commands
    except KeyboardInterrupt as error:
        message, code = ending(error)
        print(f"Error: {message}", file=sys.stderr)
        sys.exit(code)
    commands(prog_name="corp-deploy")


if __name__ == "__main__":
    main()
