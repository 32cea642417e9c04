"""Goal: everything that a client can do, its asyncio twin can, with the same arguments; a program's types are the same.

Method: the signatures and the TypedDicts of both, compared; and a twin that lacks something, which must be seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest

import commitmq
from commitmq.client import connection, consumer, producer
from commitmq.client.receiving import base_consumer, settings
from commitmq.client.sending import options
from commitmq.client.sharing import share_engine as sharing

TWINS = [
    (commitmq.Producer, commitmq.AsyncProducer),
    (commitmq.Consumer, commitmq.AsyncConsumer),
    (commitmq.Reader, commitmq.AsyncReader),
    (commitmq.ShareConsumer, commitmq.AsyncShareConsumer),
    (commitmq.Admin, commitmq.AsyncAdmin),
    (connection.Connection, connection.AsyncConnection),
]
NAMES = {
    name: value
    for module in (commitmq, producer, consumer, connection, options, base_consumer, settings, sharing)
    for name, value in vars(module).items()
    if isinstance(value, type)
}


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


def arguments(function: Any) -> dict[str, str]:
    """Names and kinds of parameters; an ``Unpack[TypedDict]`` is what the dictionary may hold."""
    found: dict[str, str] = {}
    for one in inspect.signature(function).parameters.values():
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            assert str(one.annotation).startswith("Unpack["), f"{function} is not typed"
            kind = NAMES[one.annotation.removeprefix("Unpack[").removesuffix("]")]
            found.update(dict.fromkeys(get_type_hints(kind), "KEYWORD_ONLY"))
        elif one.name != "self":
            found[one.name] = one.kind.name
    return found


def differences(kind: type, twin: type) -> list[str]:
    """What a program would miss in ``twin``."""
    ours, theirs = public(kind), public(twin)
    problems = [f"{twin.__name__} has no {name}" for name in ours if name not in theirs]
    for name, value in [*ours.items(), ("__init__", kind.__init__)]:  # type: ignore[misc]
        other = twin.__init__ if name == "__init__" else theirs.get(name)  # type: ignore[misc]
        if other is None or not inspect.isfunction(value):
            continue
        if not inspect.isfunction(other):
            problems.append(f"{twin.__name__}.{name} is no method")
        elif arguments(value) != arguments(other):
            problems.append(f"{twin.__name__}.{name}: {arguments(value)} and {arguments(other)}")
    return problems


@pytest.mark.parametrize(("kind", "twin"), TWINS, ids=lambda one: one.__name__)
def test_a_twin_has_everything(kind: type, twin: type) -> None:
    if kind is not connection.Connection:  # (made by connect and connect_async)
        assert differences(kind, twin) == []
    else:
        assert [one for one in differences(kind, twin) if "__init__" not in one] == []
    assert len(public(kind)) > 4


def test_what_a_twin_lacks_is_seen() -> None:
    class Lacking(commitmq.AsyncReader):
        seek = property()

        async def poll(self, timeout_s: float = 1.0) -> Any:  # type: ignore[override]
            """Without max_messages."""

    class Without:
        """A twin of nothing."""

    found = differences(commitmq.Reader, Lacking)
    assert len(found) == 2
    assert any("Lacking.poll" in one for one in found)
    assert "Lacking.seek is no method" in found
    assert "Without has no poll" in differences(commitmq.Reader, Without)


def types_of(function: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """The types of the parameters that only have a name."""
    hints = get_type_hints(function, {**vars(inspect.getmodule(function)), **names})
    keywords = {
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return {name: hints[name] for name in keywords}


@pytest.mark.parametrize(
    ("function", "dictionary", "besides"),
    [
        (producer.Producer.__init__, options.ProducerOptions, set()),
        (producer.Producer.send, options.MessageOptions, {"multi_dispatch"}),
        (producer.Producer.send_async, options.MessageOptions, {"on_delivery"}),
        (producer.Producer._batch_fields, options.BatchOptions, set()),
        (
            settings.ConsumerSettings.__init__,
            settings.GroupOptions,
            {"group", "queues"},
        ),
    ],
    ids=lambda one: getattr(one, "__qualname__", None),
)
def test_a_dictionary_of_options_is_the_signature(function: Any, dictionary: type, besides: set[str]) -> None:
    from commitmq.client.message import Message
    from commitmq.client.properties import Keys
    from commitmq.client.selector import MessageSelector

    names = {**NAMES, "Keys": Keys, "Message": Message, "MessageSelector": MessageSelector}
    names.update({name: getattr(options, name) for name in ("OnDelivery", "ExactlyOnce")})
    types = types_of(function, names)
    assert types.keys() >= besides
    wanted = {name: kind for name, kind in types.items() if name not in besides}
    assert get_type_hints(dictionary, {**vars(inspect.getmodule(dictionary)), **names}) == wanted
