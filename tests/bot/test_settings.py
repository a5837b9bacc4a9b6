"""Settings: where they come from, which one counts, what is refused, and that secrets are never shown."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bot.settings import SECRETS, Settings, SettingsError, load


@pytest.fixture
def file(tmp_path):
    """Writes a settings file; gives the environment that names it."""

    def write(text: str) -> dict[str, str]:
        path = tmp_path / "sysom.toml"
        path.write_text(text)
        return {"SYSOM_CONFIG": str(path)}

    return write


def test_without_anything_there_are_defaults(file):
    settings = load(file(""))
    assert settings == Settings()
    assert (settings.listen, settings.spool_mb, settings.has_slack()) == ("127.0.0.1:8750", 256, False)


def test_a_file_is_read(file):
    settings = load(file('listen = "0.0.0.0:1"\nspool_mb = 7\n[node_tokens]\nnode-1 = "a"\n'))
    assert (settings.listen, settings.spool_mb, settings.node_tokens) == ("0.0.0.0:1", 7, {"node-1": "a"})


def test_the_environment_counts_more_than_the_file(file):
    environ = file('node = "from-file"\nspool_mb = 7') | {"SYSOM_NODE": "from-environment"}
    assert (load(environ).node, load(environ).spool_mb) == ("from-environment", 7)


def test_an_empty_variable_is_as_good_as_none(file):
    assert load(file('node = "from-file"') | {"SYSOM_NODE": ""}).node == "from-file"


def test_slacks_own_names_are_known(file):
    settings = load(file("") | {"SLACK_BOT_TOKEN": "xoxb-1", "SLACK_APP_TOKEN": "xapp-1"})
    assert settings.has_slack()


def test_slack_by_http_needs_no_app_token(file):
    environ = {"SLACK_BOT_TOKEN": "xoxb-1", "SYSOM_SLACK_SIGNING_SECRET": "s\n"}
    settings = load(file("") | environ)
    assert (settings.has_slack(), settings.slack_signing_secret) == (True, "s")


def test_a_node_may_have_several_tokens(file):
    listed = load(file('[node_tokens]\nnode-1 = ["new", " old\\n"]\nnode-2 = "x"'))
    assert listed.node_tokens == {"node-1": ["new", "old"], "node-2": "x"}
    repeated = load(file("") | {"SYSOM_NODE_TOKENS": "node-1=a,node-2=x,node-1=b,node-1=c"})
    assert repeated.node_tokens == {"node-1": ["a", "b", "c"], "node-2": "x"}


def test_other_variables_are_left_alone(file):
    assert load(file("") | {"PATH": "/bin", "SYSOM_JOB_ID": "job-1", "SLACK_CHANNEL": "x"}) == Settings()


def test_beside_a_service_of_our_name_kubernetes_sets_variables_that_are_no_settings(file):
    service = {
        "SYSOM_SERVICE_HOST": "10.0.0.11",
        "SYSOM_SERVICE_PORT": "8750",
        "SYSOM_SERVICE_PORT_HTTP": "8750",
        "SYSOM_PORT": "tcp://10.0.0.11:8750",
        "SYSOM_PORT_8750_TCP": "tcp://10.0.0.11:8750",
        "SYSOM_PORT_8750_TCP_ADDR": "10.0.0.11",
    }
    assert load(file("") | service) == Settings()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SYSOM_LISTN": "x"}, "SYSOM_LISTN: no such setting; there are .*listen"),
        ({"SYSOM_LISTEN": "8750"}, "listen is '8750'; it must be host:port, for example 127.0.0.1:8750"),
        ({"SYSOM_LISTEN": "host:99999"}, "must be host:port"),
        ({"SYSOM_SPOOL_MB": "much"}, r"^spool_mb must be a whole number \(SYSOM_SPOOL_MB, or spool_mb in "),
        (
            {"SYSOM_KEEP_DAYS": "0"},
            "keep_days is 0: 0.05 is the least, since all that is beyond it is deleted",
        ),
        ({"SYSOM_KEEP_DAYS": "-1"}, "keep_days is -1"),
        ({"SYSOM_KEEP_DAYS": "nan"}, "keep_days is nan"),
        ({"SYSOM_KEEP_DAYS": "inf"}, "keep_days is inf"),
        ({"SYSOM_KEEP_GB": "0"}, "keep_gb is 0: 0.01 is the least"),
        ({"SLACK_BOT_TOKEN": "xoxb-1"}, "needs both SLACK_BOT_TOKEN .* and SLACK_APP_TOKEN"),
        ({"SYSOM_SLACK_SIGNING_SECRET": "s"}, "needs both SLACK_BOT_TOKEN .* one is missing"),
        ({"SYSOM_TLS_CERT": "/c.pem"}, "needs both SYSOM_TLS_CERT and SYSOM_TLS_KEY"),
        ({"SYSOM_TLS_KEY": "/k.pem"}, "needs both SYSOM_TLS_CERT and SYSOM_TLS_KEY"),
        (
            {"SYSOM_WORKSPACE_LISTEN": "0.0.0.0:9000"},
            r"asks nobody who they are.* take 127\.0\.0\.1:9000.*ssh -L 9000:127\.0\.0\.1:9000",
        ),
        ({"SYSOM_WORKSPACE_LISTEN": "example.com:0"}, "listens on this machine alone"),
    ],
)
def test_what_cannot_be_used_is_said(file, environ, words):
    with pytest.raises(SettingsError, match=words):
        load(file("") | environ)


@pytest.mark.parametrize("place", ["127.0.0.1:0", "127.8.0.1:1", "localhost:0", "[::1]:0"])
def test_a_workspace_on_this_machine_alone_may_listen(file, place):
    assert load(file("") | {"SYSOM_WORKSPACE_LISTEN": place}).workspace_listen == place


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("listen = ", "is not TOML"),
        ("lissten = 'x'", "unknown field `lissten`"),
        ("spool_mb = 'x'", "spool_mb must be a whole number"),
        ("node_tokens = {a = 1}", r'node_tokens must be node = "token" or \["new", "old"\] throughout'),
    ],
)
def test_a_file_that_cannot_be_used_is_said(file, text, words):
    with pytest.raises(SettingsError, match=words):
        load(file(text))


def test_a_file_that_is_named_must_be_there(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot read the settings file .*No such file"):
        load({"SYSOM_CONFIG": str(tmp_path / "none.toml")})


# --- secrets


def test_settings_show_no_secret(file):
    secrets = {
        "SYSOM_NODE_TOKEN": "hush1",
        "SYSOM_NODE_TOKENS": "node-1=hush2",
        "SLACK_BOT_TOKEN": "xoxb-hush3",
    }
    settings = load(file("") | secrets | {"SLACK_APP_TOKEN": "xapp-hush4", "SLACK_SIGNING_SECRET": "hush5"})
    assert "hush" not in repr(msgspec.structs.replace(settings, node="node-1"))
    assert "node='node-1', node_token=…, " in repr(Settings(node="node-1", node_token="x"))


def test_tokens_lose_the_newline_that_a_file_brings_along(file):
    environ = file('[node_tokens]\nnode-2 = "from-file\\n"') | {
        "SYSOM_NODE_TOKEN": "mine\n",
        "SLACK_BOT_TOKEN": " xoxb-1\r\n",
        "SLACK_APP_TOKEN": "xapp-1\n",
    }
    settings = load(environ)
    assert (settings.node_token, settings.slack_bot_token, settings.slack_app_token) == (
        "mine",
        "xoxb-1",
        "xapp-1",
    )
    assert settings.node_tokens == {"node-2": "from-file"}
    assert load(file("") | {"SYSOM_NODE_TOKENS": " a = 1 ,\n b=2\n"}).node_tokens == {"a": "1", "b": "2"}


@pytest.mark.parametrize("broken", ["hu\nsh", "hu sh", "hu\x1b[31msh", "hüsh"])
@pytest.mark.parametrize("variable", ["SYSOM_NODE_TOKEN", "SLACK_BOT_TOKEN", "SLACK_APP_TOKEN"])
def test_a_token_with_characters_that_none_has_is_refused_unseen(file, variable, broken):
    with pytest.raises(SettingsError, match="a character that no token has") as caught:
        load(file("") | {variable: broken})
    assert "sh" not in str(caught.value).replace("has", "")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("node-1=hush-1,hush-2", "item 2 of SYSOM_NODE_TOKENS is not node=token"),
        ("hush-1", "item 1 of SYSOM_NODE_TOKENS is not node=token"),
        ("node-1=hush-1,=hush-2", "item 2 "),
        ("node-1=hush\x07", "the token of 'node-1', holds a character that no token has"),
    ],
)
def test_pairs_that_are_none_are_counted_and_not_shown(file, value, words):
    with pytest.raises(SettingsError, match=words) as caught:
        load(file("") | {"SYSOM_NODE_TOKENS": value})
    assert "hush" not in str(caught.value)


def test_a_token_of_the_wrong_kind_is_not_shown(file):
    with pytest.raises(SettingsError) as caught:
        load(file('node_tokens = "hush"'))
    assert "hush" not in str(caught.value)


# --- what follows from them


def test_the_store_is_in_the_state_folder_unless_it_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Settings().state_folder() == tmp_path / "sysom"
    assert Settings(state="/srv/s").store_url() == "sqlite:///srv/s/sysom.db"
    assert Settings(store="sqlite:///x.db", state="/srv/s").store_url() == "sqlite:///x.db"
    monkeypatch.chdir(tmp_path)
    assert Settings(state="here").store_url() == f"sqlite://{tmp_path.resolve()}/here/sysom.db"
    assert not Path("here").exists()


def test_the_key_for_commands_is_in_the_state_folder():
    assert Settings(state="/srv/s").command_key_file() == Path("/srv/s/command.key")


# --- whatever comes

VALUES = st.text(st.characters(exclude_characters="\0"), max_size=30) | st.sampled_from(
    ["127.0.0.1:0", "[::1]:1", ":::", "1e9", "-0", "node=hush", "a=hush,=hush", "a=hush,a=hush,b", "\udcff"]
)


def refused(environ):
    """The words of the refusal; None where the settings can be used."""
    try:
        load(environ)
    except SettingsError as error:
        return str(error)


VARIABLES = st.sampled_from(
    [*(f"SYSOM_{name.upper()}" for name in Settings.__struct_fields__), "SLACK_BOT_TOKEN"]
)


@given(st.dictionaries(VARIABLES | st.text("ABC_", max_size=5).map("SYSOM_{}".format), VALUES, max_size=4))
@settings(max_examples=50)
def test_any_environment_gives_settings_or_words_that_show_no_token(environ):
    words = refused({"SYSOM_CONFIG": "/dev/null"} | environ)
    assert words != ""
    secrets = [
        environ.get(name, "") for name in ("SLACK_BOT_TOKEN", *(f"SYSOM_{n.upper()}" for n in SECRETS))
    ]
    assert not any("hush" in value and value in str(words) for value in secrets)


TOML = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=9).map(repr),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)


def _toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


@given(
    st.binary(max_size=60)
    | st.lists(st.tuples(st.sampled_from(Settings.__struct_fields__), TOML), max_size=3).map(
        lambda pairs: "\n".join(f"{name} = {_toml(value)}" for name, value in pairs).encode()
    )
)
@example(b"store = " + b"[" * 5000)
@settings(max_examples=50)
def test_any_file_gives_settings_or_words(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    assert refused({"SYSOM_CONFIG": str(path)}) != ""


def test_bytes_that_are_no_text_are_refused_by_the_name_of_their_variable():
    with pytest.raises(SettingsError, match="SYSOM_SPOOL_MB holds bytes that are no UTF-8 text"):
        load({"SYSOM_CONFIG": "/dev/null", "SYSOM_SPOOL_MB": "\ud800"})
