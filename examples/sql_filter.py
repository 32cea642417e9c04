"""The node filters messages by an SQL92 expression on their properties, and a consumer gets only those that match.
Run `python examples/sql_filter.py` beside a node; COMMITMQ_NODE is its address where that is not the default.
"""

from __future__ import annotations

from commitmq import Consumer, Producer, ProtocolError, Reader, Sql

TOPIC = "example-offers"
OFFERS = (("a scooter", 1250, "eu"), ("a bell", 8, "eu"), ("a truck", 48_000, "asia"), ("a bicycle", 600, "us"))
WANTED = Sql("price BETWEEN 100 AND 5000 AND region IN ('eu', 'us')")


def main() -> None:
    with Producer() as producer:
        for name, price, region in OFFERS:
            producer.send(TOPIC, name.encode(), properties={"price": str(price), "region": region}, queue=0)

    found = 0
    with Consumer(TOPIC, group="example-shoppers", filter=WANTED) as consumer:
        while found < 2:
            for message in consumer.poll(timeout_s=5):
                print(f"{message.body.decode()} for {message.properties['price']} in {message.properties['region']}")
                found += 1

    # The node checks the expression, so a mistake in it is an error of the first poll.
    with Reader(TOPIC, filter=Sql("price >")) as consumer:
        try:
            consumer.poll(timeout_s=5)
        except ProtocolError as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    main()
