"""Only what Slack's secret signed passes, and nothing that a stranger writes makes the check fail otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slack_sdk.signature import SignatureVerifier

from bot.slack.signature import SIGNATURE, TIMESTAMP, NotSlackError, check_body, check_headers, sign

# The example of docs.slack.dev/authentication/verifying-requests-from-slack.
SECRET = "8f742231b10e8888abcd99yyyzzz85a5"
AT = "1531420618"
BODY = (
    b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&channel_name="
    b"foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2F"
    b"hooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015"
    b".47445629121.803a0bc887a14d10d2c447fce8b6703c"
)
SIGNED = "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"


def check(timestamp: str, signature: str, body: bytes = BODY, now: float = float(AT)) -> None:
    headers = {TIMESTAMP: timestamp, SIGNATURE: signature}
    check_headers(headers, now)
    check_body(SECRET, headers, body)


def test_slacks_own_example_passes() -> None:
    check(AT, SIGNED)


@pytest.mark.parametrize(
    ("timestamp", "signature", "body", "late", "reason"),
    [
        ("", SIGNED, BODY, 0, "unsigned"),
        (AT, "", BODY, 0, "unsigned"),
        ("soon", SIGNED, BODY, 0, "timestamp"),
        ("1531420618.5", SIGNED, BODY, 0, "timestamp"),
        ("-1", SIGNED, BODY, 0, "timestamp"),
        ("１５３１４２０６１８", SIGNED, BODY, 0, "timestamp"),
        ("9" * 5000, SIGNED, BODY, 0, "timestamp"),
        (AT, SIGNED, BODY, 301, "stale"),
        (AT, SIGNED, BODY, -301, "stale"),
        (AT, "v0=é", BODY, 0, "signature"),
        (AT, SIGNED.upper(), BODY, 0, "signature"),
        (AT, SIGNED.replace("v0", "v1"), BODY, 0, "signature"),
        (AT, SIGNED[:-1] + "4", BODY, 0, "signature"),
        (AT, SIGNED, BODY + b" ", 0, "signature"),
        ("1531420619", SIGNED, BODY, 0, "signature"),
    ],
)
def test_anything_else_is_refused_with_a_reason(
    timestamp: str, signature: str, body: bytes, late: float, reason: str
) -> None:
    with pytest.raises(NotSlackError) as caught:
        check(timestamp, signature, body, float(AT) + late)
    assert caught.value.reason == reason
    assert SECRET not in str(caught.value)


def test_five_minutes_are_allowed_for_either_way() -> None:
    check(AT, SIGNED, now=float(AT) + 299)
    check(AT, SIGNED, now=float(AT) - 299)


def test_a_clock_that_is_off_is_said_to_be() -> None:
    with pytest.raises(NotSlackError, match=r"400 s behind this machine's clock.*set the clock"):
        check(AT, SIGNED, now=float(AT) + 400)


@given(st.text(), st.text(), st.binary())
def test_no_header_and_no_body_breaks_the_check(timestamp: str, signature: str, body: bytes) -> None:
    with pytest.raises(NotSlackError):
        check(timestamp, signature, body)


@given(st.binary().filter(lambda body: _is_utf8(body)))
def test_signatures_are_those_of_slacks_own_library(body: bytes) -> None:
    ours = sign(SECRET, AT, body)
    assert ours == SignatureVerifier(SECRET).generate_signature(timestamp=AT, body=body)
    check(AT, ours, body)


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
