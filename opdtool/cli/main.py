"""The ``opdtool`` command: which commands there are, and what each exit status means.

0 all checks held; 1 a check failed; 2 bad usage or an input that cannot be used; 3 an
internal error; 130 interrupted. Only a failed check is ever 1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from opdtool import __version__
from opdtool.cli.start import COMMANDS as COMMANDS
from opdtool.cli.start import help_text, was_interrupted
from opdtool.core.errors import InputError
from opdtool.ranks.ending import settle
from opdtool.ranks.errors import RankError


def _say(message: str) -> None:
    from opdtool.report.text import clean, inert

    message = inert(clean(message, keep="\n"))
    with suppress(OSError):  # a closed stderr: nobody listens
        print(message, file=sys.stderr, flush=True)


def _close_stdout() -> None:
    """After a closed pipe: point stdout at nothing, so that nothing fails at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stdout_fails() -> OSError | None:
    """Why standard output cannot be written, if it cannot."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    failed: OSError | None = getattr(sys.stdout, "failed", None)  # and what it held is lost
    return failed


def _unwritten(error: OSError) -> int:
    """The status of a run whose output cannot be written."""
    _close_stdout()
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    _say(f"error: standard output cannot be written: {error.strerror or error}")
    return 2


def _internal_error(error: BaseException) -> int:
    if was_interrupted():  # a library has made another exception of it
        return 130
    if isinstance(error, OSError) and (unwritten := _stdout_fails()) is not None:
        return _unwritten(unwritten)
    if os.environ.get("OPDTOOL_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
        _say(getattr(error, "trace", ""))
    _say(
        f"internal error: {type(error).__name__}: {error}\n"
        "This is a defect of opdtool. Please report it with the command you typed and the output "
        "of the same command under OPDTOOL_TRACEBACK=1."
    )
    return 3


_put_off: ContextVar[InputError | None] = ContextVar("put_off", default=None)
"""What is wrong with the file of defaults, where the command line may ask for help alone."""


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with every exception turned into the exit status it stands for."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            if (error := _put_off.get()) is not None:
                raise error
            command(*args, **kwargs)
        except (KeyboardInterrupt, typer.Exit, typer.Abort):
            raise
        except InputError as error:
            _say(f"error: {error}")
            raise typer.Exit(2) from None
        except RankError as error:
            if error.trace:  # its own code failed, as it would have failed here
                raise typer.Exit(_internal_error(error)) from None
            if was_interrupted():  # it has reached the ranks too
                raise typer.Exit(130) from None
            _say(f"error: {error}")
            raise typer.Exit(3) from None
        except BrokenPipeError:
            _close_stdout()
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except OSError as error:
            # What the system says of a path is no defect of ours: a name too long, a loop of links.
            if isinstance(error, TimeoutError) or not error.filename or not error.strerror:
                raise typer.Exit(_internal_error(error)) from None
            _say(f"error: {error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}")
            raise typer.Exit(2) from None
        except Exception as error:
            if hasattr(error, "format_message"):  # a usage error raised inside a command
                raise
            raise typer.Exit(_internal_error(error)) from None

    return run


WORDS = "opdtool.words"
"""Where the context keeps the whole command line."""


class LazyGroup(TyperGroup):
    """A group that imports a command's module only when that command is run."""

    def get_help(self, ctx: Any) -> str:
        """The page that :mod:`opdtool.cli.start` prints without typer."""
        return help_text().rstrip("\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = tuple(args)
        _put_off.set(None)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with the help line alone; :meth:`resolve_command` loads the real one."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from opdtool.cli.nearest import did_you_mean

            ctx.fail(f"there is no command {args[0]!r}{did_you_mean(args[0], COMMANDS)}")
        name, stub, rest = super().resolve_command(ctx, args)
        return (name, load(str(name)) if stub else None, rest)


class PlainCommand(TyperCommand):
    """A command whose help texts mean what they say: ``[[step]]`` is no markup."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.markup import escape

        def shown(item: Any) -> Any:
            shown = copy(item)
            shown.help = escape(item.help or "")
            return shown

        plain = shown(self)
        plain.params = [shown(parameter) for parameter in self.params]
        super(PlainCommand, plain).format_help(ctx, formatter)


def load(name: str) -> Any:
    """The real command of this name, its module imported."""
    module = import_module(f"opdtool.cli.{name.replace('-', '_')}")
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=PlainCommand, help=module.command.__doc__)(guarded(module.command))
    from opdtool.cli.defaults import refuse_empty_paths, take_environment

    return refuse_empty_paths(take_environment(typer.main.get_command(alone), name))


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --version: torch's version and devices too.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            envvar="OPDTOOL_CONFIG",
            show_envvar=False,
            metavar="FILE",
            help="Take defaults from this file, not from the nearest opdtool.toml or "
            "pyproject.toml.",
        ),
    ] = None,
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated",
            envvar="OPDTOOL_ISOLATED",
            show_envvar=False,
            help="Take defaults from no file.",
        ),
    ] = False,
) -> None:
    """Prepare and verify the data of on-policy distillation and draft-model training."""
    if version:
        print(f"opdtool {__version__}")
        if verbose:
            from opdtool.jobs.device import describe_torch

            print("\n".join(describe_torch()))
        raise typer.Exit(0)
    if ctx.invoked_subcommand is None:
        ctx.fail("Missing command.")
    guarded(_take_defaults)(ctx, config, isolated)


def _take_defaults(ctx: typer.Context, path: Path | None, isolated: bool) -> None:
    """Give the command that is about to run its defaults from a file, where there is one."""
    name = str(ctx.invoked_subcommand)
    if name == "explain":  # it has no options, and says what to do about other errors
        return
    try:
        _read_defaults(ctx, name, path, isolated)
    except InputError as error:
        if not {"-h", "--help"}.intersection(ctx.meta[WORDS]):
            raise
        _put_off.set(error)  # most likely nothing but help is asked for


def _read_defaults(ctx: typer.Context, name: str, path: Path | None, isolated: bool) -> None:
    from opdtool.cli.defaults import active, defaults_for, find_config, read_config

    if isolated and path is not None and _from_environment(ctx, "isolated"):
        isolated = _from_environment(ctx, "config")  # what was typed wins
    config = None
    if not isolated:
        config = read_config(path) if path is not None else find_config(_here())
    active.set(config)
    if config is not None and name in COMMANDS:
        ctx.default_map = {name: defaults_for(config, name, COMMANDS)}


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise InputError(
            f"the working directory cannot be read: {error.strerror or error}; go to another"
        ) from None


def _from_environment(ctx: typer.Context, parameter: str) -> bool:
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name == "ENVIRONMENT"


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit status and raises nothing."""
    try:
        status = app(args=argv, prog_name="opdtool", standalone_mode=False)
    except SystemExit as end:
        if (unwritten := _stdout_fails()) is not None:  # rich's answer to a closed pipe
            status = _unwritten(unwritten)
            return 0 if isinstance(unwritten, BrokenPipeError) else status
        return end.code if isinstance(end.code, int) else 2
    except KeyboardInterrupt:
        status = 130
    except typer.Abort:
        return _interrupted(130 if was_interrupted() else 2)
    except Exception as error:
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            return _interrupted(_internal_error(error))
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            try:
                print(format_message(), flush=True)
            except OSError as unwritten:
                return _unwritten(unwritten)
            return 2
        message = format_message().rstrip(".")
        hint = f"; see {context.command_path} --help" if context and message[-1:] != "?" else ""
        _say(f"error: {message}{hint}")
        return 2
    return _interrupted(status if isinstance(status, int) else 0)


def _interrupted(status: int) -> int:
    if status == 130:
        _say("interrupted")
    return status


def main() -> NoReturn:
    """The console script."""
    # A polite kill unwinds like an exception, so that half-written outputs are swept.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    status = run()
    try:
        sys.stdout.flush()
    except OSError as error:
        failed = _unwritten(error)
        status = status or (0 if isinstance(error, BrokenPipeError) else failed)
    settle(status)
    sys.exit(status)
