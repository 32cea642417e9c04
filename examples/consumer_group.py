"""Two consumers of one group share four queues, commit by themselves, and hear which queues they get and give back.
Run `python examples/consumer_group.py` beside a node; COMMITMQ_NODE is its address where that is not the default.
"""

from __future__ import annotations

from commitmq import Admin, Consumer, Producer

TOPIC = "example-tasks"
GROUP = "example-workers"
MESSAGES = 40


class Worker:
    """A member of the group. It commits a batch when the batch is done, and before it gives a queue back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = 0
        self.consumer = Consumer(
            TOPIC, group=GROUP, auto_commit=False, max_pull_bytes=4096, on_assign=self.assigned, on_revoke=self.revoked
        )

    def assigned(self, queues: list[tuple[str, int]]) -> None:
        print(f"{self.name} gets the queues {[queue for _, queue in queues]}")

    def revoked(self, queues: list[tuple[str, int]]) -> None:
        self.consumer.commit()
        print(f"{self.name} gives back the queues {[queue for _, queue in queues]}")

    def work(self) -> None:
        """Do at most five tasks, then commit them."""
        batch = self.consumer.poll(timeout_s=0.2, max_messages=5)
        self.done += len(batch)  # the work itself would be here
        if batch:
            self.consumer.commit()


def main() -> None:
    with Admin() as admin, Producer() as producer:
        admin.topic_create(TOPIC, 4)
        for number in range(MESSAGES):
            producer.send_async(TOPIC, b"task %d" % number, queue=number % 4)
        producer.flush()
        first = Worker("first")
        first.work()
        second = Worker("second")
        while first.done + second.done < MESSAGES or len(second.consumer.assignment) < 2:
            first.work()
            second.work()
        print(f"{first.done + second.done} tasks done, {sum(row.lag for row in admin.group_lag(GROUP))} left")
        second.consumer.close()
        first.consumer.close()


if __name__ == "__main__":
    main()
