"""Where the server is, when the user did not say."""

from __future__ import annotations

import os

from pydantic import SecretStr

from lorry_jobs.errors import UserError
from lorry_jobs.paths import lorry_home

from .stack import running_stack


def find_url(base_url: str | None) -> SecretStr:
    """`base_url`, else LORRY_URL, else the stack that runs on this machine."""
    url = base_url or os.environ.get("LORRY_URL")
    if not url:
        stack = running_stack(lorry_home())
        if stack is None:
            raise UserError(
                "no server: give ServiceClient(base_url='redis://...') or set LORRY_URL. To start one on this "
                "machine: `lorry up` in another terminal, or `with lorry.local(model='smollm2'):` in this program"
            )
        url = stack.url
    if url.startswith(("http://", "https://")):
        raise UserError("the HTTP gateway is not part of this version; give the redis:// address of the server")
    if not url.startswith(("redis://", "rediss://")):
        raise UserError(f"the server's address must start with redis:// or rediss://, not {url.split(':')[0]}:")
    return SecretStr(url)
