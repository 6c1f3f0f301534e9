"""What a save promises while others read, while workers die, and when the index lies, through real workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import lorry
from lorry_jobs.checkpoint_index import CheckpointIndex
from lorry_jobs.checkpoint_paths import CheckpointPath
from tests.chaos.cell import MODEL, Cell, wait_until
from tests.chaos.workload import RANK, fb, largest_gap, step, submit, tensors_of
from tests.checkpoints import dying_saver
from tests.checkpoints.dying_saver import DEADLY_NAME, DIED

ADAPTER = "adapter_model.safetensors"
PROMPT = lorry.ModelInput.from_ints([5, 6, 7, 8, 9])


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Cell]:
    with Cell(tmp_path_factory.mktemp("cell"), tiny_llama, workers=1) as cell:
        yield cell


@pytest.fixture
def service(cell: Cell) -> Iterator[lorry.ServiceClient]:
    with lorry.ServiceClient(base_url=cell.url) as service:
        yield service


def new_client(service: lorry.ServiceClient) -> lorry.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=RANK, seed=1)


def train(client: lorry.TrainingClient, seed: int) -> None:
    submit(client, fb(seed))
    submit(client, step(1e-2)).result(60)


def logprobs(sampler: lorry.SamplingClient) -> tuple[float | None, ...]:
    return tuple(sampler.compute_logprobs(PROMPT).result(60))


def test_overwritten_while_it_is_sampled_and_downloaded(service: lorry.ServiceClient, tmp_path: Path) -> None:
    """Whoever reads gets one version, whole, and never an older one than before."""
    client = new_client(service)
    versions: list[tuple[float | None, ...]] = []
    files: list[bytes] = []
    train(client, 0)
    live = client.save_weights_for_sampler("live").result(60)
    done = threading.Event()
    sampled, fetched, errors = list[tuple[float | None, ...]](), list[bytes](), list[Exception]()

    def sample() -> None:
        while not done.is_set():
            sampled.append(logprobs(live))

    def download() -> None:
        while not done.is_set():
            try:
                folder = service.download_checkpoint(str(live.path), tmp_path / f"{len(fetched)}-{len(errors)}")
                fetched.append((folder / ADAPTER).read_bytes())
            except lorry.UserError as error:
                errors.append(error)

    def note() -> None:
        """The version that `live` is now, under a name of its own."""
        own = client.save_weights_for_sampler(f"version-{len(versions)}").result(60)
        versions.append(logprobs(own))
        files.append((service.export_checkpoint(str(own.path), tmp_path / str(own.name)) / ADAPTER).read_bytes())

    threads = [threading.Thread(target=sample), threading.Thread(target=download)]
    for thread in threads:
        thread.start()
    try:
        note()
        for seed in range(1, 12):
            train(client, seed)
            note()
            client.save_weights_for_sampler("live", overwrite=True).result(60)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert len({*versions}) == len({*files}) == 12
    for found, known in ((sampled, versions), (fetched, files)):
        order = [known.index(each) for each in found]  # type: ignore[arg-type]
        assert order == sorted(order)
        assert len(set(order)) > 1
    assert all("replaced while it was read" in str(error) for error in errors)
    assert logprobs(live) == versions[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_a_save_whose_worker_died_before_it_could_say_so_is_no_duplicate(
    tmp_path: Path, tiny_llama: Path, kind: str
) -> None:
    argv, env = (str(Path(dying_saver.__file__)),), {DIED: str(tmp_path)}
    with (
        Cell(tmp_path / "cell", tiny_llama, workers=1, worker_argv=argv, env=env) as cell,
        lorry.ServiceClient(base_url=cell.url) as service,
    ):
        client = new_client(service)
        train(client, 1)
        save = client.save_state if kind == "weights" else client.save_weights_for_sampler
        saving = save(DEADLY_NAME)
        behind = submit(client, fb(2))
        (first,) = cell.alive()
        wait_until(lambda: not first.is_running, 60, "the worker's death")
        folder = cell.store.joinpath(*CheckpointPath(client.model_id, kind, DEADLY_NAME).folders)  # type: ignore[arg-type]
        assert (folder / "manifest.json").is_file()  # all is done but the word
        assert not saving.done()
        cell.start_worker()
        path = str(saving.result(60).path)
        assert (tmp_path / kind).read_text() == service.get_checkpoint_metadata(path).op_id
        assert behind.result(60).loss > 0  # type: ignore[attr-defined]
        with pytest.raises(lorry.CheckpointExists):
            save(DEADLY_NAME).result(60)
        if kind == "weights":
            undisturbed = new_client(service)
            train(undisturbed, 1)
            other = undisturbed.save_state("undisturbed").result(60).path
            assert largest_gap(tensors_of(cell.store, path), tensors_of(cell.store, other)) == 0


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_an_index_that_names_files_outside(cell: Cell, service: lorry.ServiceClient, tmp_path: Path, name: str) -> None:
    client = new_client(service)
    path = client.save_state("lies").result(60).path
    found = service.get_checkpoint_metadata(path)
    entry = found.files[ADAPTER]
    with cell.client() as redis:
        CheckpointIndex(redis).put(found.model_copy(update={"files": {name: entry}}))
    with pytest.raises(lorry.ServiceError, match="outside of its folder"):
        service.download_checkpoint(path, tmp_path / "target")
    with pytest.raises(lorry.ServiceError, match=r"no adapter_model\.safetensors.*reindex"):
        service.export_checkpoint(path, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []
    service.reindex_checkpoints()
    service.export_checkpoint(path, tmp_path / "target")
