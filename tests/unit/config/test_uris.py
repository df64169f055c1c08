"""Validation of storage URIs in a configuration, without access to storage."""

from __future__ import annotations

import sys

import pytest

from skyrl_train.config.predicates import RunComponents
from skyrl_train.config.prepare import prepare_config
from skyrl_train.errors import ConfigError

SECRET = "wJalrXUtnFEMI"


def prepare_error(*overrides: str, components: RunComponents | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare_config(list(overrides), has_accelerator=False, components=components)
    return str(caught.value)


@pytest.mark.parametrize(
    "key",
    ["trainer.ckpt_path", "trainer.export_path", "trainer.policy.model.path", "trainer.critic.model.path"],
)
@pytest.mark.parametrize("address", [f"s3://AKIA1:{SECRET}@bucket/run", f"s3://bucket/run?secret={SECRET}"])
def test_credentials_in_uri_are_rejected_and_redacted(key: str, address: str):
    message = prepare_error(f"{key}='{address}'")
    assert f"{key}=s3://" in message and "AWS_ACCESS_KEY_ID" in message
    assert SECRET not in message and "AKIA1" not in message


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("gs://bucket/run", "Other schemes are not supported"),
        ("https://host/run", "Other schemes are not supported"),
        ("s3:///run", "followed by a bucket (s3) or an absolute path"),
        ("s3://", "followed by a bucket (s3) or an absolute path"),
        ("file://run", "followed by a bucket (s3) or an absolute path"),
        ("s3://bucket/../other", "followed by a bucket (s3) or an absolute path"),
        ("s3://bucket//other", "no part of which is empty"),
        ("s3://bucket/a//b", "no part of which is empty"),
        ("file:///mnt//b", "no part of which is empty"),
    ],
)
def test_invalid_uri_is_reported(address: str, advice: str):
    message = prepare_error(f"data.train_data=['{address}']")
    assert f"data.train_data={address}" in message and advice in message


def test_valid_uris_are_unchanged():
    uris = {"ckpt_path": "s3://bucket/a/run", "export_path": "file:///mnt/exports"}
    trainer = prepare_config(
        [f"trainer.{key}={value}" for key, value in uris.items()], has_accelerator=False
    ).config.trainer
    assert {key: getattr(trainer, key) for key in uris} == uris


def test_s3_uri_without_s3fs_names_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    message = prepare_error("trainer.ckpt_path=s3://bucket/run", components=RunComponents())
    assert "trainer.ckpt_path=s3://bucket/run: must be a local path while s3fs is not installed" in message
    assert "--extra s3" in message
