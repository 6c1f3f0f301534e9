from __future__ import annotations

import json
import re

import pytest

from lorry_jobs import errors
from lorry_jobs.errors import LorryError, ServiceError, UserError, from_wire

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, LorryError)]


def test_the_tree_in_the_documentation_names_every_error():
    named = set(re.findall(r"[A-Z][A-Za-z]+", errors.__doc__.split("\n\n")[1].replace("Redis", "")))
    assert {cls.__name__ for cls in ALL} <= named
    assert len(ALL) == 19


def test_no_two_errors_share_a_code():
    assert len({cls.code for cls in ALL}) == len(ALL)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_an_error_crosses_the_wire_as_json_and_is_the_same_again(cls):
    sent = cls("it broke; try this", job="a", op="forward", seq=7)
    got = from_wire(json.loads(json.dumps(sent.to_wire())))
    assert type(got) is cls
    assert (got.message, got.job, got.op, got.seq) == ("it broke; try this", "a", "forward", 7)
    assert str(got) == str(sent) == "it broke; try this [op forward, seq 7, job a]"


def test_a_message_says_only_what_applies():
    assert str(UserError("no")) == "no"
    assert str(UserError("no", seq=0)) == "no [seq 0]"
    assert str(UserError("no", op="sample")) == "no [op sample]"
    assert UserError("no", seq=0).args == ("no",)


def test_an_unknown_code_from_a_newer_server_is_a_service_error():
    got = from_wire({"code": "invented_later", "message": "new", "job": "a"})
    assert type(got) is ServiceError
    assert (got.message, got.job, got.seq) == ("new", "a", None)
    assert type(from_wire({})) is ServiceError


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.UserError, ValueError),
        (errors.CheckpointNotFound, ValueError),
        (errors.ServiceError, RuntimeError),
        (errors.ServiceUnavailable, ConnectionError),
        (errors.WaitTimeout, TimeoutError),
        (errors.StateRolledBack, errors.JobFailed),
    ],
)
def test_errors_are_caught_by_the_builtin_that_people_expect(error, builtin):
    with pytest.raises(builtin):
        raise error("x")


def test_what_the_user_did_wrong_is_never_the_services_fault():
    for cls in ALL:
        assert not (issubclass(cls, UserError) and issubclass(cls, ServiceError))
