"""Redaction of secrets in texts that a run saves, displays or sends."""

from __future__ import annotations

import html
import json
import re
from urllib.parse import quote

import pytest

from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.redaction import (
    contains_password,
    contains_secret,
    find_secret_pieces,
    is_credential_name,
    redact,
)
from skyrl_train.errors import ConfigError

AWKWARD = 'a "quoted" \\ back/slash & <sign> ü'
PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvgIBADANBgkqhkiG9w0BAQEF\nAASCBKgwggSkAgEAAoIBAQC7\n-----END PRIVATE KEY-----\n"


@pytest.mark.fault("F04")
@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *((name, True) for name in ("DB_PWD", "MYSQL_PWD", "GITHUB_PAT", "PAT", "SENTRY_DSN", "DATABASE_DSN")),
        *((name, True) for name in ("SLACK_WEBHOOK_URL", "AZURE_STORAGE_CONNECTION_STRING", "PGPASSWORD", "HF_TOKEN")),
        *((name, False) for name in ("PWD", "OLDPWD", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "PATTERN", "HOME")),
        *((name, True) for name in ("SMTP_PASS", "PASS", "DB_CREDS", "BEARER", "AUTHORIZATION")),
        *((name, False) for name in ("TOKENIZER_PATH", "TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "KEYBOARD_LAYOUT")),
        ("RAY_AUTH_MODE", False),
    ],
)
def test_names_of_credentials(name: str, is_one: bool):
    assert is_credential_name(name) is is_one


@pytest.mark.fault("F04")
@pytest.mark.parametrize(
    "write",
    [
        str,
        json.dumps,
        lambda text: json.dumps(text, ensure_ascii=False),
        repr,
        html.escape,
        lambda text: quote(text, safe=""),
        lambda text: re.sub("%..", lambda code: code[0].lower(), quote(text, safe="")),
        lambda text: json.dumps(text).replace("/", "\\/"),
        lambda text: repr(text.encode()),
        lambda text: json.dumps({"a": json.dumps([text])}),
        lambda text: repr([json.dumps(text)]),
        lambda text: f"GET /?key={quote(text)}",
    ],
)
def test_secret_is_found_as_others_write_it(write):  # type: ignore[no-untyped-def]
    shown = redact(f"before {write(AWKWARD)} after", {"SOME_KEY": AWKWARD})
    assert "<SOME_KEY>" in shown and "quoted" not in shown
    assert shown.startswith("before ") and shown.endswith(" after")


@pytest.mark.fault("F04")
def test_lines_of_a_secret_are_found_apart():
    environ = {"TLS_KEY": PEM}
    for text in (PEM, json.dumps(PEM), repr(PEM), *PEM.splitlines()[1:3], "\r\n".join(PEM.splitlines())):
        assert "MIIE" not in redact(text, environ) and "AASC" not in redact(text, environ), text


def test_connection_string_secret_is_redacted_alone():
    environ = {"STORE_CONNECTION_STRING": "AccountName=research-team;AccountKey=QUJDREVGR0hJSktM==;Suffix=core"}
    assert redact("research-team signs with QUJDREVGR0hJSktM==", environ) == (
        "research-team signs with <STORE_CONNECTION_STRING>"
    )


@pytest.mark.fault("F04")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://me:pass%20word@host:5432/db", "postgres://***@host:5432/db"),
        ("https://ghp_16C7e42F292c6912E7@github.com/a/b", "https://***@github.com/a/b"),
        ("redis://:p@ss@host", "redis://***@host"),
        ("amqp://me:with/slash@host/x", "amqp://***@host/x"),
        ("'http://a:b@c' and \"http://d:e@f\"", "'http://***@c' and \"http://***@f\""),
        ("ssh://git@github.com/a/b", "ssh://git@github.com/a/b"),
        ("http://host:8000/users/@me?mail=a@b", "http://host:8000/users/@me?mail=a@b"),
        ('{"url":"http://host:80","mail":"a@b"}', '{"url":"http://host:80","mail":"a@b"}'),
    ],
)
def test_password_in_an_address_is_hidden(text: str, shown: str):
    assert redact(text, {}) == shown


@pytest.mark.fault("F04")
def test_url_password_in_variable_is_redacted_alone():
    environ = {"DATABASE_URL": "postgres://me:swordfish%21-99@host/db", "HTTP_PROXY": "http://host:3128"}
    assert redact("login with swordfish%21-99 or swordfish!-99 at host:3128", environ) == (
        "login with <DATABASE_URL> or <DATABASE_URL> at host:3128"
    )


def test_pieces_that_spell_a_secret():
    environ = {"SOME_TOKEN": "hunter2-hunter2"}
    pieces = ["say", " hun", "ter2", "-hunt", "er2", "!", "", " hunter"]
    assert find_secret_pieces(pieces, environ) == [False, True, True, True, True, False, False, False]
    assert find_secret_pieces(["http", "://me:", "pw", "@host"], {}) == [False, True, True, True]
    assert find_secret_pieces(["nothing", " here"], environ) == [False, False]


def test_holds_secret_looks_everywhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_TOKEN", "hunter2-hunter2")
    assert contains_secret([{"a": ("x", {"b hunter2-hunter2": 1})}])
    assert not contains_secret([{"a": ("x", {"b": 1})}, None, 2.0])


def test_time_of_hostile_texts_is_linear():
    for text in ("://a:" * 200_000, "://" + "a" * 1_000_000, "a://" * 250_000, "://a@" * 200_000):
        redact(text, {})  # a quadratic search would run into the deadline of the test


@pytest.mark.fault("F04")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("environment.skyrl_gym.search.search_url", "http://me:s3cr3t-pw@host/retrieve"),
        ("environment.skyrl_gym.llm_as_a_judge.base_url", "https://sk-s3cr3t-pw-token@host/v1"),
        ("generator.remote_inference_engine_urls", "['http://me:s3cr3t-pw@host:8000']"),
        ("generator.remote_inference_engine_urls", "['me:s3cr3t-pw@host:8000']"),
        ("environment.skyrl_gym.tool_use.tool_settings", "{mcp: {servers: {a: {url: 'https://me:s3cr3t-pw@host'}}}}"),
    ],
)
def test_url_keys_reject_passwords(key: str, value: str):
    with pytest.raises(ConfigError) as caught:
        prepare_config([f'{key}="{value}"' if "[" not in value and "{" not in value else f"{key}={value}",
                 "generator.run_engines_locally=false"], has_accelerator=False)  # fmt: skip
    assert f"{key}=" in str(caught.value) and "without user name and password" in str(caught.value)
    assert "s3cr3t-pw" not in str(caught.value)


def test_urls_without_passwords_are_accepted():
    assert not contains_password(["http://host:8000/a", "text with http://me:pw@host inside", {"x": "ssh://git@host"}])
