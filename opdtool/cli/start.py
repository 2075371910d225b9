"""The console script: ``--version`` and ``--help`` answered before typer is imported.

typer costs more than all else that these two need, and they are what people wait for while
they think of what to type. Everything else goes on to :mod:`opdtool.cli.main`.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from opdtool import __version__

COMMANDS = {
    "pack": "Pack padded batches into [1, T/CP] with cumulative lengths and CP windows.",
    "unpack": "Restore the padded batch from a pack.",
    "verify-pack": "Check a pack made by anyone against its batch.",
    "build-mask": "Build the shifted draft-loss mask.",
    "verify-mask": "Check a draft-loss mask from any framework, and name the mistake in it.",
    "build-d2t": "Choose a draft vocabulary from token counts.",
    "verify-d2t": "Check a draft vocabulary map or a draft checkpoint.",
    "map-d2t": "Cut teacher logits down to the draft vocabulary.",
    "reconstruct": "Rebuild teacher logits from hidden states and compare them.",
    "simulate": "Prove that packed, sharded and split computations agree.",
    "inspect": "Show what is in a file or directory of tensors.",
    "compare": "Compare two files tensor by tensor.",
    "roll": "Shift a packed tensor left by one inside each segment.",
    "rescale": "Rescale loss metrics by their normalizers.",
    "convert": "Turn a torch file into safetensors.",
    "check": "Run the steps of a suite file.",
    "explain": "Say what a check or a fault means, and how to mend it.",
    "demo": "Write the example data and run the main jobs on it.",
}
"""Every command and its line in ``opdtool --help``; the module is the name with underscores."""

OPTIONS = {
    "--version": "Show the version; with --verbose torch's version and devices too.",
    "--config FILE": "Take defaults from FILE, not the nearest opdtool.toml or pyproject.toml.",
    "--isolated": "Take defaults from no file.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell.",
    "-h, --help": "Show this message, or after a command that command's own.",
}


def help_text() -> str:
    """What ``opdtool --help`` prints."""
    rows = [
        "Usage: opdtool [OPTIONS] COMMAND [ARGS]...",
        "",
        "Prepare and verify the data of on-policy distillation and draft-model training.",
        "",
        "Commands:",
        *(f"  {name:<13}{words}" for name, words in COMMANDS.items()),
        "",
        "Options:",
        *(f"  {spelling:<22}{words}" for spelling, words in OPTIONS.items()),
        "",
        "opdtool COMMAND --help shows a command's arguments and options.",
    ]
    return "\n".join(rows) + "\n"


def main() -> NoReturn:
    """The console script."""
    try:
        _main()
    except Exception:
        if was_interrupted():  # an import that made another exception of it
            _leave_interrupted()
        raise
    except KeyboardInterrupt:  # outside a command, so there is nothing to be swept
        _leave_interrupted()
    finally:
        if _heeded:
            signal.signal(signal.SIGINT, _leave_interrupted)


def _main() -> NoReturn:
    heed_interrupts()
    open_standard_streams()
    answers = {"--version": f"opdtool {__version__}\n", "--help": help_text(), "-h": help_text()}
    answer = answers.get(sys.argv[1]) if len(sys.argv) == 2 else None
    if answer is None or "_OPDTOOL_COMPLETE" in os.environ:
        from opdtool.cli.main import main as go_on

        go_on()
    sys.exit(_print(answer))


_heeded: list[bool] = []
_interrupts: list[bool] = []


def heed_interrupts() -> None:
    """Remember Ctrl-C, where it is not ignored: libraries may make another exception of it."""

    def interrupt(*_: object) -> None:
        _interrupts.append(True)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _heeded.append(True)
        signal.signal(signal.SIGINT, interrupt)
        # While the interpreter takes itself down it gives Ctrl-C its plain meaning back, which is
        # death by a signal; the work is done by then.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        sys.unraisablehook = _unraisable


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """An interrupt that comes inside a callback of the interpreter is swallowed there, with a
    traceback: say nothing, and send it once more when the callback is over."""
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return
    from threading import Timer

    again = Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def was_interrupted() -> bool:
    """Whether Ctrl-C has come."""
    return bool(_interrupts)


def _leave_interrupted(*_: object) -> NoReturn:
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(130)


class _Output(io.TextIOWrapper):
    """Standard output: it remembers why it could not be written, for whoever asks why a run
    failed."""

    failed: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.failed = error
            raise


class _Aside(io.TextIOWrapper):
    """Standard error: what cannot be written there, as on a full disk, changes no status."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def open_standard_streams() -> None:
    """Open what was closed before the start, as by ``>&-``, on nothing.

    Else Python has no ``sys.stdout``, and the first file that is opened becomes the standard
    output that libraries print to. What an encoding lacks is escaped on both streams.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        to = sys.stdout
        out = os.fdopen(1, "wb", closefd=False)
        sys.stdout = _Output(out, to.encoding, "backslashreplace", line_buffering=to.isatty())
    if isinstance(sys.stderr, io.TextIOWrapper):
        raw = os.fdopen(2, "wb", 0, closefd=False)
        sys.stderr = _Aside(raw, sys.stderr.encoding, "backslashreplace", write_through=True)


def _print(answer: str) -> int:
    try:
        sys.stdout.write(answer)
        sys.stdout.flush()
    except OSError as error:
        # What is buffered still would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
            return 2
    return 0
