"""RocketMQ's ACL 1.0, ``plain_acl.yml``, as users and entries of ACL 2.0.

The mapping is that of RocketMQ's own migration (``AuthMigrator``): accessKey and secretKey are name and secret, admin is
Super; topicPerms and groupPerms are custom entries, defaultTopicPerm and defaultGroupPerm default entries of ``Topic:*`` and
``Group:*``. It differs where that would let a user do more than ACL 1.0 did:

* An unknown permission is refused. ACL 1.0 takes it as DENY, the migration as everything.
* A permission that is narrower than the default of its kind is refused: ACL 1.0 lets it stand instead of the default, whereas
  ACL 2.0 asks the default about what a custom entry does not name. A Deny beside it would refuse the topic's route too.
* An admin with topicPerms or groupPerms is refused: ACL 1.0 bounds it by them, and a super user has no bounds.

White addresses are left out, as there: whoever came from them needed no signature, and that has no equivalent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from commitmq.security.imported_access import ImportedAccess
from commitmq.security.plain_yaml import Node, Value, read_yaml
from commitmq.security.policy import Action, Entry, Policies
from commitmq.security.resource import ResourcePattern, ResourceType
from commitmq.security.user import Secret, User, check_name

_PERMS: Final = {
    "PUB": frozenset((Action.PUB,)),
    "SUB": frozenset((Action.SUB,)),
    "PUB|SUB": frozenset((Action.PUB, Action.SUB)),
    "SUB|PUB": frozenset((Action.PUB, Action.SUB)),
    "DENY": frozenset[Action](),
}
_TOP: Final = ("accounts", "globalWhiteRemoteAddresses", "dataVersion")
_ACCOUNT: Final = ("accessKey", "secretKey", "whiteRemoteAddress", "admin", "defaultTopicPerm", "defaultGroupPerm",
                   "topicPerms", "groupPerms")  # fmt: skip
_KINDS: Final = (
    (ResourceType.TOPIC, "topicPerms", "defaultTopicPerm"),
    (ResourceType.GROUP, "groupPerms", "defaultGroupPerm"),
)


def read_plain_acl(text: str) -> ImportedAccess:
    """The users of a ``plain_acl.yml``. Raises ValueError that names the line; it shows no secret."""
    top, found = _members(read_yaml(text), _TOP, "the file"), ImportedAccess()
    if addresses := _texts(top, "globalWhiteRemoteAddresses"):
        found.skipped.append(
            f"globalWhiteRemoteAddresses ({len(addresses)}): clients there needed no signature; here they must sign"
        )
    accounts = top.get("accounts")
    if accounts is None:
        raise ValueError("the file has no accounts; it is no plain_acl.yml, and no output of mqadmin")
    for account in _list(accounts, "accounts"):
        _add_account(found, account)
    return found


def _add_account(found: ImportedAccess, account: Node) -> None:
    members = _members(account, _ACCOUNT, "an account")
    name = _text(members, "accessKey", account.line)
    try:
        user = User(check_name(name), Secret(_text(members, "secretKey", account.line)), _is_admin(members))
    except ValueError as error:
        raise ValueError(f"line {account.line}: the account {name!r:.200}: {error}") from None
    if name in found.users:
        raise ValueError(f"line {account.line}: the account {name} is there twice; leave one out")
    if _optional(members, "whiteRemoteAddress"):
        found.skipped.append(
            f"whiteRemoteAddress of {name}: from there it needed no signature and had no bounds; here it must sign"
        )
    custom: list[Entry] = []
    default: list[Entry] = []
    for kind, perms_key, default_key in _KINDS:
        usual = _optional(members, default_key)
        allowed = _perm(usual, members[default_key].line) if usual is not None else None
        if allowed is not None:
            default.append(_entry(ResourcePattern(kind, "", True), allowed))
        custom.extend(_custom(found, name, kind, _texts(members, perms_key), allowed or frozenset()))
    if user.is_super and custom:
        found.refused.append(
            f"account {name} is an admin with topicPerms or groupPerms, which bound it in ACL 1.0; a super user has no bounds:"
            " take them away, or admin"
        )
    found.add_user(user)
    found.add_policies(name, Policies(tuple(custom), tuple(default)))


def _custom(
    found: ImportedAccess, name: str, kind: ResourceType, perms: list[Node], usual: frozenset[Action]
) -> Iterator[Entry]:
    """The entries of topicPerms or groupPerms; ``usual`` is what the default of their kind allows."""
    known = set()
    for one in perms:
        resource, equals, perm = str(one.value).partition("=")
        resource = resource.strip()
        if not equals or not resource or "*" in resource:
            raise ValueError(f"line {one.line}: a permission is NAME=PUB|SUB, with the name of one {kind.lower()}")
        try:
            pattern = ResourcePattern.parse(f"{kind}:{resource}")
        except ValueError as error:
            raise ValueError(f"line {one.line}: {error}") from None
        if pattern in known:
            raise ValueError(f"line {one.line}: account {name} has {pattern} twice; leave one out")
        known.add(pattern)
        allowed = _perm(perm, one.line)
        if allowed and usual - allowed:
            more = "|".join(sorted(usual - allowed))
            found.refused.append(
                f"line {one.line}: account {name} may do less with {pattern} than by its default, and by the rules of ACL 2.0"
                f" the default would let it {more} too; make the default narrower and name what it may"
            )
        yield _entry(pattern, allowed)


def _entry(pattern: ResourcePattern, allowed: frozenset[Action]) -> Entry:
    return Entry(pattern, allowed or frozenset((Action.ALL,)), (), bool(allowed))


def _perm(text: str, line: int) -> frozenset[Action]:
    found = _PERMS.get(text.strip())
    if found is None:
        raise ValueError(f"line {line}: a permission is one of {', '.join(_PERMS)}, not {text.strip()!r:.100}")
    return found


def _is_admin(members: dict[str, Node]) -> bool:
    text = (_optional(members, "admin") or "false").lower()
    if text not in ("true", "false"):
        raise ValueError("admin is true or false")
    return text == "true"


def _members(node: Node, known: tuple[str, ...], what: str) -> dict[str, Node]:
    if not isinstance(node.value, dict):
        raise ValueError(f"line {node.line}: {what} must have keys: {', '.join(known)}")
    for key, one in node.value.items():
        if key not in known:
            raise ValueError(f"line {one.line}: {what} has no key {key!r:.100}; there are {', '.join(known)}")
    return node.value


def _list(node: Node, key: str) -> list[Node]:
    value: Value = node.value
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"line {node.line}: {key} must be a list")
    return value


def _texts(members: dict[str, Node], key: str) -> list[Node]:
    found = _list(members[key], key) if key in members else []
    for one in found:
        if not isinstance(one.value, str):
            raise ValueError(f"line {one.line}: {key} must be a list of texts")
    return found


def _optional(members: dict[str, Node], key: str) -> str | None:
    """The text of a key; None where it is not there or empty."""
    node = members.get(key)
    if node is None or node.value is None:
        return None
    if not isinstance(node.value, str):
        raise ValueError(f"line {node.line}: {key} must be a text")
    return node.value.strip() or None


def _text(members: dict[str, Node], key: str, line: int) -> str:
    found = _optional(members, key)
    if found is None:
        raise ValueError(f"line {line}: an account without {key}")
    return found
