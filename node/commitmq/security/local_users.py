"""``security.local_users``: which accounts of the machine are which users, over the local sockets."""

from __future__ import annotations

import pwd
from typing import Final

from commitmq.errors import ConfigError
from commitmq.security.user import check_name

_EXAMPLE: Final = "1001=shop;reports=reader"


def parse_local_users(text: str) -> dict[int, str]:
    """``ACCOUNT=USER`` pairs with ``;`` between; an account is a number or a name. Raises ConfigError."""
    found = {}
    for pair in (one.strip() for one in text.split(";")):
        if not pair:
            continue
        account, equals, user = (one.strip() for one in pair.partition("="))
        try:
            if not equals:
                raise ValueError
            found[_uid(account)] = check_name(user)
        except (ValueError, KeyError):
            raise ConfigError(
                f"security.local_users: {pair!r:.100} is no account of this machine and its user, as in {_EXAMPLE}"
            ) from None
    return found


def _uid(account: str) -> int:
    return int(account) if account.isdecimal() else pwd.getpwnam(account).pw_uid
