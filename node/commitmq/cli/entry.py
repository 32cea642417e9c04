"""The first module of the program ``commitmq``: makes Ctrl-C quiet while the command is imported.

It imports only built-in modules of Python, so that Ctrl-C while the command is imported (most of its first 0.2 s) ends
it quietly and not with a traceback out of some module.
"""

import _signal  # type: ignore[import-not-found]  # the C module behind `signal`, which imports enum
import os

_INTERRUPTED = 130  # CliExit.INTERRUPTED, which is not imported yet


def main() -> None:
    """Run :func:`commitmq.cli.main.main`."""
    # A shell starts programs in the background with SIGINT ignored; that stays so.
    is_ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    if is_ours:
        _signal.signal(_signal.SIGINT, _end)
    from commitmq.cli.main import main as run

    try:
        try:
            if is_ours:
                _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            run()
        finally:
            # Everything is done and written. Python's own shutdown would be interrupted with a traceback, too.
            if is_ours:
                _signal.signal(_signal.SIGINT, _end)
    except KeyboardInterrupt:  # the command was not ready yet, or not any more, to catch it
        os._exit(_INTERRUPTED)


def _end(_number: int, _frame: object) -> None:
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
