"""Arguments that several subcommands share: the selection of cases, and how errors of the parser are told.

Torch-free, and cheap to import: every start of the command line pays for this module.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from spikemark.commands import terminal
from spikemark.harness.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are a ``UsageError`` of one line that names the nearest option or choice."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self.suggest_on_error = False  # Python 3.14's own suggestions would double ours

    def error(self, message: str) -> NoReturn:
        """Raise what the runner prints as one line."""
        raise UsageError(f"{self._with_nearest(message)} (see `{self.prog} --help`)")

    def _with_nearest(self, message: str) -> str:
        strange = re.match(r"unrecognized arguments: (\S+)", message)
        if strange:
            word = strange[1].split("=")[0]
            return f"unrecognized argument {strange[1]!r}{_nearest(word, list(self._option_string_actions))}"
        choice = re.match(r"argument .*: invalid choice: '(.*?)' \(choose from (.*)\)", message, re.DOTALL)
        if choice:
            names = [name.strip(" '") for name in choice[2].split(",")]
            what = message.removeprefix("argument ").split(":")[0].lower()
            return f"unknown {what} {choice[1]!r}{_nearest(choice[1], names)}; known: {', '.join(names)}"
        return " ".join(message.split())

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but an unknown option is told by the subcommand that was given, which knows its own options."""
        found, rest = self.parse_known_args(self._words(args), namespace)
        if rest:
            getattr(found, "parser", self).error(f"unrecognized arguments: {' '.join(rest)}")
        return found

    def _words(self, args: Sequence[str] | None) -> list[str]:
        """The command line's words. An empty one is refused: it is a variable of a script that is not set, and would
        be taken for "not given". A negative number is bound to its option, so that it is named (argparse: ``-5%`` is
        an option). A NUL cannot be in any name."""
        words: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            before = words[-1] if words else ""
            if not word or (word.startswith("--") and word.endswith("=")):
                after = word.removesuffix("=") or before
                self.error(f"an empty argument{f' after {after}' if after else ''}: is a variable not set?")
            if "\0" in word:
                self.error(f"a NUL character in {word!r}")
            if re.match(r"-[.\d]", word) and before.startswith("--") and "=" not in before:
                words[-1] = f"{before}={word}"
            else:
                words.append(word)
        return words


def _nearest(word: str, known: list[str]) -> str:
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return f" (did you mean {lowered[near[0]]!r}?)" if near else ""


SPIKES = """your own recording: .npz with the array `spikes`, 0/1, [C,T,H,W] or [B,T,C,H,W]; it is measured besides,
at its own batch and firing rate; to measure it alone: --workload 'recording:*'"""


TIME_LIMIT_S = 10 * 24 * 3600.0  # far beyond any case, and well within what a wait of the system can count


def natural(text: str, least: int = 1) -> int:
    """A whole number >= 1 and below 10^9, in plain digits (argparse type)."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        most = " and at most 999999999" if re.fullmatch(r"[0-9]{10,}", text) else ""
        raise argparse.ArgumentTypeError(f"a whole number of at least {least}{most} is needed, got {text!r}")
    return int(text)


def whole(text: str) -> int:
    """A whole number >= 0 (argparse type)."""
    return natural(text, 0)


def _share(text: str) -> float:
    """``0.05`` or ``5%`` as a number. ``ValueError`` for anything else."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def rate(text: str) -> float:
    """A firing rate (argparse type): ``0.05`` or ``5%``. Its range is checked with the rest of the selection."""
    try:
        return _share(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a firing rate such as 0.05 or 5% is needed, got {text!r}") from None


def slowdown(text: str) -> float:
    """A slowdown to inject (argparse type): ``0.1`` or ``10%``, above 0 and at most 1000 %."""
    try:
        value = _share(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 10:
        raise argparse.ArgumentTypeError(f"a slowdown such as 0.1 or 10%, at most 1000%, is needed, got {text!r}")
    return value


def seconds(text: str) -> float:
    """A time greater than 0 (argparse type): ``90``, ``90s``, ``5m`` or ``2h``, in seconds."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", text)
    value = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not 0 < value <= TIME_LIMIT_S:
        most = ", at most 10 days" if value else ""
        raise argparse.ArgumentTypeError(f"a time such as 90, 90s, 5m or 2h is needed{most}, got {text!r}")
    return value


def add_selection(parser: argparse.ArgumentParser, preset: str) -> None:
    """SELECT of the command line: which cases. Each option may be repeated; names may have * and ?."""
    group = parser.add_argument_group(
        "selection", "each may be repeated; names may have * and ? (quote them); nothing named: what the preset has"
    )

    def add(flag: str, destination: str, metavar: str, text: str, kind: Any = str) -> None:
        group.add_argument(flag, dest=destination, metavar=metavar, action="append", default=[], type=kind, help=text)

    add("--operator", "operators", "NAME", "see `spikemark list operators`")
    add("--phase", "phases", "NAME", "forward, backward, input, weight or step")
    add("--implementation", "implementations", "NAME", "see `spikemark list implementations`")
    add("--workload", "workloads", "NAME", "see `spikemark list workloads`; any of them, not only the preset's")
    add(
        "--device", "devices", "DEVICE", "cpu, cpu:N (N threads), cuda, cuda:I or all; default: the first GPU, else cpu"
    )
    add("--dtype", "dtypes", "DTYPE", "float32 (default), float16, bfloat16 or float64")
    add("--batch", "batches", "N", "batch size; default: the preset's", natural)
    add("--spike-rate", "rates", "RATE", "firing rate of the inputs, 0.05 or 5%%; default: the workload's", rate)
    group.add_argument("--preset", metavar="NAME", default=preset, help=f"smoke, quick or full; default: {preset}")
    add("--plugin", "plugins", "FILE", "Python file that registers implementations")
    add(
        "--workload-file",
        "workload_files",
        "FILE",
        "TOML file of your own layers, in the form of suites/workloads.toml",
    )
    add("--spikes", "spikes", "FILE", SPIKES)
    group.add_argument("--time-axis", metavar="N", type=whole, help="axis of time in the recordings; default: 1")
    group.add_argument(
        "--seed", metavar="N", type=whole, default=0, help="of inputs and of the visit order; default: 0"
    )


def load_plugins(files: list[str]) -> None:
    """Import plug-in files; ``UsageError`` names the one that fails."""
    from spikemark.kernels import registry

    for file in files:
        try:
            registry.load_plugin(file)
        except ValueError as error:
            raise UsageError(" ".join(str(error).split())) from None


def cases(arguments: argparse.Namespace, elsewhere: Sequence[str] | None = None) -> list[Any]:
    """The cases that parsed arguments select; loads plug-ins first, so that their names are known.

    ``elsewhere``: devices of another machine, by their names there, in place of those that were asked for.
    """
    from spikemark.suites import selection

    if arguments.time_axis is not None and not arguments.spikes:
        raise UsageError("--time-axis says where time is in a recording: it needs --spikes FILE")
    load_plugins(arguments.plugins)
    selected = {name: getattr(arguments, name) for name in selection.Selection.__dataclass_fields__}
    found = selection.build(
        arguments.preset,
        recordings=[(path, arguments.time_axis) for path in arguments.spikes],
        workload_files=arguments.workload_files,
        seed=arguments.seed,
        elsewhere=elsewhere is not None,
        **(selected if elsewhere is None else selected | {"devices": elsewhere}),
    )
    for option, name in selection.without_a_case(selected, found):
        print(f"spikemark: {option} {terminal.inert(name, 200)} matches none of the selected cases", file=sys.stderr)
    return found
