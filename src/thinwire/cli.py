"""The command `thinwire`: an exit status, and one line for every error. Commands are in `tools`,
`strategy` and `members`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from thinwire._launched import require_linux
from thinwire._version import __version__
from thinwire._wording import near

if TYPE_CHECKING:
    from cyclopts import App

_EXTRAS = ("cyclopts", "rich")
_ON_LINUX = ("run", "compare", "host", "doctor", "probe")
_LONGEST_LINE = 2000
_SUGGESTION = re.compile(r' Did you mean "?([^"? ]+)"?\?')
_FAILED = 1
_BAD_INPUT = 2
_INTERRUPTED = 130
_TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 bad input, 130 interrupted, 143
    terminated.

    Args:
        arguments: Command-line words; None for those of the process.
    """
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt as end:  # while modules are imported too, which takes seconds
        _exit(_INTERRUPTED, f"interrupted; {str(end) or 'every worker has been ended'}")


def _run(typed: list[str]) -> NoReturn:
    status = 0
    # None where they were closed
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if typed == ["--version"]:  # works without any extra
        try:
            print(__version__, flush=True)
        except OSError as error:
            _exit(_FAILED, str(error))
        sys.exit(0)
    missing = [name for name in _EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        _exit(
            _BAD_INPUT, f"the command line needs {', '.join(missing)}: pip install 'thinwire[cli]'"
        )
    from cyclopts import CycloptsError

    from thinwire.errors import ThinwireError
    from thinwire.members import command as meeting
    from thinwire.strategy import command as describing
    from thinwire.stream import command as streaming
    from thinwire.tools.app import app
    from thinwire.tools.compare import command as comparing
    from thinwire.tools.doctor import command as examining
    from thinwire.tools.planning import command as planning
    from thinwire.tools.run import command as running
    from thinwire.tools.up import command as upping

    if "explain" not in app:
        examples: dict[Callable[..., None], str | None] = {
            comparing.compare: comparing.EXAMPLES,
            describing.explain: describing.EXAMPLE,
            describing.export: describing.EXAMPLES,
            running.run: running.EXAMPLES,
            planning.plan: planning.EXAMPLE,
            planning.probe: planning.PROBE_EXAMPLE,
            examining.doctor: examining.EXAMPLES,
            meeting.host: meeting.EXAMPLES,
            meeting.join: meeting.JOIN_EXAMPLES,
            streaming.follow: streaming.EXAMPLES,
            upping.up: upping.EXAMPLES,
            **dict.fromkeys((streaming.versions, upping.down, upping.status)),
        }
        for command, text in examples.items():
            app.command(command, help_epilogue=text)
    try:
        if typed and typed[0] in _ON_LINUX and not {"--help", "-h"} & {*typed}:
            require_linux(f"thinwire {typed[0]}", or_macos=typed[0] == "host")
        with _orderly_termination():
            try:
                app(_script_apart(typed, app), exit_on_error=False, print_error=False)
            except SystemExit as end:  # cyclopts raises it after every command
                status = int(end.code or 0)
            sys.stdout.flush()  # here, where a reader that has left is seen
    except (CycloptsError, ValueError) as error:
        _exit(_BAD_INPUT, _meant(error) + _advice(error, typed))
    except (
        BrokenPipeError
    ):  # of `thinwire ... | head`: nobody reads on, and Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (ThinwireError, OSError, ImportError, NotImplementedError) as error:
        _exit(_FAILED, str(error))
    _leave(status)


@contextlib.contextmanager
def _orderly_termination() -> Iterator[None]:
    # By default SIGTERM ends a process without its finally clauses; as an exception it takes the
    # way of Ctrl-C.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _script_apart(typed: Sequence[str], app: App) -> list[str]:
    """Return the words with "--" before the script of `run`: all after it belong to the script."""
    words = list(typed)
    if words[:1] != ["run"]:
        return words
    takes = {
        name: argument.token_count()[0]
        for argument in app["run"].assemble_argument_collection()
        for name in argument.names
    }
    index = 1
    while index < len(words):
        name, given, _ = words[index].partition("=")
        if not name.startswith("-"):
            return [*words[:index], "--", *words[index:]]
        if name == "--":
            break
        if name not in takes:  # help, or an error; what is behind it may be the script's
            return words[: index + 1]
        index += 1 if given else 1 + takes[name]
    return words


def _meant(error: Exception) -> str:
    """Return the error on one line, without a suggestion that is far from the word."""
    from cyclopts import UnknownCommandError, UnknownOptionError

    text = " ".join(str(error).split())
    if isinstance(error, UnknownCommandError):
        [word, *_] = error.unused_tokens or [""]
    elif isinstance(error, UnknownOptionError):
        word = error.token.keyword or error.token.value
    else:
        return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."
    suggestion = _SUGGESTION.search(text)
    if suggestion is None or near(word.lstrip("-"), [suggestion[1].lstrip("-")]):
        return text
    return text.replace(suggestion[0], "")


def _advice(error: Exception, typed: Sequence[str]) -> str:
    """Return advice for a user who passes options to a script as with other launchers."""
    from cyclopts import UnknownOptionError

    if isinstance(error, UnknownOptionError) and typed[0] == "run" and "--" not in typed:
        return " Options of the script go after --: thinwire run --workers 2 -- train.py --lr 0.1"
    return ""


def _exit(status: int, message: str) -> NoReturn:
    sys.stderr.write(f"thinwire: {message}\n")  # at once: other ranks write there too
    _leave(status)


def _leave(status: int) -> NoReturn:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # the process has aborted in 3 of 70 runs of three ranks while the interpreter shut down, in
        # a thread of torch's
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    sys.exit(status)
