from __future__ import annotations

import pytest
from pydantic import ValidationError

from lorry_jobs.settings import QueueSettings, masked_url


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in QueueSettings.model_fields:
        monkeypatch.delenv(f"LORRY_{name.upper()}", raising=False)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user@host:6379/0", "redis://user@host:6379/0"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:secret@host/2", "rediss://user:***@host/2"),
        ("redis://:secret@[::1]:6379/0", "redis://:***@[::1]:6379/0"),
        ("redis://:s%40cr%3Aet@host:6379", "redis://:***@host:6379"),
        ("redis://host:6379/0?password=secret", "redis://host:6379/0?password=***"),
        ("redis://host?db=1&Password=secret&client_name=a", "redis://host?db=1&Password=***&client_name=a"),
        ("rediss://u:secret@host/0?ssl_password=secret", "rediss://u:***@host/0?ssl_password=***"),
        # Not valid unless percent-encoded, but people paste them, and the log must not keep them.
        ("redis://:sec@ret@host:6379/0", "redis://:***@host:6379/0"),
        ("redis://user:sec:ret@host:6379/0", "redis://user:***@host:6379/0"),
        ("redis://:sec/ret@host:6379/0", "redis://:***@host:6379/0"),
        ("redis://:sec?ret@host:6379/0", "redis://:***@host:6379/0"),
        ("redis://:sec#ret@host:6379/0", "redis://:***@host:6379/0"),
    ],
)
def test_a_masked_url_shows_everything_but_passwords(url, shown):
    assert masked_url(url) == shown


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("LORRY_URL", "redis://:secret@host:7000/1")
    monkeypatch.setenv("LORRY_WINDOW", "8")
    settings = QueueSettings()
    assert settings.redis_url == "redis://:secret@host:7000/1"
    assert settings.window == 8
    assert settings.max_queued_ops == 4096


@pytest.mark.parametrize("password", ["secret", "s3cr%40t%2F", "a:b@c", "a b"])
def test_no_text_form_of_the_settings_shows_the_password(password):
    settings = QueueSettings(url=f"redis://user:{password}@host:6379/0")
    for text in (settings.describe(), repr(settings), str(settings), settings.model_dump_json()):
        assert password not in text
    assert "url = redis://user:***@host:6379/0" in settings.describe()


def test_describe_names_every_setting():
    lines = QueueSettings(window=5).describe().splitlines()
    assert [line.split(" = ")[0].strip() for line in lines] == list(QueueSettings.model_fields)
    assert "  window = 5" in lines
    assert "  url = None" in lines


def test_an_empty_variable_is_as_good_as_none(monkeypatch):
    monkeypatch.setenv("LORRY_URL", "")
    monkeypatch.setenv("LORRY_LEASE_SECONDS", "")
    settings = QueueSettings()
    assert settings.url is None
    assert settings.lease_seconds == 10.0
    with pytest.raises(ValueError, match="LORRY_URL is not set"):
        _ = settings.redis_url


@pytest.mark.parametrize(
    ("name", "value"),
    [("window", 1), ("window", 17), ("lease_seconds", 0), ("max_queued_ops", 0), ("result_ttl_seconds", 0)],
)
def test_values_that_cannot_work_are_refused(name, value):
    with pytest.raises(ValidationError, match=name):
        QueueSettings(**{name: value})


def test_settings_do_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        QueueSettings().window = 3
