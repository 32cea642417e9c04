"""What the supervisor tells a service manager: systemd's notification protocol (sd_notify(3)), without its library.

    READY=1        the node accepts messages: recovery is done, all essential processes are ready. Sent again by the next
                   supervisor when one was killed.
    STATUS=…       what the start is busy with, and how it ended; ``systemctl status`` shows it
    STOPPING=1     the node drains
    WATCHDOG=1     the supervisor's loop turns; twice in each interval of ``WATCHDOG_USEC``

Each is one datagram to the socket that ``NOTIFY_SOCKET`` names; without that variable nothing is sent. The main process of
the service is the keeper, and the supervisor its child, so the unit needs ``NotifyAccess=all``. The variables are taken out
of the environment: no other process of the node, and no plugin, speaks for it.

A datagram that the manager cannot take at the moment waits for the next turn of the loop; the supervisor never waits for it.
"""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from typing import Any, Final

from commitmq.supervision.console import Report

_LONGEST_STATUS: Final = 300


class ServiceManager:
    """A service manager, or none."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Takes its variables out of ``environment``."""
        self._address = environment.pop("NOTIFY_SOCKET", "")
        self._interval_ms = _interval_ms(environment.pop("WATCHDOG_USEC", ""))
        environment.pop("WATCHDOG_PID", None)  # of the keeper, which this process speaks for
        self._unsent: dict[str, str] = {}
        self._is_stopping = False
        self._sign_of_life_ms = 0

    def listening_to(self, report: Report) -> Report:
        """``report`` that the service manager hears too."""
        if not self._address:
            return report

        def both(message: dict[str, Any]) -> None:
            report(message)
            self._hear(message)

        return both

    def turn(self, now_ms: int, *, stopping: bool) -> None:
        """Called at each turn of the supervisor's loop, which ``now_ms`` (monotonic) is the time of."""
        if not self._address:
            return
        if stopping and not self._is_stopping:
            self._is_stopping = True
            self._unsent.update({"STOPPING": "1", "STATUS": "stopping"})
        if self._interval_ms and now_ms - self._sign_of_life_ms >= self._interval_ms // 2:
            self._sign_of_life_ms = now_ms
            self._unsent["WATCHDOG"] = "1"
        self._send()

    def _hear(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "ready":
            self._unsent.update({"READY": "1", "STATUS": f"ready at {message['admin'][0]}"})
        elif event == "info":
            self._unsent["STATUS"] = str(message["message"])
        elif event == "failed":
            self._unsent["STATUS"] = str(message["error"])
        elif event == "stopped":
            in_order = "everything written is flushed" if message["clean"] else "not in order, the next start recovers"
            self._unsent["STATUS"] = f"stopped; {in_order}"
        self._send()

    def _send(self) -> None:
        if not self._unsent:
            return
        lines = [f"{name}={' '.join(value.split())[:_LONGEST_STATUS]}" for name, value in self._unsent.items()]
        # A leading @ stands for the NUL of an abstract address.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as notify:
                notify.sendto("\n".join(lines).encode(), address)
        except OSError:
            return  # a full socket, or a manager that starts anew: the next turn tries again
        self._unsent.clear()


def _interval_ms(text: str) -> int:
    """``WATCHDOG_USEC`` in milliseconds; 0 without a watchdog."""
    return int(text) // 1000 if text.isascii() and text.isdigit() else 0
