"""A memory topic carries the changes of a cache: a program that comes later reads them all, and then follows.
Run `python examples/memory_cache.py` beside a node; COMMITMQ_NODE is its address where that is not the default.
"""

from __future__ import annotations

from commitmq import Admin, Producer, Reader, Tombstone

TOPIC = "example-prices"


class Cache(dict[str, str]):
    """The newest value of each key."""

    def follow(self, reader: Reader, key: str, value: str | None) -> None:
        """Read changes until ``key`` has ``value``; a Tombstone takes its key out."""
        while self.get(key) != value:
            for message in reader.poll(timeout_s=5):
                if message.is_tombstone:
                    self.pop(message.keys[0], None)
                else:
                    self[message.keys[0]] = message.body.decode()


def main() -> None:
    with Admin() as admin, Producer(ack="memory") as producer:
        # Nothing of this topic is ever on the disk. It ends with the node, and its oldest messages go when memory is full.
        admin.topic_create(TOPIC, 1, attributes={"storage.type": "memory"})
        for key, price in (("tea", "2.10"), ("coffee", "3.20"), ("tea", "2.30")):
            producer.send(TOPIC, price.encode(), key=key)

        cache = Cache()
        with Reader(TOPIC) as reader:
            cache.follow(reader, "tea", "2.30")
            print("at first:", dict(sorted(cache.items())))
            producer.send(TOPIC, b"3.50", key="coffee")
            cache.follow(reader, "coffee", "3.50")
            producer.send(TOPIC, Tombstone("tea"))
            cache.follow(reader, "tea", None)
            print("then:", dict(sorted(cache.items())))
        print("kept in:", admin.topic(TOPIC).attributes["storage.type"])


if __name__ == "__main__":
    main()
