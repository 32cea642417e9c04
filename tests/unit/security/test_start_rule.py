"""Goal: no combination of listener, address, users and the explicit word opens a node to a network by mistake.

Method: the whole matrix of operations 2.8.1 against the pure rule; one real node for each kind of listener.
"""

from __future__ import annotations

import itertools

import pytest

from commitmq.security.start_rule import Listener, allowed_names, exposed, is_loopback, refusal

LOOPBACK = ("127.0.0.1", "::1", "localhost", "127.3.4.5")
OPEN = ("0.0.0.0", "::", "*", "", "10.0.0.1", "fe80::1", "eth0", "no.such.host.invalid")


@pytest.mark.parametrize("host", LOOPBACK)
def test_on_loopback_every_listener_may_listen(host: str) -> None:
    assert is_loopback(host)
    for encrypts, asks, users in itertools.product((False, True), repeat=3):
        assert not refusal([Listener("native", host, encrypts, asks)], (), has_users=users)


@pytest.mark.parametrize("host", OPEN)
def test_off_loopback_a_listener_needs_both_or_the_word(host: str) -> None:
    assert not is_loopback(host)
    for encrypts, asks, users in itertools.product((False, True), repeat=3):
        assert not refusal([Listener("native", host, True, True)], (), has_users=users), "it asks for keys"
        one = Listener("metrics", host, encrypts, asks, open_without_users=True)
        sentence = refusal([one], (), has_users=users)
        assert bool(sentence) is not (encrypts and asks and users), (encrypts, asks, users)
        assert bool(sentence) is bool(exposed([one], has_users=users))
        if sentence:
            assert f"metrics on {host} WITHOUT" in sentence
            assert ("AUTHENTICATION" in sentence) is not (asks and users)
            assert ("ENCRYPTION" in sentence) is not encrypts
        assert not refusal([one], {"metrics"}, has_users=users)
        assert bool(refusal([one], {"native"}, has_users=users)) is bool(sentence), "the word is for one listener"


def test_one_sentence_names_all_listeners_and_the_setting_that_allows_them() -> None:
    found = refusal(
        [Listener("native", "0.0.0.0"), Listener("a", "127.0.0.1"), Listener("b", "::")], (), has_users=True
    )
    assert "native on 0.0.0.0" in found
    assert "b on ::" in found
    assert "security.insecure_listeners=native;b" in found
    assert "or " not in found.partition("(127.0.0.1)")[2].partition(", or say")[0], "nothing else helps these"
    word = refusal([Listener("b", "::", remedy="do without it")], {"metrics"}, has_users=True)
    assert "or do without it, or say that it is meant so: --set 'security.insecure_listeners=metrics;b'" in word
    assert allowed_names(" native ; b,c;") == {"native", "b", "c"}
