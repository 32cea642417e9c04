"""The quotas of all users as a running process knows them.

The supervisor sees that the file of users has changed, and tells every process as it tells changed settings; then this is
made anew. So a request looks at nothing but dictionaries, and only where a user has a quota of its kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commitmq.errors import StoreError
from commitmq.log import Log
from commitmq.security.access_file import AccessFile
from commitmq.security.quota import Quota


class UserQuotas:
    """See the module. ``bounds_sends``, ``bounds_pulls``: whether any user has a rate. ``bounds_connections``: whether any has
    a quota of connections or pending bytes, ``bounds_pending`` of these. ``bounds_names``: of topics or groups.
    """

    def __init__(self, root: Path, flow: object, log: Log) -> None:
        """Of the store in ``root``; ``flow``: the settings ``[flow]``. Never raises: without a file that can be read users
        have the quotas of the settings.
        """
        self._file, self._log = AccessFile(root), log
        self._of_all = Quota()
        self._own: dict[str, Quota] = {}
        self._users: dict[str, dict[str, int]] = {}
        self.look(flow)

    def look(self, flow: object) -> None:
        """Take the settings and the file of users as they are now. A file that cannot be read changes nothing."""
        try:
            users = self._file.load().users.values()
        except StoreError as error:
            self._log.error("the file of users cannot be used; the quotas of before stay", error=str(error))
        else:
            self._users = {one.name: dict(one.quotas) for one in users if one.quotas}
        of_all = Quota.of_settings(flow)
        self._own = {name: of_all.laid_over(quotas) for name, quotas in self._users.items()}
        self._of_all = of_all
        every = (of_all, *self._own.values())
        self.bounds_sends = any(one.send_messages_per_s or one.send_bytes_per_s for one in every)
        self.bounds_pulls = any(one.pull_messages_per_s or one.pull_bytes_per_s for one in every)
        self.bounds_connections = any(one.connections or one.pending_bytes for one in every)
        self.bounds_pending = any(one.pending_bytes for one in every)
        self.bounds_names = any(one.topics or one.groups for one in every)

    def of(self, user: str) -> Quota:
        """All quotas of ``user``."""
        return self._own.get(user, self._of_all)

    def sends(self, user: Any) -> tuple[int, int]:
        """The rates of what ``user`` sends: messages and bytes a second; 0 bounds nothing."""
        found = self._own.get(user, self._of_all)
        return found.send_messages_per_s, found.send_bytes_per_s

    def pulls(self, user: Any) -> tuple[int, int]:
        """The same of what ``user`` pulls."""
        found = self._own.get(user, self._of_all)
        return found.pull_messages_per_s, found.pull_bytes_per_s
