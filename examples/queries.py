"""The index of the node finds messages by key and tag, and its ConsumeQueues find them by the time they were stored.
Run `python examples/queries.py` beside a node; COMMITMQ_NODE is its address where that is not the default.
"""

from __future__ import annotations

from commitmq import Admin, Producer

TOPIC = "example-invoices"


def main() -> None:
    with Producer() as producer:
        first = producer.send(TOPIC, b"12 euros", keys=["invoice-1", "customer-7"], tags="open")
        producer.send(TOPIC, b"30 euros", keys=["invoice-2", "customer-8"], tags="open")
        last = producer.send(TOPIC, b"12 euros received", keys=["invoice-1", "customer-7"], tags="paid")

    begin, end = first.store_timestamp, last.store_timestamp
    with Admin() as admin:
        by_key = admin.query(TOPIC, key="customer-7", begin=begin, end=end)
        print("customer-7:", [message.body.decode() for message in by_key], "complete" if by_key.complete else "")
        by_tag = admin.query(TOPIC, tag="open", begin=begin, end=end)
        print("open:", [message.body.decode() for message in by_tag])

        # By time alone, in pages: the next page begins at `next`.
        page = admin.query(TOPIC, max_messages=2, begin=begin, end=end)
        found = list(page)
        while page.next is not None:
            page = admin.query(TOPIC, max_messages=2, continue_from=page.next, begin=begin, end=end)
            found += page
        print("in this time:", len(found))
        print("by message id:", admin.message(last.msg_id).body.decode())


if __name__ == "__main__":
    main()
