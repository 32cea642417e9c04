"""What a change was, in one line of text: the members that differ, ``before -> after``, and policies as entries."""

from __future__ import annotations

from typing import Any, Final

_MOST_OF_VALUE: Final = 80
_MOST_OF_CHANGE: Final = 300
_NOTHING: Final = "-"


def change_text(before: Any, after: Any) -> str:
    """The members of ``after`` that differ from ``before``, or the whole ``before`` of what goes; shortened."""
    if after is None:
        return "" if before is None else _cut(f"{value_text(before)} -> {_NOTHING}", _MOST_OF_CHANGE)
    if not isinstance(after, dict) or not isinstance(before, dict | None):
        return _cut(f"{value_text(before)} -> {value_text(after)}", _MOST_OF_CHANGE)
    parts = []
    for name, value in after.items():
        former = None if before is None else before.get(name)
        if value == former:
            continue
        if before is not None and name == "offsets":
            parts += _moves(former, value)
        elif before is None or name not in before:
            parts.append(f"{name} {_short(value)}")
        else:
            parts.append(f"{name} {_short(former)} -> {_short(value)}")
    parts += [f"{name} {_short(former)} -> {_NOTHING}" for name, former in _gone(before, after)]
    return _cut(", ".join(parts), _MOST_OF_CHANGE)


def value_text(value: Any) -> str:
    """A value of JSON as an operator reads it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_entry(one) for one in value):
        return "; ".join(_entry_text(one) for one in value)
    if isinstance(value, dict):
        return " ".join(f"{name}={value_text(one)}" for name, one in value.items()) or _NOTHING
    if isinstance(value, list):
        return ",".join(value_text(one) for one in value) or _NOTHING
    return _NOTHING if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def entry_lines(policies: dict[str, Any]) -> list[str]:
    """The entries of policies, as :meth:`commitmq.security.policy.Policies.to_json` has them: one text each."""
    return [
        f"{_entry_text(one)}{' (Default)' if kind == 'default' else ''}"
        for kind in ("custom", "default")
        for one in policies.get(kind, ())
    ]


def _gone(before: Any, after: dict[str, Any]) -> list[tuple[str, Any]]:
    """Policies that are empty now. Other changes name what they change, and the rest stays."""
    if not isinstance(before, dict):
        return []
    return [(name, before[name]) for name in ("custom", "default") if before.get(name) and name not in after]


def _moves(former: Any, value: Any) -> list[str]:
    """Offsets as ``topic/queue before -> after``; -1 is none."""
    try:
        had = {(topic, queue): offset for topic, queue, offset in former or ()}
        return [
            f"{topic}/{queue} {_NOTHING if had.get((topic, queue), -1) < 0 else had[topic, queue]} -> {offset}"
            for topic, queue, offset in value
        ]
    except (TypeError, ValueError):
        return [f"offsets {_short(value)}"]


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and {"resource", "actions", "decision"} <= value.keys()


def _entry_text(one: dict[str, Any]) -> str:
    networks = f" from {','.join(one['from'])}" if one.get("from") else ""
    return f"{one['resource']} {one['decision']} {','.join(one['actions'])}{networks}"


def _short(value: Any) -> str:
    return _cut(value_text(value), _MOST_OF_VALUE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
