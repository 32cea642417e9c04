"""Requests about users and policies (remoting 1.11): those of mqadmin's createUser to copyAcl, 3001 to 3010.

Only super users get here (:mod:`.rights`). A node without users refuses them: the first user is made on the node's machine.
Unlike RocketMQ no answer has a user's secret. A change is on the device when its answer goes out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from commitmq.errors import StoreError
from commitmq.plugin import Actor
from commitmq.security.access_file import AccessFile
from commitmq.security.access_table import AccessTable
from commitmq.security.policy import Entry, Policies
from commitmq.security.resource import ResourcePattern
from commitmq.security.user import Secret, User, check_name
from commitmq_plugins.rocketmq.broker.auditing import actor_of
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.fastjson import as_list, as_object, as_text, dumps, load_object, without_none
from commitmq_plugins.rocketmq.remoting.headers.security import (
    AclRequestHeader,
    ListAclsRequestHeader,
    ListUsersRequestHeader,
    UserRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

_SUBJECT: Final = "User:"
_CUSTOM: Final = "Custom"
_DEFAULT: Final = "Default"


class _Refusal(Exception):
    """What is asked for is not possible; the text is the answer's remark."""


class AdminUsers:
    """See the module."""

    def __init__(self, file: AccessFile) -> None:
        self._file = file
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.AUTH_CREATE_USER: self._told(self.create_user),
            RequestCode.AUTH_UPDATE_USER: self._told(self.update_user),
            RequestCode.AUTH_DELETE_USER: self._told(self.delete_user),
            RequestCode.AUTH_GET_USER: self._told(self.get_user),
            RequestCode.AUTH_LIST_USER: self._told(self.list_users),
            RequestCode.AUTH_CREATE_ACL: self._told(self.put_acl),
            RequestCode.AUTH_UPDATE_ACL: self._told(self.put_acl),
            RequestCode.AUTH_DELETE_ACL: self._told(self.delete_acl),
            RequestCode.AUTH_GET_ACL: self._told(self.get_acl),
            RequestCode.AUTH_LIST_ACL: self._told(self.list_acls),
        }

    @staticmethod
    def _told(handle: Callable[[Command, Actor], bytes]) -> Handler:
        """``handle`` in a thread, because it waits for the device; it gets who asks, and returns the answer's body."""

        async def answer(connection: Connection, command: Command) -> Command:
            command.body = bytes(command.body)
            try:
                return command.answer(body=await asyncio.to_thread(handle, command, actor_of(connection, command)))
            except _Refusal as error:
                return command.answer(ResponseCode.NO_PERMISSION, str(error))
            except ValueError as error:
                return command.answer(ResponseCode.INVALID_PARAMETER, str(error))
            except StoreError as error:
                return command.answer(ResponseCode.SYSTEM_ERROR, str(error))

        def start(connection: Connection, command: Command) -> Awaitable[Command]:
            return answer(connection, command)

        return start

    def _load(self) -> AccessTable:
        table = self._file.load()
        if table.is_open:
            raise _Refusal("the node has no users; make the first with `commitmq user add NAME --super`")
        return table

    def _change(self, apply: Callable[[AccessTable], None], by: Actor) -> bytes:
        def checked(table: AccessTable) -> None:
            if table.is_open:
                self._load()
            apply(table)

        self._file.change(checked, by)
        return b""

    # ------------------------------------------------------------ users

    def create_user(self, command: Command, by: Actor) -> bytes:
        """Request 3001."""
        name = _user_name(command)
        members = load_object(command.body)
        if not members.get("password"):
            raise ValueError("password can not be blank")
        user = _changed(User(name, Secret(as_text(members["password"], "password"))), members)

        def apply(table: AccessTable) -> None:
            if name in table.users:
                raise _Refusal("The user is existed")
            table.users[name] = user

        return self._change(apply, by)

    def update_user(self, command: Command, by: Actor) -> bytes:
        """Request 3002. Members that are missing stay as they are."""
        name = _user_name(command)
        members = load_object(command.body)

        def apply(table: AccessTable) -> None:
            if name not in table.users:
                raise _Refusal("The user is not exist")
            table.users[name] = _changed(table.users[name], members)

        return self._change(apply, by)

    def delete_user(self, command: Command, by: Actor) -> bytes:
        """Request 3003."""
        name = _user_name(command)

        def apply(table: AccessTable) -> None:
            if set(table.users) == {name}:
                raise _Refusal(f"{name} is the last user, and without users everybody is let in; disable it instead")
            table.users.pop(name, None)
            table.policies.pop(name, None)

        return self._change(apply, by)

    def get_user(self, command: Command, _by: Actor) -> bytes:
        """Request 3004: no body for one that does not exist."""
        user = self._load().users.get(_user_name(command))
        return b"" if user is None else dumps(_user_info(user))

    def list_users(self, command: Command, _by: Actor) -> bytes:
        """Request 3005: those whose name has the filter in it."""
        wanted = ListUsersRequestHeader.decode(command.ext_fields).filter or ""
        found = [_user_info(one) for name, one in self._load().users.items() if wanted in name]
        return dumps(found) if found else b""

    # ------------------------------------------------------------ policies

    def put_acl(self, command: Command, by: Actor) -> bytes:
        """Requests 3006 and 3007: each entry replaces the one for the same resources, as with RocketMQ."""
        name = _subject(command)
        policies = as_list(load_object(command.body).get("policies"), "policies")
        if not policies:
            raise _Refusal("The policies is empty.")
        custom: list[Entry] = []
        default: list[Entry] = []
        for policy in policies:
            members = as_object(policy, "a policy")
            entries = [_entry(as_object(one, "an entry")) for one in as_list(members.get("entries"), "entries")]
            if not entries:
                raise _Refusal("The policy entries is empty.")
            (default if members.get("policyType") == _DEFAULT else custom).extend(entries)

        def apply(table: AccessTable) -> None:
            if name not in table.users:
                raise _Refusal(f"The subject of {_SUBJECT}{name} is not exist.")
            known = table.policies.get(name, Policies())
            table.policies[name] = Policies(_merged(known.custom, custom), _merged(known.default, default))

        return self._change(apply, by)

    def delete_acl(self, command: Command, by: Actor) -> bytes:
        """Request 3008: one resource's entry of one kind, or all entries of a user."""
        name, header = _subject(command), AclRequestHeader.decode(command.ext_fields)
        pattern = ResourcePattern.parse(header.resource) if header.resource else None
        is_default = header.policy_type == _DEFAULT

        def apply(table: AccessTable) -> None:
            if name not in table.users:
                raise _Refusal("The subject is not exist.")
            known = table.policies.get(name)
            if known is None:
                raise _Refusal("The acl is not exist.")
            if pattern is None:
                left = Policies()
            elif is_default:
                left = replace(known, default=tuple(one for one in known.default if one.pattern != pattern))
            else:
                left = replace(known, custom=tuple(one for one in known.custom if one.pattern != pattern))
            if left.custom or left.default:
                table.policies[name] = left
            else:
                del table.policies[name]

        return self._change(apply, by)

    def get_acl(self, command: Command, _by: Actor) -> bytes:
        """Request 3009: no body for a user without policies."""
        name, table = _subject(command), self._load()
        if name not in table.users:
            raise _Refusal("The subject is not exist.")
        known = table.policies.get(name)
        return b"" if known is None else dumps(_acl_info(name, known))

    def list_acls(self, command: Command, _by: Actor) -> bytes:
        """Request 3010: of subjects with the filter in their name, entries whose resource has the other filter in it."""
        header = ListAclsRequestHeader.decode(command.ext_fields)
        subject, resource = header.subject_filter or "", header.resource_filter or ""
        found = []
        for name, known in self._load().policies.items():
            left = Policies(
                tuple(one for one in known.custom if resource in str(one.pattern)),
                tuple(one for one in known.default if resource in str(one.pattern)),
            )
            if subject in _SUBJECT + name and (left.custom or left.default):
                found.append(_acl_info(name, left))
        return dumps(found) if found else b""


def _user_name(command: Command) -> str:
    name = UserRequestHeader.decode(command.ext_fields).username
    if not name or not name.strip():
        raise ValueError("The username is blank")
    return check_name(name)


def _subject(command: Command) -> str:
    subject = AclRequestHeader.decode(command.ext_fields).subject or ""
    if not subject.startswith(_SUBJECT):
        raise _Refusal("The subject type is null.")
    return check_name(subject.removeprefix(_SUBJECT))


def _changed(user: User, members: dict[str, Any]) -> User:
    """The user with the members of a UserInfo that are there. Raises ValueError."""
    kind, status, password = members.get("userType"), members.get("userStatus"), members.get("password")
    if kind not in (None, "Super", "Normal"):
        raise ValueError(f"the user's type is Super or Normal, not {kind!r:.100}")
    if status not in (None, "enable", "disable"):
        raise ValueError(f"the user's status is enable or disable, not {status!r:.100}")
    return replace(
        user,
        secret=Secret(as_text(password, "password")) if password else user.secret,
        is_super=user.is_super if kind is None else kind == "Super",
        is_enabled=user.is_enabled if status is None else status == "enable",
    )


def _user_info(user: User) -> dict[str, str]:
    shown = user.shown()
    return {"userStatus": shown["status"], "userType": shown["type"], "username": user.name}


def _entry(members: dict[str, Any]) -> Entry:
    try:
        return Entry.from_json(
            {
                "resource": members.get("resource") or "",
                "actions": as_list(members.get("actions"), "actions"),
                "from": as_list(members.get("sourceIps"), "sourceIps"),
                "decision": members.get("decision"),
            }
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the entry is not in RocketMQ's shape: {error}") from None


def _merged(known: tuple[Entry, ...], changes: list[Entry]) -> tuple[Entry, ...]:
    found = {one.pattern: one for one in known}
    found.update({one.pattern: one for one in changes})
    return tuple(found.values())


def _acl_info(name: str, policies: Policies) -> dict[str, Any]:
    kinds = ((_CUSTOM, policies.custom), (_DEFAULT, policies.default))
    return {
        "policies": [
            {"entries": [_entry_info(one) for one in entries], "policyType": kind} for kind, entries in kinds if entries
        ],
        "subject": _SUBJECT + name,
    }


def _entry_info(entry: Entry) -> dict[str, Any]:
    members = entry.to_json()
    return without_none(
        {
            "actions": members["actions"],
            "decision": members["decision"],
            "resource": members["resource"],
            "sourceIps": members.get("from"),
        }
    )
