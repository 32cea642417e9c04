"""Headers of requests about users and their rules."""

from __future__ import annotations

from commitmq_plugins.rocketmq.remoting.headers.header import Header, header


@header
class UserRequestHeader(Header):
    """Requests 3001 to 3004."""

    username: str | None = None


@header
class ListUsersRequestHeader(Header):
    """Request 3005."""

    filter: str | None = None


@header
class AclRequestHeader(Header):
    """Requests 3006 to 3009."""

    subject: str | None = None
    policy_type: str | None = None
    resource: str | None = None


@header
class ListAclsRequestHeader(Header):
    """Request 3010."""

    subject_filter: str | None = None
    resource_filter: str | None = None
