"""A runner that does tasks as a cluster might: in any order, some twice, each sent through pickle."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

from commitmq.offline.held_store import Runner


def scattered(seed: int) -> Runner:
    def run(work: Callable[..., Any], view: Any, tasks: Sequence[Any], finished: Callable[[int], None]) -> list[Any]:
        chance = random.Random(seed)
        order = list(range(len(tasks)))
        chance.shuffle(order)
        order += [number for number in order if chance.random() < 0.2]
        results = {}
        for number in order:
            sent = pickle.loads(pickle.dumps((view, tasks[number])))
            results[number] = pickle.loads(pickle.dumps(work(*sent)))
        return [results[number] for number in range(len(tasks))]

    return run
