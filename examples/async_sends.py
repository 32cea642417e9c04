"""A producer sends 1,000 messages without waiting for each, and a callback counts the acknowledgements.
Run `python examples/async_sends.py` beside a node; COMMITMQ_NODE is its address where that is not the default.
"""

from __future__ import annotations

from concurrent.futures import Future

from commitmq import Producer, SendResult

TOPIC = "example-measurements"
MESSAGES = 1_000

acknowledged = 0
failed: list[BaseException] = []


def done(future: Future[SendResult]) -> None:
    """Callbacks run in the producer's own thread, one after the other: they must not wait for a send."""
    global acknowledged
    error = future.exception()
    if error is None:
        acknowledged += 1
    else:
        failed.append(error)  # a SendError; its `outcome` says whether the message is stored


def main() -> None:
    with Producer() as producer:
        for number in range(MESSAGES):
            # The call blocks only while `max_pending` messages wait for their acknowledgement.
            producer.send_async(TOPIC, b"%d" % number).add_done_callback(done)
        producer.flush()
    print(f"{acknowledged} messages acknowledged, {len(failed)} failed")


if __name__ == "__main__":
    main()
