"""A plugin with three worker processes: one that serves numbers over ZeroMQ, one that idles, and one that dies at once."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

from commitmq import Producer
from commitmq.control import Word
from commitmq.plugin import ConfigSection, NodeConfig, WorkerContext, WorkerSpec, failpoints, hookimpl, setting


@dataclass(frozen=True)
class Settings:
    step: int = setting(1, 1, 100)
    greeting: str = setting("hello", choices=("hello", "bye"))

    def check(self) -> None:
        if self.greeting == "bye" and self.step == 100:
            raise ValueError("greeting=bye and step=100 do not go together")


@hookimpl
def commitmq_config() -> ConfigSection:
    return ConfigSection("serving", Settings)


@hookimpl
def commitmq_workers(config: NodeConfig) -> list[WorkerSpec]:
    return [
        WorkerSpec("serving", "worker_plugin:serve", is_server=True),
        WorkerSpec("idling", "worker_plugin:idle"),
        WorkerSpec("dying", "worker_plugin:die"),
    ]


def serve(context: WorkerContext) -> None:
    settings = context.params["settings"]
    router, endpoints = context.bind_router("worker-serving")
    context.register(router)
    context.ready(endpoints=endpoints)
    while not context.stopping:
        if router not in context.wait(100):
            continue
        while int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            client, text = router.recv_multipart()
            if text == b"send":
                with Producer(context.address) as producer:
                    producer.send("from-the-worker", b"one")
            answer = f"{settings.greeting} {text.decode()} {settings.step} {context.control.get(Word.WRITTEN)}"
            router.send_multipart([client, answer.encode()])
    (context.layout.own / "serving-stopped").write_text(str(context.control.get(Word.WRITTEN)))


def idle(context: WorkerContext) -> None:
    failpoints.hit("idling.begins")
    context.ready()
    while not context.stopping:
        context.wait(100)


def die(context: WorkerContext) -> None:
    raise RuntimeError("no life in it")
