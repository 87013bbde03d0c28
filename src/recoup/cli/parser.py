"""The options of the command line. Nothing here imports torch, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import recoup
from recoup.errors import SizeError
from recoup.sizes import parse_bytes

__all__ = ["make_parser", "parse"]

_FACTORY_HELP = (
    "where the model comes from: package.module:function. It returns the model, a sample and, if you like, a"
    " loss and an optimizer, as a tuple in this order or as a dict with these names"
)
_EPILOG = (
    "exit codes: 0 done; 1 it could not be done (nothing fits, out of memory, a real step that differs); 2 bad input"
    " (an option, a factory, a file). One line says why"
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses arguments; exits with code 2 if they are wrong."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if getattr(options, "ranks", None) is not None and options.hardware is None:
        parser.error("--ranks goes with --hardware: what is sharded is estimated, not measured")
    if getattr(options, "most", None) is not None and options.hardware is None:
        parser.error("--most goes with --hardware: without it there is one batch size")
    if getattr(options, "most", None) is not None and options.sizes is not None:
        parser.error("--most goes without --sizes: these are for one batch size")
    return options


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, as every other error is reported."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = _Parser(prog="recoup", description="Train bigger on the memory you have.", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"recoup {recoup.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    adders: list[tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = [
        ("fit", "measure a model, plan its step for a budget, apply the plan and verify it", _add_fit),
        ("frontier", "what a step costs under every budget; the largest batch for a GPU", _add_frontier),
        ("audit", "find what makes a model unsafe to replay", _add_audit),
        ("measure", "measure a model's step and keep the numbers", _add_measure),
        ("plan", "plan a measured step for a budget", _add_plan),
        ("hardware", "measure this machine, for estimates elsewhere", _add_hardware),
        ("demo", "fit a small GPT on the CPU and train it to the same losses", _add_demo),
    ]
    for name, text, add in adders:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add(command)
        command.add_argument("--quiet", action="store_true", help="print nothing but errors")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_fit(command: argparse.ArgumentParser) -> None:
    _add_factory(command)
    command.add_argument(
        "--budget",
        required=True,
        type=_budget,
        metavar="SIZE",
        help="bytes for the whole step: 8GiB, 80%% of the device, or auto",
    )
    _add_sizes(command, "a plan for each range of sizes")
    command.add_argument("--no-verify", action="store_true", help="do not run a real step under the plan")
    command.add_argument(
        "--no-race", action="store_true", help="do not time the plan against others on real steps"
    )
    command.add_argument(
        "--engine",
        choices=("auto", "eager", "captured", "compiled", "best"),
        default="auto",
        help="how units run: eager, as captured graphs, as generated code, or the fastest of these (best);"
        " auto, which is the default, takes generated code for compiled models and else eager",
    )
    command.add_argument("--html", type=_output, metavar="FILE", help="write the report")
    _add_json(
        command,
        "write the plan, which recoup.engines.ModelPlan.from_json reads; with --sizes, PlansBySize.from_json",
    )


def _add_frontier(command: argparse.ArgumentParser) -> None:
    _add_factory(command)
    _add_hardware_options(command)
    command.add_argument(
        "--points", type=_count, default=10, metavar="N", help="at most this many budgets (10)"
    )
    command.add_argument(
        "--budget",
        type=_size,
        action="append",
        metavar="SIZE",
        help="look at this budget instead; also for the largest batch. May be repeated",
    )
    _add_sizes(command, "seconds for each budget and size")
    command.add_argument(
        "--most", type=_count, metavar="N", help="with --hardware: look at no larger batch than this"
    )
    _add_json(command, "write the table")


def _add_audit(command: argparse.ArgumentParser) -> None:
    _add_factory(command, accumulates=False)


def _add_measure(command: argparse.ArgumentParser) -> None:
    _add_factory(command)
    _add_hardware_options(command)
    _add_json(command, "write the profile, which recoup plan reads", required=True)


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument("profile", type=Path, help="a file that recoup measure wrote")
    command.add_argument(
        "--budget", required=True, type=_size, metavar="SIZE", help="bytes for the whole step, such as 8GiB"
    )
    _add_json(command, "write the plan, which recoup.engines.ModelPlan.from_json reads")


def _add_hardware(command: argparse.ArgumentParser) -> None:
    _add_json(command, "write the numbers, which --hardware reads")


def _add_demo(command: argparse.ArgumentParser) -> None:
    pass


def _add_factory(command: argparse.ArgumentParser, *, accumulates: bool = True) -> None:
    command.add_argument("factory", type=_factory, metavar="MODULE:MAKE", help=_FACTORY_HELP)
    command.add_argument(
        "--batch", type=_count, metavar="N", help="the batch size to call it with, if it takes one"
    )
    command.add_argument(
        "--units", nargs="+", metavar="PATTERN", help="the modules to decide about, such as 'blocks.*'"
    )
    if accumulates:
        command.add_argument(
            "--accumulates", action="store_true", help="gradients add up over several backwards"
        )


def _add_hardware_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--hardware",
        metavar="GPU",
        help="estimate for this GPU, such as H200, or for a file that recoup hardware wrote; nothing is allocated",
    )
    command.add_argument(
        "--ranks",
        type=_count,
        metavar="N",
        help="shard parameters, gradients and optimizer state over so many",
    )


def _add_sizes(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--sizes",
        type=_sizes,
        metavar="N,N,...",
        help=f"{what}: lengths that the sample, as long as the longest of them, is cut to, such as 128,512,2048",
    )


def _add_json(command: argparse.ArgumentParser, text: str, *, required: bool = False) -> None:
    command.add_argument("--json", type=_output, metavar="FILE", required=required, help=text)


# Values: checked before anything is imported or measured.


def _factory(text: str) -> str:
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form package.module:function")
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").replace("/", ".")
        raise argparse.ArgumentTypeError(f"{text!r} names a file; name the module: {dotted}:{name}")
    return text


def _budget(text: str) -> str:
    is_relative = text.strip().lower() == "auto" or re.fullmatch(r"\s*\d+(\.\d+)?\s*%\s*", text)
    return text if is_relative else _size(text)


def _size(text: str) -> str:
    try:
        parse_bytes(text)
    except SizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _sizes(text: str) -> list[int]:
    sizes = [_count(part.strip()) for part in text.split(",")]
    if len(set(sizes)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is one size; name at least two, such as 128,512")
    return sizes


def _output(text: str) -> Path:
    path = Path(text)
    is_new = not path.exists()
    if is_new or path.is_file() or path.is_dir():  # a pipe must not be opened twice
        try:
            path.open("ab").close()
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    if is_new:
        path.unlink()
    return path
