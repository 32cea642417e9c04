"""Secrets come from standard input, never as an argument, which every account of the machine can read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from commitmq.security.user import Secret

_Value = TypeVar("_Value")


def usage(read: Callable[[], _Value]) -> _Value:
    """What ``read`` returns; its ValueError is one of usage."""
    try:
        return read()
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def read_secret() -> Secret:
    """The first line of standard input. Raises UsageError for what is no secret."""
    from commitmq.security.user import Secret

    return usage(lambda: Secret(sys.stdin.readline(1_024).rstrip("\r\n")))
