"""The connections of one consumer to the node's reader processes, and the mapped segments that belong to them."""

from __future__ import annotations

from typing import Any, NamedTuple

from commitmq.client.receiving.segments import SegmentMaps
from commitmq.errors import ProtocolError
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory, Metadata


class Link(NamedTuple):
    """The connection to one reader. With ``ranges`` messages are read from ``segments``, the files of this reader's node."""

    channel: Channel
    segments: SegmentMaps
    ranges: bool


class ReaderLinks:
    """``links`` has a :class:`Link` for each connected reader, by the reader's index."""

    def __init__(self, directory: Directory, mode: str) -> None:
        self.links: dict[int, Link] = {}
        self.segments: dict[tuple[Any, ...], SegmentMaps] = {}  # one entry at most: the store of the connected node
        self._directory = directory
        self._mode = mode

    def connect(self, index: int, deadline: float, patience_s: float) -> Link:
        """Connect to reader ``index``. ``patience_s`` bounds the question what the node is."""
        channel, _ = self._directory.connect("reader", deadline, index=index)
        try:
            metadata = self._directory.metadata(timeout_s=patience_s)
            if self._mode == "ranges" and not metadata.same_host:
                raise ProtocolError(
                    "INVALID_PARAMETER",
                    "mode ranges needs the node on the same host, with a store folder that can be read",
                )
            # Asked again: the directory may still know the node that had this address before.
            ranges = self._mode == "ranges" or (self._mode == "auto" and metadata.is_same_host_still())
            link = self.links[index] = Link(channel, self._maps_of(metadata), ranges)
        except BaseException:
            if index not in self.links:
                channel.close()
            raise
        return link

    def _maps_of(self, metadata: Metadata) -> SegmentMaps:
        """The segments of this store in this epoch of its node.

        Another store may be served under the same address later. Its log has other messages at the same offsets, so it never
        shares mappings with this one.
        """
        identity = (metadata.store, metadata.store_id, metadata.epoch, metadata.segment_bytes)
        found = self.segments.get(identity)
        if found is None:
            found = SegmentMaps(metadata.store, metadata.segment_bytes)
            self.segments = {identity: found}
        return found

    def drop(self, index: int) -> None:
        """Close the connection to reader ``index``, if there is one."""
        link = self.links.pop(index, None)
        if link is not None:
            link.channel.close()

    def drop_deleted_segments(self) -> None:
        """Forget the mappings of deleted segments."""
        for segments in self.segments.values():
            segments.drop_deleted()

    def close_segments(self) -> None:
        """Forget all mappings."""
        for segments in self.segments.values():
            segments.close()
