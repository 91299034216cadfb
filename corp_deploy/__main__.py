"""The entry point of the command, of python -m corp_deploy and of torchrun -m corp_deploy.

Signals are handled before other modules are imported, and the thread policy is set before torch is.
"""

import os
import sys
from contextlib import nullcontext

from corp_deploy.views.waiting import Waiting, waits_quietly
from ground.signals import describe_interruption, raising_on_signals
from ground.threads import set_thread_policy_, thread_limit


def main() -> None:
    """Run the command-line interface."""
    try:
        with raising_on_signals():
            set_thread_policy_(os.environ, thread_limit())
            from .cli import main as commands
    except KeyboardInterrupt as error:
        message, code = describe_interruption(error)
        print(f"Error: {message}", file=sys.stderr)
        sys.exit(code)
    waiting = Waiting()
    with nullcontext() if waits_quietly(sys.argv) else waiting.watching():
        commands(prog_name="corp-deploy", obj=waiting)


if __name__ == "__main__":
    main()
