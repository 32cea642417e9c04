"""Fits a configuration to a store: takes the sizes of its files, and refuses given settings that contradict them.

* A size that was given (:attr:`commitmq.config.NodeConfig.given`) must agree with the files. All given sizes that do
  not agree are refused together, in one sentence, before anything is changed.
* A default size gives way to the store's.
* Where the store has no such files yet, the given size counts, else the remembered one, else the default.
* The index is derived from the log: if the sizes of its files cannot be found, the node reports this and runs without
  an index.

The start writes the decided sizes to ``commitmq/store.json`` after its recovery succeeded (:meth:`FittedConfig.remember`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from commitmq.config import NodeConfig, from_mapping, validated
from commitmq.config.schema import PROFILES
from commitmq.errors import ConfigError, StoreError
from commitmq.format.index import IndexShape
from commitmq.store import geometry, store_file
from commitmq.store.geometry import INDEX, SIZES, Geometry
from commitmq.store.layout import StoreLayout
from commitmq.store.store_file import StoreFile

# Files that every node makes: their sizes are remembered before the first such file exists. Files of other kinds may
# not exist until RocketMQ makes some, with the sizes of its own configuration.
_MADE_BY_EVERY_NODE: Final = (geometry.SEGMENT, geometry.QUEUE_FILE, *INDEX)


@dataclass(frozen=True, slots=True)
class FittedConfig:
    """A configuration with the store's sizes. ``notes`` are sentences for the user who starts the node.
    ``index_problem`` says why the node runs without an index; "" where it has one.
    """

    config: NodeConfig
    store_id: str
    notes: tuple[str, ...]
    index_problem: str
    _before: StoreFile | None
    _kept: frozenset[str]

    def remember(self, layout: StoreLayout) -> None:
        """Write the decided sizes and the store's id durably, unless they are already written. Raises StoreError. Call
        it only after the recovery succeeded: the next start must not have to trust the file of a refused start.
        """
        now = StoreFile(self.store_id, {key: size for key, size in sizes_of(self.config).items() if key in self._kept})
        if now != self._before:
            now.save(layout.store_file)


def sizes_of(config: NodeConfig) -> dict[str, int]:
    """The sizes of files that ``config`` asks for, by their names."""
    values = config.to_dict()
    return {key: values[key.partition(".")[0]][key.partition(".")[2]] for key in SIZES}


def fit(layout: StoreLayout, config: NodeConfig, *, offline: bool = False, new_index: bool = False) -> FittedConfig:
    """``config`` with the sizes of the store in ``layout``. Changes nothing.

    Raises StoreError with everything that contradicts. With ``offline`` files that contradict ``store.json`` are not
    refused: the offline verb itself looks for damage. ``new_index``: the index will be rebuilt, so other sizes may be
    given.
    """
    wanted = sizes_of(config)
    seen = geometry.look(layout, index=config.index.enable, likely=_likely_shapes(config))
    given: dict[str, int] = {key: wanted[key] for key in SIZES if key in config.given}
    _refuse(layout, seen, given, offline=offline, free=INDEX if new_index else ())
    fitted = with_sizes(config, {**seen.sizes, **given})
    if not offline:
        _check_limits(layout, fitted)
    notes = []
    if seen.forgotten:
        found = ", ".join(f"{key}={size}" for key, size in seen.found.items())
        notes.append(f"{seen.forgotten}: sizes are taken from the files ({found or 'there are none'})")
    kept = {*_MADE_BY_EVERY_NODE, *seen.found}
    if seen.index_problem:
        kept -= set(INDEX)
        if not offline:
            fitted = replace(fitted, index=replace(fitted.index, enable=False))
            notes.append(no_index(seen.index_problem))
    before = seen.remembered
    store_id = before.store_id if before else store_file.new_id()
    return FittedConfig(fitted, store_id, tuple(notes), seen.index_problem, before, frozenset(kept))


def _check_limits(layout: StoreLayout, config: NodeConfig) -> None:
    try:
        validated(from_mapping(config.to_dict()))
    except ConfigError as error:
        raise StoreError(
            f"files of this store have a size that a node cannot work with, or were cut short: {error}. Nothing was changed",
            path=layout.root,
        ) from error


def no_index(problem: str) -> str:
    """The sentence that says that a node runs without an index because of ``problem``."""
    return (
        f"the node runs without an index: {problem}. Messages cannot be queried by key; to have them indexed again, stop the"
        " node and delete the folder index, or run `commitmq store rebuild --only index`"
    )


def with_sizes(config: NodeConfig, sizes: Mapping[str, int]) -> NodeConfig:
    """``config`` with other sizes of files."""
    sections: dict[str, dict[str, int]] = {}
    for key, size in sizes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = size
    for section, values in sections.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return config


def _refuse(
    layout: StoreLayout, seen: Geometry, given: Mapping[str, int], *, offline: bool, free: Collection[str]
) -> None:
    sizes = seen.sizes
    # A given size that the files confirm settles the matter, even against store.json.
    confirmed = {key for key, size in given.items() if seen.found.get(key) == size}
    wrong = [key for key in given if key in seen.found and key not in confirmed and key not in free]
    disagreements = [] if offline else seen.disagreements(confirmed)
    parts = []
    if wrong:
        have = ", ".join(f"{key}={sizes[key]}" for key in wrong)
        asked = ", ".join(f"{key}={given[key]}" for key in wrong)
        where = ", ".join(dict.fromkeys(seen.shown_by[key] for key in wrong))
        parts.append(
            f"the store has {have} (see {where}), but {asked} was asked for: leave these settings out, the store knows its"
            " sizes"
        )
    if disagreements:
        parts.append(
            f"{'; '.join(disagreements)}: a file was cut short, or is another store's. Put the right one back; or, if the"
            " files are right, give their size once with --set"
        )
    if parts:
        raise StoreError(f"{'; and '.join(parts)}. Nothing was changed", path=layout.root)


def _likely_shapes(config: NodeConfig) -> list[IndexShape]:
    shapes = [config.index, *(from_mapping({"profile": name}).index for name in PROFILES)]
    return [IndexShape(one.hash_slots, one.max_items) for one in shapes]
