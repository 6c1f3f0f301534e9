"""`APIFuture`: an op that was submitted; and `Submission`: what the `*_async` methods return.

An op is submitted when its method is called, whether or not anyone awaits anything. Waiting is separate: a wait
that times out or is cancelled leaves the op alone, and waiting again works.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from lorry_jobs.errors import LorryError, OpCancelled, WaitTimeout
from lorry_jobs.results import Outcome

from .settled import settle

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from .process import ClientProcess

log = logging.getLogger("lorry")
_BY_USER = object()

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class OpTiming:
    """`total_seconds` from the call to the result here, `compute_seconds` of it in the worker's engine,
    in the part of the cycle that computed it together with other jobs' ops. `attempt`
    2: a worker died with the op before. What a failed op lacks is None."""

    total_seconds: float
    compute_seconds: float | None
    worker: str | None
    cycle: int | None
    attempt: int | None


class APIFuture(Generic[T]):
    """The result of an op, sooner or later. Usable from any thread and any event loop.

    `future.result(timeout=None)` and `await future` give the value or raise the op's error. With a timeout,
    `WaitTimeout` (a TimeoutError) says what the op waits for; the op goes on.
    """

    def __init__(
        self,
        process: ClientProcess,
        task: str,
        op: str,
        decode: Callable[[Outcome], T],
        *,
        job: str | None = None,
        seq: int | None = None,
    ) -> None:
        self.task_id, self.op, self.job, self.seq = task, op, job, seq
        self._process = process
        self._decode = decode
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None
        self._value: tuple[T] | None = None
        self._retrieved = False
        self._waiters: list[concurrent.futures.Future[None]] = []
        self._callbacks: list[Callable[[], object]] = []
        self._waiting_since = 0.0
        self._made_at = time.monotonic()
        self._resolved_at = 0.0

    # ------------------------------------------------------------------------------------------------- waiting

    def result(self, timeout: float | None = None) -> T:
        """The value, after at most `timeout` seconds. Raises the op's error, or WaitTimeout."""
        waiter = self._new_waiter()
        try:
            waiter.result(timeout)
        except concurrent.futures.TimeoutError:
            raise self._timed_out(timeout) from None
        finally:
            self._forget_waiter(waiter)
        return self._get()

    async def result_async(self, timeout: float | None = None) -> T:
        """`result` for coroutines."""
        waiter = self._new_waiter()
        try:
            await asyncio.wait_for(asyncio.wrap_future(waiter), timeout)
        except TimeoutError:
            # Asking the server why must not block the loop.
            raise await asyncio.to_thread(self._timed_out, timeout) from None
        finally:
            self._forget_waiter(waiter)
        return self._get()

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The op's error, or None if it succeeded."""
        try:
            self.result(timeout)
        except WaitTimeout:
            raise
        except Exception as error:  # not a LorryError: from the function given to `map`
            if self.done():
                return error
            raise
        return None

    def done(self) -> bool:
        return self._outcome is not None

    def cancelled(self) -> bool:
        outcome = self._outcome
        return outcome is not None and isinstance(outcome.error, OpCancelled)

    def cancel(self) -> bool:
        """Withdraw the op if no worker has it yet. Ops behind it go on. False if it was too late."""
        return not self.done() and self._process.cancel(self)

    def status(self) -> str:
        """In words: what this op waits for now (its place in the queue, an estimate, a missing worker)."""
        return "done" if self.done() else self._process.explain(self)

    def add_done_callback(self, callback: Callable[..., object], *, context: Any = None) -> None:
        """Call `callback(self)` once the result is there (from the listener's thread)."""
        self._when_done(lambda: callback(self))

    def future(self) -> concurrent.futures.Future[T]:
        """A `concurrent.futures.Future` with the same result."""
        plain: concurrent.futures.Future[T] = concurrent.futures.Future()
        plain.set_running_or_notify_cancel()

        def copy() -> None:
            try:
                plain.set_result(self._get())
            except Exception as error:  # noqa: BLE001  what `map`'s function raised belongs to the waiter, too
                plain.set_exception(error)

        self._when_done(copy)
        return plain

    def map(self, function: Callable[[T], U]) -> APIFuture[U]:
        """A future whose value is `function(value)`; the op runs once."""
        return _Mapped(self, function)

    @property
    def timing(self) -> OpTiming:
        """When and where the op ran. Raises AttributeError until it is done."""
        outcome = self._outcome
        if outcome is None:
            raise AttributeError("timing: the op is not done yet")
        info = outcome.info
        return OpTiming(
            total_seconds=self._resolved_at - self._made_at,
            compute_seconds=info["milliseconds"] / 1000 if "milliseconds" in info else None,
            worker=info.get("worker"),
            cycle=info.get("cycle"),
            attempt=info.get("attempt"),
        )

    @property
    def async_result(self) -> AsyncResult:
        """Celery's own handle on the same task."""
        return self._process.app.AsyncResult(self.task_id)

    # ----------------------------------------------------------------------------------------- for the listener

    def _resolve(self, outcome: Outcome | None) -> None:
        assert outcome is not None
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = outcome
            self._resolved_at = time.monotonic()
            waiters, self._waiters = self._waiters, []
            callbacks, self._callbacks = self._callbacks, []
        for waiter in waiters:
            _finish(waiter, None)
        for callback in callbacks:
            try:
                callback()
            except Exception:  # the user's; the listener's thread must go on
                log.exception("a callback of %s (%s) failed", self.op, self.task_id)

    def _interrupt(self, error: LorryError) -> None:
        """End the present waits with an error that is not the op's own; the op goes on."""
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _finish(waiter, error)

    @property
    def _waited_seconds(self) -> float | None:
        """How long somebody has been waiting for this; None if nobody is."""
        return time.monotonic() - self._waiting_since if self._waiters else None

    # ------------------------------------------------------------------------------------------------ internals

    def _new_waiter(self) -> concurrent.futures.Future[None]:
        self._process.check_fork()
        waiter: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._lock:
            if self._outcome is None:
                if not self._waiters:
                    self._waiting_since = time.monotonic()
                self._waiters.append(waiter)
                return waiter
        _finish(waiter, None)
        return waiter

    def _forget_waiter(self, waiter: concurrent.futures.Future[None]) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _when_done(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if self._outcome is None:
                self._callbacks.append(callback)
                return
        callback()

    def _get(self) -> T:
        outcome = self._outcome
        assert outcome is not None
        self._retrieved = True
        if outcome.error is not None:
            raise outcome.error
        with self._lock:
            if self._value is None:
                self._value = (self._decode(outcome),)
            return self._value[0]

    def _timed_out(self, timeout: float | None) -> WaitTimeout:
        return WaitTimeout(
            f"no result after {timeout:g} s: {self.status()}. The op goes on; wait again, or cancel() it",
            job=self.job,
            op=self.op,
            seq=self.seq,
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"'{name}': this is the future of {self.op}, not its result yet; use `await future`, "
            "`future.result()` or `await future.result_async()` first"
        )

    def __repr__(self) -> str:
        state = "done" if self.done() else "pending"
        return f"<{type(self).__name__} {self.op} {self.task_id} {state}>"

    def __del__(self) -> None:
        outcome = self.__dict__.get("_outcome")
        if outcome is not None and outcome.error is not None and not self._retrieved and not self.cancelled():
            log.error("nobody looked at the result of %s (%s), and it failed: %s", self.op, self.task_id, outcome.error)


def _finish(waiter: concurrent.futures.Future[None], error: BaseException | None) -> None:
    if waiter.set_running_or_notify_cancel():  # False: the wait was cancelled meanwhile
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


APIFutureResult = APIFuture


class _View(APIFuture[T]):
    """Another face of one future: it has no state of its own, so that every wait is a wait on `inner`."""

    def __init__(self, inner: APIFuture[Any]) -> None:
        self.task_id, self.op, self.job, self.seq = inner.task_id, inner.op, inner.job, inner.seq
        self._process = inner._process
        self._inner = inner

    def _new_waiter(self) -> concurrent.futures.Future[None]:
        return self._inner._new_waiter()

    def _forget_waiter(self, waiter: concurrent.futures.Future[None]) -> None:
        self._inner._forget_waiter(waiter)

    def _when_done(self, callback: Callable[[], object]) -> None:
        self._inner._when_done(callback)

    def done(self) -> bool:
        return self._inner.done()

    def cancelled(self) -> bool:
        return self._inner.cancelled()

    def cancel(self) -> bool:
        return self._inner.cancel()

    def __del__(self) -> None:
        """The inner future reports an error that nobody looked at. Never awaited is fine: the op runs all the same."""


class _Mapped(_View[U]):
    """What `future.map(function)` gives."""

    def __init__(self, inner: APIFuture[Any], function: Callable[[Any], U]) -> None:
        super().__init__(inner)
        self._function = function
        self._once = threading.Lock()
        self._mapped: tuple[U] | None = None

    def _get(self) -> U:
        value = self._inner._get()
        with self._once:
            if self._mapped is None:
                self._mapped = (self._function(value),)
            return self._mapped[0]


class Submission(_View[T], Coroutine[Any, Any, Any]):
    """What `op_async(...)` returns. The op is submitted already; this object suits every way of waiting for it:

    `await sub` gives the `APIFuture` (for ops of two levels) or the value (for ops of one level);
    `sub.result()`, `await sub.result_async()` and `asyncio.gather(sub, ...)` give the value;
    `asyncio.create_task(sub)` and `asyncio.run(sub)` do what `await sub` does.
    """

    # asyncio takes an object with this attribute for a future, so gather() waits for the value itself.
    _asyncio_future_blocking = False

    def __init__(self, inner: APIFuture[T], *, levels: int) -> None:
        super().__init__(inner)
        self._levels = levels
        self._steps: Generator[Any, None, Any] | None = None
        self._wait_cancelled = False
        self._asyncio_callbacks: list[_LoopCall] = []

    def _get(self) -> T:
        value: T = self._inner._get()
        return settle(value) if self._levels == 1 else value

    def cancelled(self) -> bool:
        return self._wait_cancelled or self._inner.cancelled()

    def cancel(self, msg: object = _BY_USER) -> bool:
        """Withdraw the op if no worker has it yet.

        asyncio calls this too, when a `gather` over submissions is cancelled (with `msg`), or when Python 3.11's
        `wait_for` of one times out. That ends the wait and never the op.
        """
        if msg is _BY_USER and not _asked_by_asyncio():
            return self._inner.cancel()
        self._wait_cancelled = True
        callbacks, self._asyncio_callbacks = self._asyncio_callbacks, []
        for call in callbacks:
            call.run(self)
        return True

    def result(self, timeout: float | None = None) -> T:
        if self._wait_cancelled and _asked_by_asyncio():  # Python 3.11's `wait_for`, after its timeout
            raise asyncio.CancelledError
        return super().result(timeout)

    @property
    def timing(self) -> OpTiming:
        return self._inner.timing

    def _make_cancelled_error(self) -> BaseException:
        if self._wait_cancelled:
            return asyncio.CancelledError()
        error = self._inner.exception()
        assert error is not None
        return error

    def __await__(self) -> Generator[Any, None, Any]:
        if self._levels == 1:
            return self.result_async().__await__()
        return self._admitted().__await__()

    async def _admitted(self) -> APIFuture[T]:
        await self._process.admission()
        return self._inner

    # ---------------------------------------------------------------------------------- asyncio's future protocol

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def add_done_callback(self, callback: Callable[..., object], *, context: Any = None) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._when_done(lambda: callback(self))
            return
        self._wait_cancelled = False  # somebody waits again
        call = _LoopCall(loop, callback, context or contextvars.copy_context())
        self._asyncio_callbacks.append(call)
        self._when_done(lambda: self._run_call(call))

    def _run_call(self, call: _LoopCall) -> None:
        if call in self._asyncio_callbacks:
            self._asyncio_callbacks.remove(call)
            call.run(self)

    def remove_done_callback(self, callback: Callable[..., object]) -> int:
        kept = [call for call in self._asyncio_callbacks if call.callback != callback]
        removed = len(self._asyncio_callbacks) - len(kept)
        self._asyncio_callbacks = kept
        return removed

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._inner.exception(timeout)

    # --------------------------------------------------------------------------------- the coroutine protocol

    def send(self, value: Any) -> Any:
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.throw(*error)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()


def _asked_by_asyncio() -> bool:
    """Whether the method that asks was called by asyncio and not by the user's own code."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("asyncio.")


@dataclass(eq=False)
class _LoopCall:
    """A callback that asyncio gave, to be run in its loop."""

    loop: asyncio.AbstractEventLoop
    callback: Callable[..., object]
    context: contextvars.Context

    def run(self, argument: object) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.callback, argument, context=self.context)
