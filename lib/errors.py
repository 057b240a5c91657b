"""What a user can mend, said in one line, and what a run says while it goes."""

import os
import sys
import time



class UserError(Exception):
    """Something the user can mend. The message is one line that names the file or key and the way out."""


class RankError(UserError):
    """A UserError that one rank of several met alone: every rank prints its own. Of the others rank 0 speaks for all."""


def or_exit(function, *arguments):
    """function(*arguments), but a UserError becomes one line on stderr and exit status 2."""
    try:
        return function(*arguments)
    except UserError as error:
        if isinstance(error, RankError) or os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # the first rank to end ends all under torchrun: let rank 0 speak
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from what is complete", file=sys.stderr, flush=True)
        sys.exit(130)


def run_main(main):
    """Run a script: main() returns its exit status. It ends with 1 and without a word where the reader of its output has gone
    (`| head`), with one line where the output cannot be written."""
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
    """One line on stdout, from rank 0 alone. Where nobody can take it any more - its reader has gone, the disk under it is full -
    the run goes on without."""
    if os.environ.get("RANK", "0") == "0":
        try:
            print(message, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def warn(message):
    """One line on stderr; of several ranks rank 0's alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {message}", file=sys.stderr, flush=True)


def one_line(error):
    """An exception's whole text in one line: torch names the tensor on the second one."""
    return " ".join(str(error).split())[:300]
