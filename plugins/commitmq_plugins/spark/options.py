"""The options of ``.option(name, value)``. Names are compared without case, as Spark does.

Each kind of value has one reader here. An unknown name is refused, because a misspelt ``endingOffsets`` would otherwise
read everything. :class:`GapPolicy` says what is done about missing messages: an error that lists them, or a report when
reading continues.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from commitmq.errors import CommitMQError, ConfigError
from commitmq.files import atomic_file
from commitmq.format.constants import LMQ_PREFIX
from commitmq.log import get_log
from commitmq.store.metadata.topic_config import validate_group
from commitmq.store.queues.tag_filter import TagFilter

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
DEFAULT_PARTITION_BYTES: Final = 1024 * 1024 * 1024
TRANSFERS: Final = ("auto", "files", "pull")
FAIL: Final = "fail"
IGNORE: Final = "ignore"
WAIT: Final = "wait"
_TRUE: Final = ("true", "1", "yes", "on")
_FALSE: Final = ("false", "0", "no", "off")
_EDGES: Final = {-2: EARLIEST, -1: LATEST}

Offsets = dict[str, dict[str, dict[int, int | str]]]
"""Store -> topic -> queue -> offset, or one of EARLIEST and LATEST. The store "" stands for a single store."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Where to begin or end: an edge of each queue, else by queue, else by store time (milliseconds)."""

    edge: str
    offsets: Offsets | None = None
    timestamp: int | None = None

    def of(self, store: str, topic: str, queue_id: int) -> int | str:
        """The offset or edge of one queue, unless the bound is a time."""
        if self.offsets is None:
            return self.edge
        topics = self.offsets.get(store) or self.offsets.get("") or {}
        return topics.get(topic, {}).get(queue_id, self.edge)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of ``read`` and ``readStream``, checked. Sizes in bytes."""

    stores: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    transfer: str = "auto"
    topics: tuple[str, ...] = ()
    topics_pattern: str = ""
    missing_topics: str = ""
    start: Bound = Bound(EARLIEST)
    end: Bound = Bound(LATEST)
    min_partitions: int | None = None
    max_bytes_per_partition: int = DEFAULT_PARTITION_BYTES
    tags: str = ""
    keys: tuple[str, ...] = ()
    fail_on_data_loss: bool = True
    gap_report: str = ""
    check_crc: bool = True
    include_properties: bool = True
    decompress: bool = False
    max_offsets_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    group: str = ""
    state: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Raises ConfigError with the option's name and its possible values."""
        values = {name.lower(): value for name, value in options.items()}
        known = {name.lower() for name in NAMES}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"there is no option {unknown[0]!r}; options are {', '.join(NAMES)}")
        stores, nodes = words(values.get("store", values.get("path", ""))), words(values.get("node", ""))
        if not stores and not nodes:
            raise ConfigError("name a source: option store (a folder) or option node (tcp://HOST:PORT)")
        found = cls(
            stores=tuple(stores),
            nodes=tuple(nodes),
            transfer=_one_of("transfer", values, TRANSFERS),
            topics=_some("topics", values),
            topics_pattern=_pattern("topicsPattern", values),
            missing_topics=_one_of("missingTopics", values, ("", FAIL, IGNORE, WAIT)),
            start=_bound("starting", values, EARLIEST),
            end=_bound("ending", values, LATEST),
            min_partitions=positive("minPartitions", values),
            max_bytes_per_partition=positive("maxBytesPerPartition", values) or DEFAULT_PARTITION_BYTES,
            tags=_tags(values),
            keys=_some("keys", values),
            fail_on_data_loss=flag("failOnDataLoss", values, True),
            gap_report=values.get("gapreport", ""),
            check_crc=flag("checkCrc", values, True),
            include_properties=flag("includeProperties", values, True),
            decompress=flag("decompress", values, False),
            max_offsets_per_trigger=positive("maxOffsetsPerTrigger", values),
            max_bytes_per_trigger=positive("maxBytesPerTrigger", values),
            group=_group(values),
            state=flag("state", values, False),
        )
        if found.topics and found.topics_pattern:
            raise ConfigError("give either topics or topicsPattern, not both")
        _check_order(found.start, found.end)
        if found.max_offsets_per_trigger and found.max_bytes_per_trigger:
            raise ConfigError("give either maxOffsetsPerTrigger or maxBytesPerTrigger, not both")
        return found

    @property
    def several(self) -> bool:
        return len(self.stores) + len(self.nodes) > 1

    @property
    def tag_filter(self) -> TagFilter | None:
        """The filter by tags; None when every tag is wanted."""
        return TagFilter.parse(self.tags)

    def wants(self, topic: str) -> bool:
        """Whether a topic is read. Light message queues repeat messages of other topics, so they must be named."""
        if self.topics:
            return topic in self.topics
        if self.topics_pattern:
            return re.fullmatch(self.topics_pattern, topic) is not None
        return not topic.startswith(LMQ_PREFIX)


NAMES: Final = (
    "store", "path", "node", "transfer", "topics", "topicsPattern", "missingTopics", "startingOffsets", "startingTimestamp",
    "endingOffsets", "endingTimestamp", "minPartitions", "maxBytesPerPartition", "tags", "keys", "failOnDataLoss",
    "gapReport", "checkCrc", "includeProperties", "decompress", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "group",
    "state",
)  # fmt: skip


def words(text: str) -> list[str]:
    """The words of a list with commas."""
    return [word for part in text.split(",") if (word := part.strip())]


def _some(name: str, values: Mapping[str, str]) -> tuple[str, ...]:
    """The words of an option that selects; none when it is absent. Raises ConfigError for a value without a word, which
    would select nothing and read everything.
    """
    found = tuple(words(values.get(name.lower(), "")))
    if name.lower() in values and not found:
        raise ConfigError(f"option {name}: {values[name.lower()]!r} names nothing; leave it out to read all")
    return found


def _check_order(start: Bound, end: Bound) -> None:
    """Raise ConfigError when the options say that reading ends before it starts."""
    if start.timestamp is not None and end.timestamp is not None and start.timestamp > end.timestamp:
        raise ConfigError(
            f"option endingTimestamp: {end.timestamp} (ms) is before startingTimestamp, which is {start.timestamp}"
        )
    for store, topics in (start.offsets or {}).items():
        for topic, queues in topics.items():
            for queue, first in queues.items():
                last = (end.offsets or {}).get(store, {}).get(topic, {}).get(queue)
                if isinstance(first, int) and isinstance(last, int) and first > last:
                    raise ConfigError(
                        f"option endingOffsets: queue {queue} of {topic!r} ends at {last}, before startingOffsets, which is "
                        f"{first}"
                    )


def flag(name: str, values: Mapping[str, str], default: bool) -> bool:
    """A true or false; ``values`` has lower-case names. Raises ConfigError."""
    text = values.get(name.lower())
    if text is None:
        return default
    if text.strip().lower() in _TRUE:
        return True
    if text.strip().lower() in _FALSE:
        return False
    raise ConfigError(f"option {name}: it is true or false, not {text!r}")


def positive(name: str, values: Mapping[str, str]) -> int | None:
    """A number above 0; None when it is absent; ``values`` has lower-case names. Raises ConfigError."""
    text = values.get(name.lower())
    if text is None:
        return None
    if not re.fullmatch("[0-9]+", text.strip()) or not int(text):
        raise ConfigError(f"option {name}: it is a number above 0, not {text!r}")
    return int(text)


def _one_of(name: str, values: Mapping[str, str], choices: tuple[str, ...]) -> str:
    text = values.get(name.lower(), choices[0]).strip().lower()
    if text not in choices:
        raise ConfigError(f"option {name}: it is one of {', '.join(filter(None, choices))}, not {text!r}")
    return text


def _pattern(name: str, values: Mapping[str, str]) -> str:
    text = values.get(name.lower(), "")
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(f"option {name}: {text!r} is no regular expression: {error}") from error
    return text


def _tags(values: Mapping[str, str]) -> str:
    try:
        TagFilter.parse(values.get("tags"))
    except ValueError as error:
        raise ConfigError(f"option tags: {error}") from error
    return values.get("tags", "")


def _group(values: Mapping[str, str]) -> str:
    text = values.get("group", "")
    try:
        if text:
            validate_group(text)
    except ValueError as error:
        raise ConfigError(f"option group: {error}") from error
    return text


def _bound(prefix: str, values: Mapping[str, str], edge: str) -> Bound:
    offsets, timestamp = values.get(f"{prefix}offsets"), values.get(f"{prefix}timestamp")
    if offsets is not None and timestamp is not None:
        raise ConfigError(f"give either {prefix}Offsets or {prefix}Timestamp, not both")
    if timestamp is not None:
        return Bound(edge, timestamp=milliseconds(f"{prefix}Timestamp", timestamp))
    if offsets is None:
        return Bound(edge)
    text = offsets.strip()
    if text.lower() in (EARLIEST, LATEST):
        return Bound(text.lower())
    return Bound(edge, offsets=_offsets(f"{prefix}Offsets", text))


def milliseconds(name: str, text: str) -> int:
    """Milliseconds since 1970, or an ISO 8601 time, in UTC unless it says otherwise."""
    if re.fullmatch(r"-?[0-9]+", text.strip()):
        return int(text)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise ConfigError(f"option {name}: it is milliseconds since 1970 or an ISO 8601 time, not {text!r}") from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def _offsets(name: str, text: str) -> Offsets:
    """``{"TOPIC": {"0": 12, "1": -2}}``, or the same below the name of each store; -2 is earliest and -1 latest."""
    example = f'option {name}: it is earliest, latest or JSON like {{"TOPIC": {{"0": 12, "1": -2}}}}'
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{example}, not {text!r:.100}: {error}") from error
    if not isinstance(data, dict) or not all(isinstance(one, dict) for one in data.values()):
        raise ConfigError(f"{example}, not {text!r:.100}")
    nested = any(isinstance(queues, dict) for topics in data.values() for queues in topics.values())
    try:
        if nested:
            return {store: _of_topics(topics) for store, topics in data.items()}
        return {"": _of_topics(data)}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{example}; {error}") from error


def _of_topics(topics: dict[str, dict[str, Any]]) -> dict[str, dict[int, int | str]]:
    found: dict[str, dict[int, int | str]] = {}
    for topic, queues in topics.items():
        for queue, offset in queues.items():
            if not isinstance(offset, int) or isinstance(offset, bool) or offset < -2:
                raise ValueError(f"{offset!r} is no offset")
            found.setdefault(topic, {})[int(queue)] = _EDGES.get(offset, offset)
    return found


_SHOWN: Final = 10
_log = get_log("spark")


@dataclass(frozen=True, slots=True)
class UnreadableRange:
    """Queue offsets ``[first, end)`` of one queue that cannot be read, and why."""

    store: str
    topic: str
    queue_id: int
    first: int
    end: int
    reason: str

    def __str__(self) -> str:
        return f"{self.topic}/{self.queue_id} [{self.first}, {self.end}) of {self.store}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class DataLossError(CommitMQError):
    """Requested messages are missing; ``gaps`` lists them."""

    def __init__(self, gaps: Iterable[UnreadableRange]) -> None:
        self.gaps = list(gaps)
        shown = "; ".join(map(str, self.gaps[:_SHOWN]))
        more = f"; and {len(self.gaps) - _SHOWN} more" if len(self.gaps) > _SHOWN else ""
        super().__init__(f"messages are missing: {shown}{more}. With failOnDataLoss=false they are skipped")

    def __reduce__(self) -> tuple[type[DataLossError], tuple[list[UnreadableRange]]]:
        return (DataLossError, (self.gaps,))


@dataclass(frozen=True, slots=True)
class GapPolicy:
    """``fail``: raise. Otherwise gaps are logged, and written to a file of their own in ``folder`` unless that is empty."""

    fail: bool = True
    folder: str = ""

    def take(self, gaps: Iterable[UnreadableRange]) -> None:
        """Handle the gaps found at one time. Raises DataLossError."""
        found = coalesced(gaps)
        if not found:
            return
        if self.fail:
            raise DataLossError(found)
        for gap in found:
            _log.warning("messages are missing and were skipped", **gap.to_json())
        if self.folder:
            folder = Path(self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            name = f"gaps-{secrets.token_hex(8)}.jsonl"
            text = "".join(json.dumps(gap.to_json()) + "\n" for gap in found)
            # Hidden, so that a program that reads the whole folder finds only complete files.
            atomic_file.replace(folder / name, text.encode(), "gaps", durable=False, mode=0o666, hidden=True)


def coalesced(gaps: Iterable[UnreadableRange]) -> list[UnreadableRange]:
    """``gaps`` by queue and offset, neighbours with one reason merged, empty ones omitted."""
    result: list[UnreadableRange] = []
    for gap in sorted(gaps, key=lambda one: (one.store, one.topic, one.queue_id, one.first)):
        if gap.first >= gap.end:
            continue
        last = result[-1] if result else None
        if (
            last is not None
            and (last.store, last.topic, last.queue_id, last.reason) == (gap.store, gap.topic, gap.queue_id, gap.reason)
            and last.end >= gap.first
        ):
            result[-1] = UnreadableRange(
                last.store, last.topic, last.queue_id, last.first, max(last.end, gap.end), last.reason
            )
        else:
            result.append(gap)
    return result
