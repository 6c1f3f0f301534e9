"""Which worker a job goes to, and what happens to it when that worker leaves, dies or comes back."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from tests.jobs.driver import Driver, next_millisecond


def place(driver: Driver, job: str, model: str = "m", ops: int = 1) -> str:
    """A new job with work -> the worker it went to."""
    driver.create(job, model, window=4)
    driver.submit_all(job, ops - 1)
    return driver.owner(job)


def resend(driver: Driver, job: str) -> set[str]:
    return driver.mailbox.resend("w", [(job, driver.epoch(job))])


# -------------------------------------------------------------------------------------------------------- placing


def test_a_job_goes_to_the_worker_with_the_most_free_slots(driver):
    driver.hello("small", slots=1)
    driver.hello("large", slots=3)
    assert [place(driver, job) for job in "abc"][:2] == ["large", "large"]
    # One free slot each: the next two jobs fill both, whichever is first.
    assert driver.free_slots("small") + driver.free_slots("large") == 1
    assert driver.owner("c") in ("small", "large")
    place(driver, "d")
    assert (driver.free_slots("small"), driver.free_slots("large")) == (0, 0)
    assert place(driver, "e") == ""
    assert driver.mailbox.jobs_of("large") | driver.mailbox.jobs_of("small") == set("abcd")


def test_each_base_model_has_its_own_workers(driver):
    driver.hello("w1", "qwen")
    driver.hello("w2", "llama")
    assert place(driver, "a", "llama") == "w2"
    assert place(driver, "b", "qwen") == "w1"
    assert place(driver, "c", "mistral") == ""
    assert driver.mailbox.live_workers() == ["w1", "w2"]
    assert driver.mailbox.live_workers("llama") == ["w2"]
    assert driver.mailbox.status("c").workers == 0
    assert driver.mailbox.status("a").workers == 1
    assert set(driver.mailbox.models()) == {"qwen", "llama"}


def test_jobs_without_a_worker_wait_and_are_placed_oldest_first(driver):
    for job in ("zebra", "apple", "mango"):
        assert place(driver, job) == ""
        next_millisecond()
    assert [driver.mailbox.status(job).ahead_unplaced for job in ("zebra", "apple", "mango")] == [0, 1, 2]
    driver.hello("w", slots=2)
    assert driver.delivered("w") == [("zebra", 0), ("apple", 0)]
    assert driver.mailbox.unplaced("m") == 1
    assert driver.mailbox.status("mango").ahead_unplaced == 0
    driver.hello("w2", slots=2)
    assert driver.delivered("w2") == [("mango", 0)]
    assert driver.mailbox.unplaced("m") == 0


def test_a_job_without_work_takes_no_place(driver):
    driver.create("idle")
    driver.submit("idle", 5)  # op 0 may be on its way
    driver.hello("w", slots=1)
    assert driver.owner("idle") == ""
    assert (driver.mailbox.unplaced("m"), driver.free_slots("w")) == (0, 1)


def test_a_freed_slot_goes_to_the_job_that_waits(driver):
    driver.hello("w", slots=1)
    place(driver, "a")
    assert place(driver, "b") == ""
    driver.delivered("w")
    driver.mailbox.close("a")
    assert driver.owner("b") == "w"
    assert driver.delivered("w") == [("b", 0)]
    assert driver.free_slots("w") == 0


def test_an_evicted_job_that_has_work_goes_behind_those_that_wait(driver):
    driver.hello("w", slots=1)
    place(driver, "a")
    assert place(driver, "b") == ""
    assert driver.yield_job("a", "w")
    assert (driver.owner("a"), driver.owner("b")) == ("", "w")
    assert driver.mailbox.status("a").ahead_unplaced == 0
    assert driver.free_slots("w") == 0


# ------------------------------------------------------------------------------------------------ epochs and fences


def test_only_the_owner_adopts_and_takes(driver):
    driver.hello("w1")
    place(driver, "a")
    driver.hello("w2")
    placement = driver.mailbox.adopt("a", "w1")
    assert (placement.job, placement.model, placement.spec, placement.epoch) == ("a", "m", "{}", driver.epoch("a"))
    assert (placement.committed, placement.snapshot, placement.snapshot_ref) == (-1, -1, "")
    assert driver.mailbox.adopt("a", "w2") is None
    assert driver.mailbox.adopt("ghost", "w1") is None
    assert driver.take("a", 0, "w1") == b"payload"
    assert driver.take("a", 0, "w2") is None


def test_the_epoch_rises_with_every_change_of_owner(driver):
    driver.create("a")
    epochs = [int(driver.epoch("a"))]

    def changed() -> None:
        epochs.append(int(driver.epoch("a")))

    driver.submit("a", 0)
    changed()  # unplaced: the same still
    driver.hello("w1")
    changed()
    driver.yield_job("a", "w1")  # back to w1, the only one: still a new epoch
    changed()
    driver.hello("w2")
    driver.yield_job("a", "w1")
    changed()
    driver.let_lease_end("w2")
    driver.reap()
    changed()
    driver.mailbox.goodbye("w1")
    changed()
    assert driver.owner("a") == ""
    assert epochs[0] == epochs[1] == 0
    assert all(earlier < later for earlier, later in itertools.pairwise(epochs[1:]))


def test_a_commit_with_the_epoch_before_is_stale_even_from_the_same_worker(driver):
    driver.hello("w")
    place(driver, "a")
    before = driver.epoch("a")
    driver.yield_job("a", "w")
    assert driver.owner("a") == "w"
    assert driver.commit("a", 0, "w", epoch=before) == "stale"
    assert driver.snapshot("a", "w", -1, "", epoch=before) == "stale"
    assert driver.mailbox.resend("w", [("a", before)]) == {"a"}
    assert not driver.mailbox.yield_job("a", "w", before)
    assert driver.commit("a", 0, "w") == "ok"


def test_epochs_are_taken_from_the_clock_so_that_a_lost_write_repeats_none(driver):
    driver.hello("w")
    place(driver, "a")
    seconds, micros = driver.redis.time()
    now = seconds * 1000 + micros // 1000
    assert now - 10_000 < int(driver.epoch("a")) <= now


# --------------------------------------------------------------------------------------------------------- leases


def test_a_worker_whose_lease_ended_gets_no_more_jobs(driver):
    driver.hello("w1", slots=9)
    driver.hello("w2", slots=1)
    driver.let_lease_end("w1")
    assert place(driver, "a") == "w2"
    assert driver.mailbox.live_workers() == ["w2"]
    assert driver.mailbox.status("a").workers == 1


def test_reaping_moves_jobs_to_the_living_and_fences_the_dead(driver):
    driver.hello("w1")
    place(driver, "a", ops=3)
    place(driver, "idle")
    driver.commit("a", 0, "w1")
    driver.commit("idle", 0, "w1")
    epoch = driver.epoch("a")
    driver.hello("w2")
    assert driver.reap() == 0  # all leases hold
    driver.let_lease_end("w1")
    assert driver.reap() == 2
    assert driver.reap() == 0
    assert driver.owner("a") == "w2"
    assert driver.delivered("w2") == [("a", 1), ("a", 2)]
    assert driver.owner("idle") == ""  # no work: it is placed when some comes
    assert driver.commit("a", 1, "w1", epoch=epoch) == "stale"
    assert driver.take("a", 1, "w1") is None
    assert not driver.hello("w1")
    assert driver.commit("a", 1, "w2") == "ok"
    driver.submit("idle", 1)
    assert driver.owner("idle") == "w2"
    # Nothing is left of it but the note that its name is burnt.
    assert [key for key in driver.all_keys() if "w1" in key] == []
    assert driver.free_slots("w1") is None
    assert driver.redis.zrange("lorry:workers:dead", 0, -1) == [b"w1"]


def test_reaping_without_another_worker_leaves_the_jobs_waiting(driver):
    driver.hello("w1")
    place(driver, "a", ops=2)
    driver.commit("a", 0, "w1")
    driver.let_lease_end("w1")
    assert driver.reap() == 1
    assert driver.mailbox.status("a").owner == ""
    assert driver.mailbox.unplaced("m") == 1
    driver.hello("w2")
    assert driver.delivered("w2") == [("a", 1)]
    assert driver.mailbox.adopt("a", "w2").committed == 0


def test_reaping_in_small_portions_moves_everything(driver):
    driver.hello("w1", slots=10)
    for number in range(7):
        place(driver, f"job{number}")
    driver.hello("w2", slots=10)
    driver.let_lease_end("w1")
    assert [driver.reap(limit=3) for _ in range(4)] == [3, 3, 1, 0]
    assert driver.free_slots("w2") == 3
    assert len(driver.mailbox.jobs_of("w2")) == 7


def test_a_late_renewal_before_anyone_reaped_keeps_the_jobs(driver):
    driver.hello("w")
    place(driver, "a")
    driver.let_lease_end("w")
    assert driver.hello("w")
    assert driver.reap() == 0
    assert driver.commit("a", 0, "w") == "ok"


def test_renewing_does_not_hand_out_the_slots_again(driver):
    driver.hello("w", slots=2)
    place(driver, "a")
    driver.hello("w", slots=2)
    assert driver.free_slots("w") == 1


# ------------------------------------------------------------------------------------------------------ giving back


def test_a_yielded_job_prefers_another_worker_and_else_comes_back(driver):
    driver.hello("w1", slots=9)
    place(driver, "a", ops=2)
    driver.delivered("w1")
    driver.hello("w2", slots=1)
    assert driver.yield_job("a", "w1")
    assert driver.owner("a") == "w2"  # though w1 has more free slots
    assert driver.delivered("w2") == [("a", 0), ("a", 1)]
    assert (driver.free_slots("w1"), driver.free_slots("w2")) == (9, 0)
    driver.mailbox.goodbye("w1")
    driver.yield_job("a", "w2")
    assert driver.owner("a") == "w2"
    assert driver.free_slots("w2") == 0


def test_closed_doors_give_no_new_jobs_and_freed_places_do_not_open_them(driver):
    driver.hello("w", slots=3, seats=3)
    for job in "abc":
        place(driver, job)
    driver.request("r1")
    driver.mailbox.close_doors("w")
    assert place(driver, "late") == ""
    driver.request("r2")
    assert driver.commit("a", 0, "w") == "ok"  # what it holds it may finish
    driver.mailbox.close("a")
    driver.yield_job("b", "w")
    assert driver.finish("r1", "w") == "ok"
    driver.hello("w", slots=3, seats=3)  # a renewal does not open them either
    assert driver.free_slots("w") is None
    assert driver.free_seats("w") is None
    assert driver.mailbox.unplaced("m") == 2
    assert driver.mailbox.jobs_of("w") == {"c"}
    assert driver.mailbox.requests_of("w") == set()
    driver.mailbox.close_doors("never heard of")


def test_a_goodbye_moves_everything_and_burns_the_name(driver):
    driver.hello("w1")
    place(driver, "a", ops=2)
    driver.request("r")
    driver.hello("w2")
    assert driver.mailbox.goodbye("w1") == 2
    assert (driver.owner("a"), driver.mailbox.requests_of("w2")) == ("w2", {"r"})
    assert not driver.hello("w1")
    assert [key for key in driver.all_keys() if "w1" in key] == []
    assert driver.mailbox.live_workers() == ["w2"]


# ----------------------------------------------------------------------------------------------------- repairing


def test_resending_repairs_a_lost_delivery_and_does_not_double_the_work(driver):
    driver.hello("w")
    driver.create("a", window=2)
    driver.submit_all("a", 4)
    assert driver.delivered("w") == [("a", 0), ("a", 1)]  # taken from the queue, and lost
    assert resend(driver, "a") == set()
    assert driver.delivered("w") == [("a", 0), ("a", 1)]
    driver.commit("a", 0, "w")
    assert driver.delivered("w") == [("a", 2)]
    assert resend(driver, "a") == set()
    assert driver.delivered("w") == [("a", 1), ("a", 2)]
    # Both deliveries of op 1 may run; only one is recorded.
    assert [driver.commit("a", 1, "w"), driver.commit("a", 1, "w")] == ["ok", "dup"]
    assert driver.mailbox.status("a").released == 3
    driver.commit("a", 2, "w")
    driver.commit("a", 3, "w")
    driver.commit("a", 4, "w")
    driver.delivered("w")
    assert resend(driver, "a") == set()
    assert driver.delivered("w") == []


def test_resending_for_many_jobs_tells_only_of_those_that_moved(driver):
    driver.hello("w", slots=500)
    jobs = [f"job{n}" for n in range(450)]
    for job in jobs:
        place(driver, job)
    assert len(driver.delivered("w")) == 450
    epochs = {job: driver.epoch(job) for job in jobs}
    driver.hello("v", slots=500)
    driver.mailbox.yield_job("job7", "w", epochs["job7"])
    driver.mailbox.yield_job("job404", "w", epochs["job404"])
    assert driver.mailbox.resend("w", list(epochs.items())) == {"job7", "job404"}
    assert [job for job, _ in driver.delivered("w")] == [job for job in jobs if job not in ("job7", "job404")]


def test_resending_stops_at_a_cancelled_op(driver):
    driver.hello("w")
    driver.create("a", window=2)
    driver.submit_all("a", 3)
    driver.cancel("a", 2)
    driver.commit("a", 0, "w")
    driver.delivered("w")
    assert resend(driver, "a") == set()
    assert driver.delivered("w") == [("a", 1)]


# --------------------------------------------------------------------------------------------- all of it, at random


@dataclass
class World:
    """What must be true, kept in Python: who lives with how many places, which ops and requests there are."""

    driver: Driver
    dice: random.Random
    models: tuple[str, ...] = ("m", "n")
    workers: dict[str, tuple[str, int, int]] = field(default_factory=dict)  # name -> model, slots, seats
    closed_doors: set[str] = field(default_factory=set)
    jobs: dict[str, str] = field(default_factory=dict)  # job -> model
    submitted: dict[str, int] = field(default_factory=dict)  # ops per job
    committed: dict[str, int] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)  # unfinished request -> model
    names: itertools.count[int] = field(default_factory=itertools.count)

    def pick(self, things):
        things = sorted(things)
        return self.dice.choice(things) if things else None

    # Every step may find nothing to do.

    def new_worker(self):
        if len(self.workers) < 5:
            name, model = f"w{next(self.names)}", self.pick(self.models)
            self.workers[name] = (model, self.dice.randint(1, 4), self.dice.randint(1, 3))
            assert self.driver.hello(name, model, slots=self.workers[name][1], seats=self.workers[name][2])

    def renew(self):
        if name := self.pick(self.workers):
            model, slots, seats = self.workers[name]
            assert self.driver.hello(name, model, slots=slots, seats=seats)

    def new_job(self):
        if len(self.jobs) < 12:
            job = f"j{next(self.names)}"
            self.jobs[job] = self.pick(self.models)
            self.submitted[job], self.committed[job] = 0, 0
            assert self.driver.create(job, self.jobs[job], window=2) == "ok"

    def submit(self):
        if job := self.pick(self.jobs):
            assert self.driver.submit(job, self.submitted[job]) == "ok"
            self.submitted[job] += 1

    def commit(self):
        if job := self.pick(job for job in self.jobs if self.submitted[job] > self.committed[job]):
            owner = self.driver.owner(job)
            if owner:
                assert self.driver.commit(job, self.committed[job], owner) == "ok"
                self.committed[job] += 1

    def yield_job(self):
        if job := self.pick(self.jobs):
            owner = self.driver.owner(job)
            assert self.driver.yield_job(job, owner or "nobody") == bool(owner)

    def close_job(self):
        if job := self.pick(self.jobs):
            assert self.driver.mailbox.close(job) == "ok"
            del self.jobs[job]

    def new_request(self):
        if len(self.requests) < 12:
            task = f"r{next(self.names)}"
            self.requests[task] = self.pick(self.models)
            assert self.driver.request(task, self.requests[task]) == "ok"

    def finish_request(self):
        if task := self.pick(self.requests):
            owner = self.driver.mailbox.request_status(task).owner
            if owner:
                assert self.driver.finish(task, owner) == "ok"
                del self.requests[task]

    def cancel_request(self):
        if task := self.pick(self.requests):
            waits = not self.driver.mailbox.request_status(task).owner
            assert self.driver.mailbox.cancel_request(task, meta="{}", channel="", ttl=60) == waits
            if waits:
                del self.requests[task]

    def close_doors(self):
        if name := self.pick(self.workers):
            self.driver.mailbox.close_doors(name)
            self.closed_doors.add(name)

    def goodbye(self):
        if name := self.pick(self.workers):
            self.driver.mailbox.goodbye(name)
            del self.workers[name]

    def die(self):
        if name := self.pick(self.workers):
            self.driver.let_lease_end(name)
            self.driver.reap()
            del self.workers[name]
            assert not self.driver.hello(name)

    def check(self):
        driver = self.driver
        owner = {job: driver.owner(job) for job in self.jobs}
        holder = {task: driver.mailbox.request_status(task).owner for task in self.requests}
        assert set(driver.mailbox.live_workers()) == set(self.workers)
        for name, (model, slots, seats) in self.workers.items():
            held = {job for job in self.jobs if owner[job] == name}
            serving = {task for task in self.requests if holder[task] == name}
            assert driver.mailbox.jobs_of(name) == held
            assert driver.mailbox.requests_of(name) == serving
            assert {self.jobs[job] for job in held} | {self.requests[task] for task in serving} <= {model}
            is_open = name not in self.closed_doors
            assert driver.free_slots(name, model) == (slots - len(held) if is_open else None)
            assert driver.free_seats(name, model) == (seats - len(serving) if is_open else None)
            assert len(held) <= slots
            assert len(serving) <= seats
        assert set(owner.values()) | set(holder.values()) <= set(self.workers) | {""}
        for model in self.models:
            waits = {
                job for job, its in self.jobs.items()
                if its == model and not owner[job] and self.submitted[job] > self.committed[job]
            }  # fmt: skip
            assert {job.decode() for job in driver.redis.zrange(f"lorry:unplaced:{model}", 0, -1)} == waits
            queued = {task for task, its in self.requests.items() if its == model and not holder[task]}
            assert {task.decode() for task in driver.redis.zrange(f"lorry:waiting:{model}", 0, -1)} == queued
            open_here = [n for n, w in self.workers.items() if w[0] == model and n not in self.closed_doors]
            # Nobody waits beside a free place.
            assert not waits or all(driver.free_slots(name, model) == 0 for name in open_here)
            assert not queued or all(driver.free_seats(name, model) == 0 for name in open_here)


STEPS = {
    "new_worker": 4, "renew": 3, "new_job": 8, "submit": 20, "commit": 16, "yield_job": 6, "close_job": 3,
    "new_request": 10, "finish_request": 8, "cancel_request": 2, "close_doors": 1, "goodbye": 1, "die": 1,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_places_are_counted_exactly_through_any_churn(driver, seed):
    world = World(driver, random.Random(seed))
    for step in world.dice.choices(list(STEPS), list(STEPS.values()), k=250):
        getattr(world, step)()
        world.check()
    for job in sorted(world.jobs):
        assert driver.committed(job) == world.committed[job] - 1
        driver.mailbox.close(job)
    for name in sorted(world.workers):
        driver.mailbox.goodbye(name)
    # Everything that was not a result is gone again: no key outlives the job, request or worker that it was for.
    left = {key for key in driver.all_keys() if not key.startswith("celery-task-meta-")}
    waiting = {f"lorry:request:{task}" for task in world.requests} | {
        f"lorry:waiting:{model}" for model in world.requests.values()
    }
    assert left == {"lorry:models", "lorry:workers:dead"} | waiting
