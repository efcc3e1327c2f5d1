"""The command line: `python -m hopper_fa3 info` and `python -m hopper_fa3 demo`."""

import argparse
import sys


def info(arguments):
    from .info import report

    print("\n".join(report()))
    return 0


def demo(arguments):
    from .demo import run

    return run(arguments.tokens)


def parser():
    root = argparse.ArgumentParser(prog="python -m hopper_fa3", description="Exact attention for NVIDIA Hopper")
    commands = root.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("info", help="what was found on this machine and what will run on it")
    command.set_defaults(run=info)
    command = commands.add_parser("demo", help="attention over a real text, with its error, memory and speed")
    command.add_argument("--tokens", type=int, default=4096, help="length of the text in bytes (default: %(default)s)")
    command.set_defaults(run=demo)
    return root


def main(words=None):
    arguments = parser().parse_args(words)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
