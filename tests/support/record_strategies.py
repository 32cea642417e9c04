"""Hypothesis strategies of what the store's formats can hold."""

from __future__ import annotations

import ipaddress

from hypothesis import strategies as st

from commitmq.format.constants import Host, SysFlag
from commitmq.format.record import Record

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)

# Any text without lone surrogates (no UTF-8 form) and without the two separators.
property_text = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=20
)
properties = st.dictionaries(property_text.filter(lambda name: name != "__CRC32#"), property_text, max_size=8)

ipv4 = st.builds(Host, st.integers(0, 2**32 - 1).map(lambda n: str(ipaddress.IPv4Address(n))), INT32)
# From integers and back through inet_ntop's own spelling, so that equal addresses are equal texts.
ipv6 = st.builds(Host, st.binary(min_size=16, max_size=16).map(lambda data: _text6(data)), INT32)
hosts = ipv4 | ipv6

topics = st.text(st.sampled_from("%|abcXYZ019_-"), min_size=1, max_size=127) | st.text(
    st.sampled_from("%|abcXYZ019_-"), min_size=128, max_size=255
)

records = st.builds(
    Record,
    topic=topics,
    queue_id=INT32,
    queue_offset=INT64,
    physical_offset=INT64,
    sys_flag=INT32.map(lambda flag: flag & ~(SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6)),
    flag=INT32,
    born_timestamp=INT64,
    store_timestamp=INT64,
    reconsume_times=INT32,
    prepared_transaction_offset=INT64,
    properties=properties,
    body=st.binary(max_size=300),
    born_host=hosts,
    store_host=hosts,
)


def _text6(data: bytes) -> str:
    import socket

    return socket.inet_ntop(socket.AF_INET6, data)
