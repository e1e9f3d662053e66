"""The command line: it reads arguments and calls the rooms, nothing else.

Imports are late: ``--help``, ``list operators``, ``list workloads``, ``report`` and the like never import torch.

Exit codes: 0 done; 1 a regression was found; 2 the command line or an input file is wrong; 3 a result is incorrect;
4 nothing was measured; 5 inconclusive under ``--strict``; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any


def _name_this_package() -> None:
    """Make ``spikemark`` mean the folder of this file, for ``python runner.py`` with or without an install.

    A stub package whose path is this folder goes first on the search path of this process and of those it starts. The
    folder itself, which Python has put there, goes: its ``kernels`` would shadow a published package of that name.
    """
    import atexit
    import shutil
    import tempfile

    root = Path(__file__).resolve().parent
    stub = tempfile.mkdtemp(prefix="spikemark-import-")
    atexit.register(shutil.rmtree, stub, ignore_errors=True)
    package = Path(stub, "spikemark")
    package.mkdir()
    text = (root / "__init__.py").read_text(encoding="utf-8")
    (package / "__init__.py").write_text(f"{text}\n__path__[:] = [{str(root)!r}]\n", encoding="utf-8")
    sys.path[:] = [stub, *(entry for entry in sys.path if Path(entry or ".").resolve() != root)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [stub, os.environ.get("PYTHONPATH")]))


if __name__ == "__main__":
    _name_this_package()

from spikemark.commands.arguments import Parser, add_selection, natural, seconds, slowdown, whole  # noqa: E402
from spikemark.harness.errors import NothingMeasured, UsageError  # noqa: E402

if TYPE_CHECKING:
    import argparse

EXIT_USAGE, EXIT_NOTHING, EXIT_INTERRUPTED = 2, 4, 130
DEFAULT_PRESET = {"run": "quick", "verify": "smoke", "profile": "smoke"}


def _list(parser: argparse.ArgumentParser) -> None:
    kinds = ("operators", "implementations", "workloads", "devices")
    parser.add_argument("what", metavar="KIND", nargs="?", choices=kinds, help=f"one of {', '.join(kinds)}")
    parser.add_argument("--json", action="store_true", help="for programs: everything that is known of each")
    parser.add_argument("--all", action="store_true", help="also implementations that run only if they are named")
    plugin, layers = "Python file of implementations to list as well", "TOML file of workloads to list as well"
    parser.add_argument("--plugin", dest="plugins", metavar="FILE", action="append", default=[], help=plugin)
    parser.add_argument(
        "--workload-file", dest="workload_files", metavar="FILE", action="append", default=[], help=layers
    )


def _time_limit(parser: argparse.ArgumentParser) -> None:
    limit = "of one case in one pass, such as 90s or 5m; what takes longer is stopped; default: 60s"
    parser.add_argument("--time-limit", metavar="TIME", type=seconds, default=60.0, help=limit)


def _verify(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, DEFAULT_PRESET["verify"])
    parser.add_argument("--json", action="store_true", help="one JSON object a case instead of a table")
    _time_limit(parser)


def _run(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, DEFAULT_PRESET["run"])
    parser.add_argument("--passes", metavar="N", type=natural, help="fresh processes a case is measured in")
    parser.add_argument("-o", "--out", metavar="DIR", help="run folder; default: runs/<date-time>-<preset>")
    resume = "measure what is missing in the run folder --out; without a selection, that run's own is repeated"
    parser.add_argument("--resume", action="store_true", help=resume)
    _time_limit(parser)
    _engine(parser)


def _engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster", "measure on other machines, see docs/cluster.md")
    group.add_argument("--engine", metavar="NAME", choices=("ray",), help="ray: on nodes of a Ray cluster")
    where = "of the cluster, HOST:PORT; default: RAY_ADDRESS, or the one that runs on this machine"
    group.add_argument("--address", metavar="ADDRESS", help=where)
    kind = "of node: a type of accelerator, or a resource that nodes were started with; repeatable; default: all GPUs'"
    group.add_argument("--kind", dest="kinds", metavar="NAME", action="append", default=[], help=kind)
    every = "every GPU of every node, not one a kind"
    group.add_argument("--every-gpu", action="store_true", help=every)


def _profile(parser: argparse.ArgumentParser) -> None:
    which = "torch (torch.profiler, default), nsys (Nsight Systems) or ncu (Nsight Compute)"
    parser.add_argument("--tool", choices=("torch", "nsys", "ncu"), default="torch", metavar="TOOL", help=which)
    out = "run folder, new or existing; traces go into its traces/; default: runs/<date-time>-profile"
    parser.add_argument("-o", "--out", metavar="DIR", help=out)
    parser.add_argument("--calls", metavar="N", type=natural, default=5, help="traced calls of a case; default: 5")
    back = "read an SQLite export of Nsight Systems made elsewhere instead; with --out it is added to that run"
    parser.add_argument("--from", dest="from_file", metavar="FILE", help=back)
    parser.add_argument("--dry-run", action="store_true", help="show the commands that would be run, run nothing")
    parser.add_argument("--nsys", metavar="PATH", help="the program nsys; default: on PATH or where it is installed")
    parser.add_argument("--ncu", metavar="PATH", help="the program ncu; default: on PATH or where it is installed")
    chosen = "with ncu: collect this metric instead of the default set; repeatable"
    parser.add_argument("--metrics", metavar="NAME", action="append", default=[], help=chosen)
    add_selection(parser, DEFAULT_PRESET["profile"])
    limit = "of one case, such as 90s or 5m; what takes longer is stopped; default: 5m"
    parser.add_argument("--time-limit", metavar="TIME", type=seconds, default=300.0, help=limit)


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="*", help="run folder; several are joined as `merge` does")
    past = "every run in DIR as a history: each case's trend, with change points; default file: DIR/history.html"
    parser.add_argument("--history", metavar="DIR", help=past)
    where = "where to write; default: report.html in the first RUN, text to standard output"
    parser.add_argument("-o", "--output", metavar="FILE", help=where)
    forms = ("html", "markdown", "csv", "parquet", "latex")
    parser.add_argument("--format", metavar="FORMAT", choices=forms, default="html", help=", ".join(forms))
    parser.add_argument("--figures", metavar="DIR", help="write each figure there as well, as SVG and PDF")
    ratio = "the two devices whose times are divided"
    parser.add_argument("--devices", metavar=("A", "B"), nargs=2, help=ratio)


def _compare(parser: argparse.ArgumentParser) -> None:
    what = "two run folders, old and new, or one of an A/B run; with --measure: revisions, or two plug-in files"
    parser.add_argument("runs", metavar="BASE [NEW]", nargs="*", help=what)
    now = "measure both versions in turns now; without NEW it is the working tree"
    parser.add_argument("--measure", action="store_true", help=now)
    past = "every run in DIR as a history: each case's trend on like environments, with change points"
    parser.add_argument("--history", metavar="DIR", help=past)
    limit = "what a regression, or with --history a change, is: slower:3%% (default), memory:10%%; repeatable"
    parser.add_argument("--fail-on", metavar="WHAT:N%", action="append", default=[], help=limit)
    parser.add_argument("--strict", action="store_true", help="exit 5 if a case is inconclusive")
    parser.add_argument("--across", action="store_true", help="compare runs of different environments on purpose")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--markdown", action="store_true", help="for a comment on a pull request")
    parser.add_argument("--all", action="store_true", help="every row, also of many cases that stayed the same")
    parser.add_argument("--passes", metavar="N", type=natural, help="with --measure: pairs of processes; default: 9")
    parser.add_argument("--out", metavar="DIR", help="with --measure: run folder; default: runs/<date-time>-compare")
    add_selection(parser, DEFAULT_PRESET["run"])
    _time_limit(parser)


def _merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders, two or more")
    parser.add_argument("-o", "--out", metavar="DIR", required=True, help="the run folder to make")


def _selftest(parser: argparse.ArgumentParser) -> None:
    pairs = "comparisons without and (at most 100) with each injected slowdown; default: 10, some minutes"
    parser.add_argument("--pairs", metavar="N", type=natural, default=10, help=pairs)
    delay = "slowdown to inject, as 0.1 or 10%%; may be repeated; default: 5%%, 10%% and 20%%"
    parser.add_argument(
        "--delay", dest="delays", metavar="SHARE", type=slowdown, action="append", default=[], help=delay
    )
    parser.add_argument(
        "--passes", metavar="N", type=natural, help="pairs of processes; default: as `compare --measure`"
    )
    parser.add_argument("--seed", metavar="N", type=whole, default=0, help="of the order; default: 0")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    keep = "keep the result there as selftest.json; in a run folder the report then shows it"
    parser.add_argument("--out", metavar="DIR", help=keep)


def _inspect(parser: argparse.ArgumentParser) -> None:
    which = "such as sm_90; repeatable; default: every supported one"
    parser.add_argument("--arch", dest="architectures", metavar="ARCH", action="append", default=[], help=which)
    parser.add_argument("--json", action="store_true", help="for programs")


def _env(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", dest="devices", metavar="DEVICE", action="append", default=[])
    parser.add_argument("--json", action="store_true", help="as run.json has it")


# name -> (one line, adds its arguments, module of `spikemark.commands` with `run(arguments) -> exit code`)
COMMANDS = {
    "list": ("what there is: operators, implementations, workloads, devices", _list, "listing"),
    "verify": ("compare implementations with the float64 reference, time nothing", _verify, "verify"),
    "run": ("verify, then measure, then write a report", _run, "run"),
    "profile": ("trace cases with torch.profiler or Nsight: why is it slow?", _profile, "profile"),
    "report": ("write the report of one or several runs", _report, "report"),
    "compare": ("what became slower or faster between two runs, or two versions of the code", _compare, "compare"),
    "merge": ("join runs made apart into one run folder with one report", _merge, "merge"),
    "selftest": ("how often identical code is called slower here, and what is found", _selftest, "selftest"),
    "inspect": ("registers, spills and occupancy of the CUDA kernels; needs no GPU", _inspect, "inspect"),
    "env": ("what of this machine matters for a number", _env, "env"),
}


def parser() -> Parser:
    """The whole command line."""
    from spikemark import __version__

    top = Parser(
        prog="spikemark",
        description="Benchmark and profile spiking-neural-network kernels: verified first, then timed and weighed.",
        epilog="first steps:  spikemark run --preset smoke     spikemark list workloads     spikemark run --help",
    )
    top.add_argument("--version", action="version", version=f"spikemark {__version__}")
    top.set_defaults(command=None)
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name, (text, add, module) in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add(one)
        one.set_defaults(parser=one, module=module)
    return top


def dispatch(argv: Sequence[str]) -> int:
    """Parse and call the subcommand; errors pass through."""
    top = parser()
    arguments: Any = top.parse_args(list(argv))
    if arguments.command is None:
        top.print_help()
        return 0
    arguments.argv = list(argv)
    arguments.parse = top.parse_args
    command = importlib.import_module(f"spikemark.commands.{arguments.module}")
    return int(command.run(arguments))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: the exit code; every expected error is one line on stderr."""
    code = 0
    _open_streams()
    try:
        code = dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _fail(error, EXIT_USAGE)
    except NothingMeasured as error:
        return _fail(error, EXIT_NOTHING)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader has what it wanted: `| head`
        _drop_output()
        return code
    except OSError as error:
        if error.filename is None:  # no file of ours: standard output
            _drop_output()
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}", EXIT_USAGE)


def _open_streams() -> None:
    """Standard output or error that the caller has closed (``>&-``, a daemon) is None in Python: then it is nothing."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


def _drop_output() -> None:
    """What is still to be printed cannot be: Python would fail once more when it flushes at exit."""
    with contextlib.suppress(io.UnsupportedOperation):  # a caller's own stream, such as a notebook's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: object, code: int) -> int:
    from spikemark.harness.progress import inert

    print(f"spikemark: {inert(' '.join(str(error).split()), 1000)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
