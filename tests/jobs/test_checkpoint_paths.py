from __future__ import annotations

import pytest

from lorry_jobs.checkpoint_paths import CheckpointPath, check_name, folder_name, name_of_folder
from lorry_jobs.errors import UserError

JOB = "a1b2c3:train:0"


@pytest.mark.parametrize("scheme", ["lorry", "tinker", "mint", "mindlab-toolkit", "trio"])
@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_every_scheme_means_the_same(scheme, kind):
    path = CheckpointPath.parse(f"{scheme}://{JOB}/{kind}/step-5")
    assert path == CheckpointPath(JOB, kind, "step-5")
    assert str(path) == f"lorry://{JOB}/{kind}/step-5"
    assert CheckpointPath.parse(str(path)) == path


def test_a_path_without_kind_and_a_bare_name_take_what_the_caller_says():
    assert CheckpointPath.parse("trio://run/name", kind="sampler_weights") == CheckpointPath(
        "run", "sampler_weights", "name"
    )
    assert CheckpointPath.parse("state-step-5", job=JOB) == CheckpointPath(JOB, "weights", "state-step-5")
    with pytest.raises(UserError, match="names no job"):
        CheckpointPath.parse("state-step-5")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("s3://run/weights/a", "scheme must be one of"),
        ("lorry://run", "must look like"),
        ("lorry://run/weights/a/b", "must look like"),
        ("lorry://run/optimizer/a", "must look like"),
        ("lorry:///weights/a", "job id must not be empty"),
        ("lorry://run/weights/", "must not be empty"),
        ("lorry://../weights/a", "dot"),
        ("lorry://run/weights/..", "dot"),
    ],
)
def test_what_is_no_path_is_refused_with_the_reason(text, reason):
    with pytest.raises(UserError, match=reason):
        CheckpointPath.parse(text)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a..b", ".hidden", "a/b", "a\\b", "a\nb", "a\0b", "a\u200bb", "x" * 201, "日" * 30]
)
def test_names_that_are_refused(name):
    with pytest.raises(UserError):
        check_name(name)


@pytest.mark.parametrize("name", ["step-5", "a:b", "50% done", "日本", "x" * 200, "v1.0", "a b", "CON?*|"])
def test_names_become_one_safe_folder_and_back(name):
    folder = folder_name(check_name(name))
    assert name_of_folder(folder) == name
    assert folder.isascii()
    assert not set(folder) & set('/\\:*?"<>| ')
    assert len(folder) <= 240


def test_folders_of_a_path():
    assert CheckpointPath(JOB, "weights", "a").folders == ("a1b2c3%3Atrain%3A0", "weights", "a")
