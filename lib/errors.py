"""What a script says to its user: a mistake in one line and an exit status, warnings, progress."""

import argparse
import os
import sys
import time


class UserError(Exception):
    """Something the user can mend. The message is one line that names the file or key and the way out."""


class RankError(UserError):
    """A UserError that only this rank met, so every rank prints its own. A plain UserError is the same on all ranks."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are UserErrors."""

    def error(self, message):
        raise UserError(f"command line: {message}; see {self.prog} --help")


def is_rank_0():
    return os.environ.get("RANK", "0") == "0"  # torchrun sets it


def or_exit(function, *arguments):
    """function(*arguments). A UserError becomes one line on stderr and exit status 2, Ctrl-C one line and 130."""
    try:
        return function(*arguments)
    except UserError as error:
        if isinstance(error, RankError) or is_rank_0():
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # torchrun ends all ranks when the first one ends: let rank 0 speak
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from what is complete", file=sys.stderr, flush=True)
        sys.exit(130)


def run_main(main):
    """Run a script and exit: main() returns the exit status.

    Exits with 1, silently, where the output's reader has gone (`| head`), and with 2 and one line where the output
    cannot be written.
    """
    try:
        status = or_exit(main)
        sys.stdout.flush()
        sys.exit(status)
    except OSError as error:
        if error.filename is not None:  # about a file, not about the output
            raise
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def log(message):
    """One line on stdout, from rank 0 alone. Where stdout fails (reader gone, disk full), later lines go nowhere."""
    if is_rank_0():
        try:
            print(message, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def warn(message):
    """One line on stderr, from rank 0 alone."""
    if is_rank_0():
        print(f"warning: {message}", file=sys.stderr, flush=True)


def one_line(error):
    """An exception's text as one line. The whole text: torch names the tensor on the second line."""
    return " ".join(str(error).split())[:300]
