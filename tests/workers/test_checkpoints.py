"""Checkpoints: whole or not there, verified, resumed bit for bit, and readable by peft."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.errors import CheckpointExists, CheckpointNotFound, ServiceError, UserError
from lorry_jobs.types import AdamParams, LoadStateRequest, LoraConfig, ModelInput, SamplingParams, SaveRequest
from lorry_jobs.wire import SampleRequest
from lorry_workers.engine import checkpoints
from lorry_workers.engine.checkpoints import Checkpoint, CheckpointStore, Origin
from tests.tiny_engine import create_job, make_engine, peft_model, random_data, randomize

JOB = "a1:train:0"
PATH = CheckpointPath(JOB, "weights", "one")
CONTENT = Checkpoint({"w": torch.ones(3)}, {"r": 1})
OTHER = Checkpoint({"w": torch.zeros(3)}, {"r": 1})


def origin(op_id: str) -> Origin:
    return Origin(op_id, "tiny", LoraConfig(rank=1, seed=1), 5, {"who": "me"})


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path)


@pytest.fixture
def engine(tmp_path):
    engine = make_engine(tmp_path)
    create_job(engine)
    randomize(engine)
    return engine


def train(engine, job, seed):
    loss = engine.forward_backward(job, random_data([12, 7], seed), "cross_entropy").metrics["loss:sum"]
    engine.optim_step(job, AdamParams(learning_rate=1e-2))
    return loss


# ----------------------------------------------------------------------------------------------------- the store


def test_save_and_load_with_a_manifest(store, tmp_path):
    saved = store.save(PATH, CONTENT, origin("op1"), ttl_seconds=60)
    manifest, content = store.load(PATH)
    assert manifest == saved
    assert torch.equal(content.adapter["w"], torch.ones(3))
    folder = tmp_path / "a1%3Atrain%3A0" / "weights" / "one"
    assert sorted(os.listdir(folder)) == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    assert os.listdir(folder.parent) == ["one"]
    fields = json.loads((folder / "manifest.json").read_text())
    assert fields["step"] == 5
    assert fields["lora"]["rank"] == 1
    assert (manifest.expires - manifest.created).total_seconds() == 60
    assert manifest.size == sum(f.stat().st_size for f in folder.iterdir() if f.name != "manifest.json")


def test_a_duplicate_is_refused_but_not_a_retry_of_the_same_op(store):
    first = store.save(PATH, CONTENT, origin("op1"))
    assert store.save(PATH, OTHER, origin("op1")) == first
    with pytest.raises(CheckpointExists, match="overwrite=True"):
        store.save(PATH, OTHER, origin("op2"))
    assert torch.equal(store.load(PATH)[1].adapter["w"], torch.ones(3))
    store.save(PATH, OTHER, origin("op2"), overwrite=True)
    assert torch.equal(store.load(PATH)[1].adapter["w"], torch.zeros(3))


@pytest.mark.parametrize("moment", ["files", "flush", "rename"])
def test_a_save_that_fails_leaves_what_was_there(store, monkeypatch, tmp_path, moment):
    store.save(PATH, CONTENT, origin("op1"))
    rename = Path.rename

    def full(path, *args):
        if moment == "rename" and not path.name.startswith(".writing"):
            return rename(path, *args)
        raise OSError(28, "No space left on device")

    match moment:
        case "files":
            monkeypatch.setattr(checkpoints, "_write_file", full)
        case "flush":
            monkeypatch.setattr(checkpoints, "_flush_folder", full)
        case "rename":
            monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(ServiceError, match=r"cannot save lorry://.*No space left"):
        store.save(PATH, OTHER, origin("op2"), overwrite=True)
    assert torch.equal(store.load(PATH)[1].adapter["w"], torch.ones(3))
    assert os.listdir(tmp_path / "a1%3Atrain%3A0" / "weights") == ["one"]


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(store, tmp_path):
    store.save(PATH, CONTENT, origin("op1"))
    folder = tmp_path / "a1%3Atrain%3A0" / "weights" / "one"
    folder.rename(folder.parent / ".replaced-one")
    assert torch.equal(store.load(PATH)[1].adapter["w"], torch.ones(3))
    with pytest.raises(CheckpointExists):
        store.save(PATH, OTHER, origin("op2"))
    store.save(PATH, OTHER, origin("op2"), overwrite=True)
    assert torch.equal(store.load(PATH)[1].adapter["w"], torch.zeros(3))
    assert os.listdir(folder.parent) == ["one"]


def test_missing_expired_and_damaged_checkpoints_say_so(store, tmp_path):
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint lorry://a1:train:0/weights/one"):
        store.load(PATH)
    store.save(PATH, CONTENT, origin("op1"), ttl_seconds=1)
    folder = tmp_path / "a1%3Atrain%3A0" / "weights" / "one"
    file = folder / "manifest.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "expires": fields["created"]}))
    with pytest.raises(CheckpointNotFound, match="expired"):
        store.load(PATH)
    store.save(PATH, OTHER, origin("op2"))  # an expired name is free

    weights = folder / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ServiceError, match=r"adapter_model.safetensors is damaged"):
        store.load(PATH)
    weights.unlink()
    with pytest.raises(ServiceError, match=r"adapter_model.safetensors"):
        store.load(PATH)
    file.write_text("{}")
    with pytest.raises(ServiceError, match=r"manifest.json is damaged"):
        store.load(PATH)


# ---------------------------------------------------------------------------------------------------- the engine


def test_resuming_with_the_optimizer_is_bit_exact_even_between_forward_backward_and_step(engine, tmp_path):
    train(engine, JOB, 1)
    engine.forward_backward(JOB, random_data([5], 2), "cross_entropy")
    saved = engine.save_state(JOB, SaveRequest(name="mid"), "op1")
    assert saved.path == "lorry://a1:train:0/weights/mid"

    fresh = make_engine(tmp_path)
    create_job(fresh, "b:train:0", seed=99)
    loaded = fresh.load_state("b:train:0", LoadStateRequest(path=saved.path, optimizer=True))
    assert not loaded.dropped_gradients
    for each, job in ((engine, JOB), (fresh, "b:train:0")):
        each.optim_step(job, AdamParams(learning_rate=1e-2))
    assert [train(engine, JOB, seed) for seed in (3, 4)] == [train(fresh, "b:train:0", seed) for seed in (3, 4)]
    assert torch.equal(engine.state(JOB).adapter.flat, fresh.state("b:train:0").adapter.flat)
    assert fresh.state("b:train:0").step == engine.state(JOB).step == 4


def test_loading_without_the_optimizer_resets_the_moments_and_reports_dropped_gradients(engine):
    train(engine, JOB, 1)
    engine.save_state(JOB, SaveRequest(name="one"), "op1")
    weights = engine.state(JOB).adapter.flat.clone()
    train(engine, JOB, 2)
    engine.forward_backward(JOB, random_data([5], 3), "cross_entropy")

    loaded = engine.load_state(JOB, LoadStateRequest(path="one"))
    state = engine.state(JOB)
    assert loaded.dropped_gradients
    assert torch.equal(state.adapter.flat, weights)
    assert not state.adam.exp_avg.any()
    assert state.adam.step == 0
    assert not state.has_gradients
    assert not state.adapter.require_gradients().any()


def test_a_checkpoint_that_does_not_fit_changes_nothing(engine):
    engine.save_state(JOB, SaveRequest(name="one"), "op1")
    create_job(engine, "c:train:0", rank=2)
    create_job(engine, "d:train:0", train_mlp=False)
    path = "lorry://a1:train:0/weights/one"
    for job, reason in (("c:train:0", "rank=4, but this job has rank=2"), ("d:train:0", "train_mlp=True")):
        before = engine.state(job).adapter.flat.clone()
        with pytest.raises(UserError, match=reason):
            engine.load_state(job, LoadStateRequest(path=path))
        assert torch.equal(engine.state(job).adapter.flat, before)

    engine.save_weights_for_sampler(JOB, SaveRequest(name="s"), "op2")
    sampler = "lorry://a1:train:0/sampler_weights/s"
    with pytest.raises(UserError, match="no optimizer state"):
        engine.load_state(JOB, LoadStateRequest(path=sampler, optimizer=True))
    engine.load_state(JOB, LoadStateRequest(path=sampler))


def test_the_saved_adapter_loads_in_peft_with_the_same_logits(tmp_path):
    for family, tied in (("llama", True), ("llama", False), ("qwen3", True)):
        engine = make_engine(tmp_path / f"{family}{tied}", family, tied)
        create_job(engine)
        randomize(engine)
        engine.save_weights_for_sampler(JOB, SaveRequest(name="s"), "op1")
        folder = tmp_path / f"{family}{tied}" / "a1%3Atrain%3A0" / "sampler_weights" / "s"
        model = peft_model(family, tied, adapter=folder)
        tokens = torch.arange(3, 40)[None]
        adapter = engine.state(JOB).adapter
        with torch.no_grad():
            expected = model(input_ids=tokens).logits[0]
            with engine.trainer.active.use_one(adapter):
                hidden = engine.trainer.body(input_ids=tokens).last_hidden_state[0]
            torch.testing.assert_close(
                engine.sampler.head.logits(hidden, engine.sampler.head.everywhere(adapter)),
                expected,
                rtol=1e-5,
                atol=1e-5,
            )


def test_a_sampler_is_frozen_at_its_save_and_kept_loaded(engine, tmp_path):
    def sample(path):
        prompt = ModelInput.from_ints([5, 6, 7])
        request = SampleRequest("tiny", path, prompt, 1, SamplingParams(max_tokens=8, temperature=0))
        return engine.sample(request).sequences[0].logprobs

    path = engine.save_weights_for_sampler(JOB, SaveRequest(name="s"), "op1").path
    before = sample(path)
    train(engine, JOB, 1)
    assert sample(path) == before
    assert sample(None) != before
    engine.save_weights_for_sampler(JOB, SaveRequest(name="s", overwrite=True), "op2")
    assert sample(path) != before
    state = engine.save_state(JOB, SaveRequest(name="s"), "op3").path
    assert sample(state) == sample(path)

    shutil.rmtree(tmp_path / "a1%3Atrain%3A0")
    with pytest.raises(CheckpointNotFound):
        sample(path)


def test_only_the_last_used_sampler_adapters_stay_loaded(tmp_path):
    engine = make_engine(tmp_path, sampler_adapters=2)
    create_job(engine)
    prompt, params = ModelInput.from_ints([5]), SamplingParams(max_tokens=1)
    for index in range(4):
        path = engine.save_weights_for_sampler(JOB, SaveRequest(name=f"s{index}"), f"op{index}").path
        engine.sample(SampleRequest("tiny", path, prompt, 1, params))
    assert [path.rsplit("/", 1)[1] for path, _ in engine._samplers] == ["s2", "s3"]
