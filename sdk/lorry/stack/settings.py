"""What `lorry up` can be told, by options, by LORRY_... environment variables, or by an `.env` of compose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from lorry_jobs.errors import UserError
from lorry_jobs.paths import lorry_home
from lorry_jobs.settings import masked_url


class StackSettings(BaseSettings):
    """Each field can be set as LORRY_<NAME>; an empty variable means "not set"."""

    model_config = SettingsConfigDict(
        env_prefix="LORRY_", env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    home: Path = Field(default_factory=lorry_home, description="files of the stack: Redis data, logs, state")
    url: SecretStr | None = Field(None, description="an existing Redis to use instead of starting one")
    redis_port: int | None = Field(None, ge=1, le=65535, description="None: a free port, kept for next time")
    redis_password: SecretStr | None = Field(None, description="None: a random one, kept for next time")
    appendfsync: Literal["everysec", "always"] = "everysec"
    # NoDecode: LORRY_MODELS=a,b and not LORRY_MODELS='["a","b"]'.
    models: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description="NAME or NAME=PATH of each base model to serve"
    )
    workers: int = Field(1, ge=1, description="worker processes for each model")
    start_timeout_seconds: float = Field(
        600.0, gt=0, description="loading a large model, or fetching it first, takes minutes"
    )
    flower: bool = True
    flower_port: int = Field(5555, ge=1, le=65535, description="another free port is used if it is taken")

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @field_validator("models", mode="before")
    @classmethod
    def _split_at_commas(cls, models: object) -> object:
        if isinstance(models, str):
            models = [name for part in models.split(",") if (name := part.strip())]
        return list(dict.fromkeys(models)) if isinstance(models, list) else models

    @field_validator("url")
    @classmethod
    def _is_redis(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(("redis://", "rediss://")):
            raise ValueError("LORRY_URL has to be a redis:// or rediss:// URL for a stack to run on it")
        return url

    def describe(self) -> dict[str, str]:
        """Every setting as text, secrets masked."""
        shown: dict[str, str] = {}
        for name, value in self:
            if name == "url" and isinstance(value, SecretStr):
                shown[name] = masked_url(value.get_secret_value())
            elif value is None:
                shown[name] = "(automatic)"
            elif isinstance(value, list):
                shown[name] = ", ".join(value)
            else:
                shown[name] = str(value)  # a SecretStr turns into asterisks
        return shown


def load_settings(*, own_redis: bool = False, **options: object) -> StackSettings:
    """Settings from options and the environment. An option that is None was not given.

    With `own_redis` a LORRY_URL in the environment is left out of account.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return StackSettings.model_validate({**given, "url": None} if own_redis else given)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()]
        raise UserError("; ".join(wrong)) from error
