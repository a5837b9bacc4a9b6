"""Tokens: whose they are, replaced without a gap, and never shown."""

import os
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diagnosis.tokens import Tokens, TokensError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokens.toml"
    write(path, 'node-a = "old"\n')
    return path


def write(path, text):
    """As a careful hand does: beside, then in its place; for its owner alone."""
    beside = path.with_suffix(".new")
    beside.write_bytes(text if isinstance(text, bytes) else text.encode())
    beside.chmod(0o600)
    beside.replace(path)


def refreshed(tokens):
    assert tokens.stale()
    tokens.refresh()
    assert not tokens.stale()
    return tokens


def test_a_node_may_have_several_tokens():
    tokens = Tokens({"node-a": ["new", "old"], "node-b": "b"})
    assert [tokens.node_of(token) for token in ("new", "old", "b", "c", "")] == [
        "node-a",
        "node-a",
        "node-b",
        None,
        None,
    ]
    assert tokens.nodes == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"node-a": ""}, "a token of node 'node-a' is empty"),
        ({"node-a": ["hush", ""]}, "a token of node 'node-a' is empty"),
        ({"node-a": "hush", "node-b": "hush"}, "nodes 'node-a' and 'node-b' share a token"),
        ({"node-a": ["x", "hush"], "node-b": ["hush", "y"]}, "nodes 'node-a' and 'node-b' share a token"),
    ],
)
def test_tokens_that_do_not_tell_nodes_apart_are_refused(given, words):
    with pytest.raises(TokensError, match=words) as caught:
        Tokens(given)
    assert "hush" not in str(caught.value)


def test_a_token_is_replaced_without_a_gap(file):
    tokens = Tokens({}, file)
    assert (tokens.node_of("old"), tokens.stale()) == ("node-a", False)
    write(file, 'node-a = ["new", "old"]')
    refreshed(tokens)
    assert (tokens.node_of("old"), tokens.node_of("new")) == ("node-a", "node-a")
    write(file, 'node-a = "new"')
    refreshed(tokens)
    assert (tokens.node_of("old"), tokens.node_of("new")) == (None, "node-a")


def test_settings_and_file_count_together_and_may_not_share(file):
    tokens = Tokens({"node-a": "set", "node-b": "b"}, file)
    assert [tokens.node_of(token) for token in ("set", "old", "b")] == ["node-a", "node-a", "node-b"]
    write(file, 'node-a = "b"')
    assert "nodes 'node-a' and 'node-b' share a token" in refreshed(tokens).problem
    assert tokens.node_of("old") == "node-a"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no node"),
        ("node-a = ", "is not TOML"),
        (b'node-a = "\xff"', "is not TOML: it is not UTF-8"),
        ("node-a = 7", "node 'node-a' must have \"token\" or"),
        ("node-a = [1]", "node 'node-a' must have \"token\" or"),
        ('node-a = ""', "is empty"),
        ('node.example = "hush"', "a name with dots stands in quotes"),
        ('node-a = "hush hush"', "holds a character that no token has"),
        ('node-a = "hush"\nnode-b = "hush"', "share a token"),
    ],
)
def test_a_version_that_cannot_be_used_changes_nothing_and_is_said_once(file, text, words, caplog):
    tokens = Tokens({}, file)
    write(file, text)
    refreshed(tokens)
    tokens.refresh()
    assert words in tokens.problem
    assert "the tokens read before stay in use" in tokens.problem
    assert tokens.node_of("old") == "node-a"
    assert len(caplog.records) == 1
    assert "hush" not in caplog.text
    write(file, 'node-a = "new"')
    assert (refreshed(tokens).problem, tokens.node_of("new")) == ("", "node-a")


def test_a_file_that_went_away_changes_nothing(file):
    tokens = Tokens({}, file)
    file.unlink()
    assert "cannot be read: No such file" in refreshed(tokens).problem
    assert tokens.node_of("old") == "node-a"
    write(file, 'node-a = "new"')
    assert refreshed(tokens).node_of("new") == "node-a"


def test_at_the_start_the_file_must_be_usable(file):
    file.write_text("?")
    with pytest.raises(TokensError, match="is not TOML"):
        Tokens({"node-b": "b"}, file)
    with pytest.raises(TokensError, match="cannot be read"):
        Tokens({}, file.with_name("none"))


def test_a_file_that_everybody_can_read_is_a_warning(file, caplog):
    tokens = Tokens({}, file)
    assert (tokens.warning, caplog.text) == ("", "")
    file.chmod(0o644)
    refreshed(tokens)
    assert f"chmod o= {file}" in tokens.warning
    assert tokens.warning in caplog.text
    file.chmod(0o640)
    assert refreshed(tokens).warning == ""


def test_a_file_that_is_written_in_place_is_seen_too(file):
    tokens = Tokens({}, file)
    status = file.stat()
    file.write_text('node-a = "Old"\n')  # as long as before
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert refreshed(tokens).node_of("Old") == "node-a"


def test_ten_thousand_nodes_cost_a_request_nothing():
    tokens = Tokens({f"node-{number}": f"token-{number}" for number in range(10_000)})
    few = Tokens({"node-1": "token-1"})

    def seconds(one):
        begin = time.perf_counter()
        for _ in range(2000):
            one.node_of("token-9999")
        return time.perf_counter() - begin

    assert min(seconds(tokens) for _ in range(5)) < 10 * min(seconds(few) for _ in range(5))


LINES = st.tuples(
    st.sampled_from(["node-a", '"node.b"', "node.c", "[x]", "", "ü"]),
    st.sampled_from(['"hush"', '["hush", "hush2"]', "1", "[1]", '""', "{a = 1}", '"hu\\u0000sh"', "[[]]"]),
).map(" = ".join)


@given(
    st.binary(max_size=60) | st.lists(LINES | st.just("node-a"), max_size=4).map("\n".join).map(str.encode)
)
@example(b"node-a = " + b"[" * 5000)
def test_any_file_gives_tokens_or_words_without_them_and_never_takes_the_old_away(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any-tokens.toml"
    write(path, 'node-a = "old"')
    tokens = Tokens({}, path)
    write(path, content)
    tokens.refresh()
    assert "hush" not in tokens.problem
    assert tokens.nodes >= 1
    assert bool(tokens.problem) == (tokens.node_of("old") is not None) or b"old" in content
