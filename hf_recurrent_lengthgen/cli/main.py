"""The command line: `lengthgen demo | train | evaluate`."""

import argparse
import sys
from collections.abc import Sequence

from hf_recurrent_lengthgen.cli import demo, evaluate, train

COMMANDS = {"demo": demo, "train": train, "evaluate": evaluate}
DESCRIPTION = """\
Recurrent language models that keep working far beyond the length they were trained on.

  lengthgen demo       train a small model, see it fail, cure it, get a report (about five minutes)
  lengthgen train      train or post-train a checkpoint, from a YAML file or flags
  lengthgen evaluate   measure checkpoints beyond their training length

lengthgen COMMAND --help lists the options of a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        "lengthgen", description=DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=" | ".join(COMMANDS))
    own = next((index for index, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    parsed = parser.parse_args(arguments[: own + 1])
    try:
        return COMMANDS[parsed.command].run(arguments[own + 1 :])
    except (ValueError, OSError) as error:
        if parsed.debug:
            raise
        print(f"lengthgen {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"lengthgen {parsed.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
