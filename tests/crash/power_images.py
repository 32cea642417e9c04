"""From a record to many disks: each number is one image, its recovery, and now and then the recovery cut once more."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from power_check import Recovered, check, config_of, fresh
from power_disk import Record
from power_load import Run
from power_recorder import Recorder

from commitmq.store.layout import StoreLayout
from rebooted import after_a_reboot

_CUT_AGAIN = 0.12


@dataclass
class Found:
    """What a series of images showed."""

    images: int = 0
    again: int = 0
    acks: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Found) -> Found:
        return Found(
            self.images + other.images,
            self.again + other.again,
            self.acks + other.acks,
            {**self.failures, **other.failures},
            self.kinds + other.kinds,
        )


class Images:
    """The images of one run. ``scratch`` is where they are made, best in memory."""

    def __init__(self, run: Run, scratch: Path) -> None:
        self.run = run
        self.record = Record(run.folder / "record")
        assert not self.record.missed, f"calls that the recorder did not see:\n{self.record.missed}"
        self._config = config_of(run.settings)
        self._scratch = scratch

    def moment_of(self, number: int) -> int:
        """The event after which the power goes in image ``number``."""
        return random.Random(f"moment {number}").randrange(len(self.record.events))

    def looks(self) -> list[int]:
        """The events at which all files were looked at."""
        return [number for number, event in enumerate(self.record.events) if number and event.get("whole")]

    def check_killed(self, recovered: Recovered, moment: int) -> int:
        """:func:`check` for the death of every process at ``moment``, one of :meth:`looks`.

        Files change while they are looked at: what was said before the look must be there, what was asked for before its
        end may.
        """
        events = self.record.events
        return check(
            recovered, self.run.said, int(events[moment - 1]["t"]), until=int(events[moment]["t"]), power=False
        )

    def run_all(
        self, numbers: Iterable[int], *, keep: Path | None = None, on_failure: Callable[[int], None] | None = None
    ) -> Found:
        """Make, recover and check the images; a failed one is kept in ``keep``."""
        found = Found()
        moments = sorted((self.moment_of(number), number) for number in set(numbers))
        disks = self.record.disks([moment for moment, _ in moments])
        for (moment, number), (_, disk) in zip(moments, disks, strict=True):
            chance = random.Random(f"image {number}")
            folder = fresh(self._scratch / f"image-{number}")
            disk.write_image(folder, chance)
            after_a_reboot(StoreLayout(folder))
            if keep is not None:
                shutil.copytree(folder, fresh(keep / f"image-{number}"))
            before = self.record.events[moment]["t"]
            found.images += 1
            try:
                if chance.random() < _CUT_AGAIN:
                    found.again += 1
                    found.acks += self._cut_again(folder, number, chance, before)
                else:
                    found.acks += check(Recovered(folder, self._config), self.run.said, before)
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[:600]}"
                found.failures[number] = text
                found.kinds[text.split("[")[0][:70]] += 1
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def _cut_again(self, folder: Path, number: int, chance: random.Random, before: int) -> int:
        """Recover the image, cut the power while that goes on, recover what is left then, and check that."""
        acks = 0
        record = fresh(self._scratch / f"again-{number}")
        recorder = Recorder(folder, record)
        recorder.prepare()
        first = len(Record(record).events)
        recorder.install()
        try:
            recovered = Recovered(folder, self._config)
        finally:
            recorder.uninstall()
        acks += check(recovered, self.run.said, before)
        again = Record(record)
        for moment in sorted(chance.sample(range(first - 1, len(again.events)), 2)):
            _, disk = next(again.disks([moment]))
            second = fresh(self._scratch / f"second-{number}")
            disk.write_image(second, chance)
            after_a_reboot(StoreLayout(second))
            acks += check(Recovered(second, self._config), self.run.said, before)
            shutil.rmtree(second)
        shutil.rmtree(record)
        return acks
