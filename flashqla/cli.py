"""The command line: python -m flashqla demo | doctor | selftest | bench | report | calibrate | warmup.

Exit codes: 0 all is well, 1 something was measured and found wrong, 2 the command cannot be carried out (one line on
stderr says why), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import flashqla
from flashqla.console import UserError
from flashqla.hopper.compile import DTYPES
from flashqla.validation import BACKENDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except UserError as error:
        print(f"flashqla: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("flashqla: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options. What a command needs is imported when it runs."""
    parser = argparse.ArgumentParser(prog="python -m flashqla", description=flashqla.__doc__)
    parser.add_argument("--version", action="version", version=f"flashqla {flashqla.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, module: str, says: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=says, description=says)
        sub.set_defaults(command=lambda arguments: importlib.import_module(module).main(arguments))
        return sub

    demo = command("demo", "flashqla.demo", "Check the library, train a small byte model on real text, sample from it.")
    demo.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...; a GPU gets bigger sizes")
    demo.add_argument("--steps", type=natural, help="optimizer steps (default: as the device's preset)")
    demo.add_argument("--seconds", type=positive, help="stop training after this time (default: as the preset)")
    demo.add_argument("--out", default="runs/demo", metavar="DIR", help="where to write (default: %(default)s)")
    demo.add_argument(
        "--resume", metavar="FILE", help="go on from this checkpoint; with --steps 0, only sample from it"
    )
    demo.add_argument("--seed", type=int, default=0, help="seed of weights, batches and samples")

    command("doctor", "flashqla.doctor", "Say what is installed, which backend a call would use, and why.")

    selftest = command("selftest", "flashqla.selftest", "Compare forward and backward with float64 over many cases.")
    selftest.add_argument("--device", default="auto", help="auto (default: a GPU if there is one), cpu, cuda, ...")
    selftest.add_argument("--backend", default="auto", choices=BACKENDS, help="judge this backend (default: auto)")
    selftest.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name holds this text")
    selftest.add_argument("--json", metavar="FILE", help="also write machine, versions and rows here")
    selftest.add_argument("--fuzz", type=natural, metavar="SECONDS", help="random cases instead, for this time")
    selftest.add_argument("--seed", type=natural, default=0, help="seed of the first random case (default: 0)")

    bench = command("bench", "flashqla.bench", "Time the library against its rivals.")
    bench.add_argument("--cpu", action="store_true", help="the chunked path against the token loop, on the CPU")
    bench.add_argument(
        "--decode", action="store_true", help="on a GPU: a few tokens of many sequences, against fla-core"
    )
    for direction, says in (
        ("forward", "the forward (default)"),
        ("backward", "the backward alone"),
        ("step", "forward and backward"),
    ):
        bench.add_argument(f"--{direction}", action="store_true", help=f"on a GPU: {says}; passes can be combined")
    bench.add_argument(
        "--peers", default="fla,flash_qla,flashinfer", help="rivals on a GPU, or none (default: %(default)s)"
    )
    bench.add_argument(
        "--rows",
        metavar="NAME,...",
        help='only these rows, as in "2/8 1x32768,16/64" (no lengths: all with these heads)',
    )
    bench.add_argument("--cold", action="store_true", help="also time first calls in processes with empty caches")
    bench.add_argument("--plot", metavar="FILE", help="also draw a bar chart of the best peer against the library")
    bench.add_argument(
        "--tokens", type=positive_int, default=4096, help="tokens of the CPU rows (default: %(default)s)"
    )
    bench.add_argument("--json", metavar="FILE", help="also write machine, versions and rows here")

    report = command("report", "flashqla.report", "Write the README's results and figures from the committed files.")
    report.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something is out of date")
    report.add_argument("--root", metavar="DIR", help="the checkout (default: the one this package is imported from)")

    calibrate = command("calibrate", "flashqla.calibrate", "Measure what the plan's cost model needs, on this GPU.")
    calibrate.add_argument("--json", metavar="FILE", help="write it here; flashqla/costs.json is what plans read")

    says = "Compile the kernels into the cache that the library uses; needs no GPU."
    warmup = commands.add_parser("warmup", help=says, description=says)
    warmup.add_argument(
        "--dtype", action="append", choices=DTYPES, help="may be given twice (default: bfloat16, with --all both)"
    )
    warmup.add_argument("--all", action="store_true", help="also head dimensions of 64 and gates in bfloat16")
    warmup.add_argument("--workers", type=positive_int, help="kernels to compile at a time (default: one a CPU)")
    warmup.add_argument("--report", action="store_true", help="also print what they use of registers and memory")
    warmup.add_argument(
        "--export",
        metavar="DIR",
        help="also copy them to DIR; a machine without nvcc runs them with TILELANG_CACHE_DIR=DIR",
    )
    warmup.set_defaults(command=run_warmup)
    return parser


def run_warmup(arguments: argparse.Namespace) -> int:
    """Compile the Hopper kernels ahead of time, and with --report hold them to their budgets."""
    from flashqla.hopper import compile as compiler
    from flashqla.hopper import resources

    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")  # the progress bar says it
    before = compiler.builds()
    try:
        variants = compiler.warmup(arguments.dtype, arguments.all, arguments.workers)
        new = compiler.builds() - before
        print(f"{len(variants)} kernels ready, {new} of them new; cache: {compiler.describe_cache()}")
        if arguments.export:
            folder = compiler.export(variants, arguments.export)
            print(f"exported; on a machine without nvcc: export TILELANG_CACHE_DIR={folder.resolve()}")
        text, ok = resources.report(variants, arguments.workers) if arguments.report else ("", True)
    except ImportError as error:
        raise UserError(f"there are no kernels to compile in this installation ({error})") from error
    except compiler.CompileError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot compile into {compiler.cache_folder()}: {error}") from error
    if text:
        print(text)
    return 0 if ok else 1


def natural(text: str) -> int:
    """An integer that is not negative."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, was {value}")
    return value


def positive_int(text: str) -> int:
    """An integer above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, was {value}")
    return value


def positive(text: str) -> float:
    """A number above zero."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, was {value}")
    return value
