"""An order service: a failed message comes again, a hopeless one becomes a dead letter, and each order is booked once.
Run `python examples/order_service.py` beside a node; a file orders.db in the current folder keeps the orders.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import threading

from commitmq import Consumer, ConsumeResult, Message, Producer, Reader

TOPIC, GROUP = "example-shop", "example-booking"
ORDERS = [b'{"item": "espresso", "cents": 250}', b'{"item": "croissant", "cents": 190}', b"not an order"]


class Bookings:
    """The orders of the shop, and the ids of the messages that brought them, in one database."""

    def __init__(self, path: str) -> None:
        self.database = sqlite3.connect(path, check_same_thread=False)
        self.lock = threading.Lock()
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS orders (message_id TEXT PRIMARY KEY, item TEXT, cents INTEGER)"
        )

    def book(self, message: Message) -> None:
        """Book an order. A message that comes again has the same unique id, and changes nothing."""
        order = {**json.loads(message.body), "id": message.unique_id}
        with self.lock, self.database:  # one transaction for the order and the id of its message
            self.database.execute("INSERT OR IGNORE INTO orders VALUES (:id, :item, :cents)", order)


def main(path: str = "orders.db") -> None:
    bookings, done = Bookings(path), threading.Semaphore(0)

    def handle(message: Message) -> ConsumeResult:
        try:
            bookings.book(message)
        except json.JSONDecodeError:
            done.release()
            return ConsumeResult.DEAD  # no retry helps
        if message.reconsume_times == 0:
            raise ConnectionError("booked, but the till does not answer")  # the message comes again, after a second
        sys.stdout.write(f"booked {json.loads(message.body)['item']} at the second try\n")  # one write: a whole line
        done.release()
        return ConsumeResult.DONE

    with Producer() as producer:
        producer.send_batch(TOPIC, ORDERS)
    consumer = Consumer(TOPIC, group=GROUP)
    service = threading.Thread(target=consumer.run, args=(handle,), kwargs={"backoff": 1, "on_error": lambda *_: None})
    service.start()
    for _ in ORDERS:
        done.acquire(timeout=30)
    consumer.close()
    service.join()
    print(f"{bookings.database.execute('SELECT count(*), sum(cents) FROM orders').fetchone()} orders and cents")
    with Reader(f"%DLQ%{GROUP}") as dead:
        print("dead letters:", [one.body.decode() for one in dead.poll(timeout_s=10)])


if __name__ == "__main__":
    main(*sys.argv[1:2])
