"""``--save``, ``--compare`` and ``--fail-below``: saving a measurement, and comparing with a saved one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.output import complain, fail, print_table

if TYPE_CHECKING:
    from commitmq.bench.baseline import Baseline, Compared, Figure
    from commitmq.bench.figures import Spread
    from commitmq.bench.floors import Floors


def figure(name: str, unit: str, value: Spread, floor: str) -> Figure:
    """A figure of a baseline; for rates more is better, for times less."""
    from commitmq.bench.baseline import Figure

    return Figure(name, unit, value, unit.endswith("/s"), floor)


class AgainstBaseline:
    """One measurement's baseline: floors before and after it, the file to write, the baseline to compare with."""

    def __init__(self, save: Path | None, compare: Path | None, fail_below: float | None) -> None:
        if fail_below is not None and compare is None:
            raise click.UsageError("--fail-below needs --compare FILE")
        self._save = save
        self._compare = compare
        self._fail_below = fail_below
        self._bench = ""
        self._node = ""
        self._settings: dict[str, Any] = {}
        self._before: Baseline | None = None
        self._floors: Floors | None = None
        self._compared: Sequence[Compared] = ()

    def begin(self, bench: str, node: str, **settings: Any) -> None:
        """Read the baseline and measure the floors, if either is wanted. ``settings`` must be those of the baseline."""
        if self._save is None and self._compare is None:
            return
        from commitmq.bench.baseline import Baseline, BaselineError, check_comparable
        from commitmq.bench.floors import measure_floors

        self._bench, self._node, self._settings = bench, node, settings
        if self._compare is not None:
            try:
                self._before = Baseline.load(self._compare)
                check_comparable(self._before, bench, settings)
            except (BaselineError, OSError) as error:
                raise click.UsageError(f"--compare: {error}") from error
        self._floors = measure_floors(node)

    def end(self, machine: dict[str, Any], figures: Sequence[Figure]) -> dict[str, Any]:
        """Save and compare. Returns the fields for the JSON report."""
        if self._floors is None:
            return {}
        from commitmq.bench.baseline import Baseline, compare
        from commitmq.bench.figures import to_json
        from commitmq.bench.floors import measure_floors

        floors = self._floors.mean(measure_floors(self._node))
        now = Baseline(self._bench, self._settings, machine, floors, tuple(figures))
        more: dict[str, Any] = {"floors": to_json(floors)}
        if self._before is not None:
            self._compared = compare(self._before, now)
            more["compared"] = {
                "taken": self._before.taken,
                "floors": to_json(self._before.floors),
                "figures": [to_json(one) for one in self._compared],
            }
        if self._save is not None:
            try:
                now.save(self._save)
            except OSError as error:
                fail(f"the baseline cannot be written: {error}")
        return more

    def tell(self) -> None:
        """Print the comparison as a table."""
        if self._before is None:
            return
        click.echo(f"compared with {self._compare} of {self._before.taken}; above 1 is better")
        print_table(
            ("", "unit", "then", "now", "ratio", "by the machine's own"),
            [
                (
                    one.name,
                    one.unit,
                    f"{one.before:,.1f}",
                    f"{one.now:,.1f}",
                    f"{one.ratio:.2f}",
                    "-" if one.corrected is None else f"{one.corrected:.2f}",
                )
                for one in self._compared
            ],
            left=(0, 1),
        )

    def leave(self) -> None:
        """Exit with 1 when a figure is below ``--fail-below``: by the corrected ratio, if there is one."""
        from commitmq.supervision.exit_codes import CliExit

        if self._fail_below is None:
            return
        below = [one for one in self._compared if one.judged < self._fail_below]
        for one in below:
            complain(f"{one.name} is {one.judged:.2f} times the baseline, below {self._fail_below:g}")
        if below:
            raise SystemExit(int(CliExit.FAILURE))


def baseline_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The three options; the function gets them as ``baseline``, an :class:`AgainstBaseline`."""

    @wraps(function)
    def call(*, save: Path | None, compare: Path | None, fail_below: float | None, **more: Any) -> Any:
        baseline = AgainstBaseline(save, compare, fail_below)
        result = function(baseline=baseline, **more)
        baseline.leave()
        return result

    for decorate in (
        click.option(
            "--fail-below",
            metavar="RATIO",
            type=click.FloatRange(min=0.0, min_open=True),
            help="Exit with 1 when a figure is below this ratio of the baseline's, after correction by the floors.",
        ),
        click.option(
            "--compare",
            metavar="FILE",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Compare with this baseline.",
        ),
        click.option(
            "--save", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Keep this as a baseline."
        ),
    ):
        call = decorate(call)
    return call
