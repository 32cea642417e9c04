"""A store as it is found after the machine was restarted, for tests that cut the power of a machine that goes on."""

from __future__ import annotations

from commitmq.store.layout import StoreLayout
from commitmq.store.recovery.sidecar import Sidecar, this_boot


def after_a_reboot(layout: StoreLayout) -> None:
    """Let the sidecar, if there is one, name another run of the machine than this one, also when it does so already: a cut
    in the middle of a recovery may leave the sidecar of before the first.
    """
    sidecar = Sidecar.load(layout.sidecar)
    if sidecar is not None:
        sidecar.boot = this_boot() ^ 1
        layout.sidecar.write_bytes(sidecar.to_bytes())
