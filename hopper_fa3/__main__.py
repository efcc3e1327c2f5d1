"""The command line: `python -m hopper_fa3 info`, `demo` and `advise`."""

import argparse
import sys


def info(arguments):
    from .info import report

    print("\n".join(report()))
    return 0


def demo(arguments):
    from .demo import run

    return run(arguments.tokens)


def advise(arguments):
    from .advise import run

    return run(arguments)


def positive(word):
    """An integer of at least 1."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


class Parser(argparse.ArgumentParser):
    """Wrong words are answered in one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help explains)\n")


def parser():
    root = Parser(prog="python -m hopper_fa3", description="Exact attention for NVIDIA Hopper")
    commands = root.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("info", help="what was found on this machine and what will run on it")
    command.set_defaults(run=info)
    command = commands.add_parser("demo", help="attention over a real text, with its error, memory and speed")
    command.add_argument("--tokens", type=positive, default=4096, help="bytes of text (default: %(default)s)")
    command.set_defaults(run=demo)
    command = commands.add_parser("advise", help="what standard attention costs at a shape, and whether to switch")
    command.add_argument("--seqlen", type=int, required=True, metavar="N", help="length of queries and keys")
    command.add_argument("--heads", type=int, required=True, metavar="N", help="query heads")
    command.add_argument("--head-dim", type=int, required=True, metavar="N", help="a multiple of 8, at most 256")
    command.add_argument("--batch", type=int, default=1, metavar="N", help="default: %(default)s")
    command.add_argument("--heads-k", type=int, metavar="N", help="K/V heads (default: as many as query heads)")
    command.add_argument("--causal", action="store_true")
    command.add_argument("--dtype", default="bf16", metavar="NAME", help="bf16 or fp16 (default: %(default)s)")
    command.add_argument("--share", type=float, metavar="X", help="share of the model's time in attention, as 0.08")
    command.add_argument("--memory", metavar="SIZE", help="as 80GB, 96GiB (default: of the GPU here, else 80GB)")
    command.set_defaults(run=advise)
    return root


def main(words=None):
    arguments = parser().parse_args(words)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
