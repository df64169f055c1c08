"""SGLang's scheduler process: its scheduler, with what an engine must do beyond it. Imports SGLang: see sglang.py.

- a request that is aborted while the scheduler is paused, or after it was retracted, ends at once with what it has
- sequences are scored while requests are kept where they are
- the prompt cache can be forgotten while requests run: what they go on with is not found by others
- a scheduler that waits or is paused sleeps, and one that fails ends its own process only
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil
import torch
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.mem_cache.common import release_kv_cache
from tqdm import tqdm

from skyrl_train.engines.sglang import sampler

SCORE = "score-"
"""What ids of requests begin with that are scored, also while others are kept."""


class Scheduler(sglang_scheduler.Scheduler):
    running_batch: ScheduleBatch
    last_batch: Any
    chunked_req: Req | None
    waiting_queue: list[Req]
    result_queue: deque[Any]
    """With overlap: batches and their results that are not written down; empty while paused."""
    _engine_paused: bool
    _pending_chunked_abort_req: Req | None

    _generation = 0
    """Grows whenever the prompt cache is forgotten."""
    _kept: tuple[Any, ...] | None = None
    """What was running and queued when scoring began; None when not scoring beside a pause."""

    # -- prompt cache ------------------------------------------------------------------------------------------------

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        req.cache_salt = str(self._generation)
        super()._add_request_to_queue(req, is_retracted)

    def flush_cache(self, empty_cache: bool = True) -> bool:
        """Nothing that was read before is found again; where nothing runs its memory is freed at once."""
        self._generation += 1
        for req in self.waiting_queue:
            req.cache_salt = str(self._generation)
        if self._kept is None and self.is_fully_idle(ignore_waiting=self._engine_paused):
            super().flush_cache(empty_cache and self.device != "cpu")  # there it only looks for garbage, for long
        return True

    # -- pausing -----------------------------------------------------------------------------------------------------

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        if self.enable_overlap and self.last_batch:
            self._write_down()
        self._end_aborted()
        super().pause_generation(recv_req)

    def _write_down(self) -> None:
        """With overlap a token is sampled before the last one is written down: write it, it is of these weights."""
        self.process_batch_result(*self.result_queue.popleft())
        last, self.last_batch = self.last_batch, None
        self.running_batch.batch_is_full = False
        if last.forward_mode.is_extend():
            last.filter_batch(chunked_req_to_exclude=[self.chunked_req, last.chunked_req])
            if self.running_batch.is_empty():
                self.running_batch = last
            elif not last.is_empty():
                self.running_batch.merge_batch(last)

    def _record_scheduler_state_for_paused_engine(self) -> None:
        super()._record_scheduler_state_for_paused_engine()
        self.cur_batch_for_debug = None  # or the watchdog takes a long pause for a batch that hangs
        self.maybe_sleep_on_idle()

    # -- aborting ----------------------------------------------------------------------------------------------------

    def abort_request(self, recv_req: AbortReq) -> None:
        begun = [req for req in self.waiting_queue if req.output_ids and _means(recv_req, req)]
        self.waiting_queue = [req for req in self.waiting_queue if req not in begun]
        for req in begun:
            self._release_aborted_request(req)
            self._end(req)
        super().abort_request(recv_req)
        if self._engine_paused:
            self._end_aborted()

    def process_pending_chunked_abort(self) -> None:
        """A request that was retracted and reads its tokens again returns them."""
        req = self._pending_chunked_abort_req
        if req is not None and req.output_ids and req is self.chunked_req:
            self._pending_chunked_abort_req = self.chunked_req = None
            self._release_aborted_request(req)
            release_kv_cache(req, self.tree_cache, is_insert=False)
            self._end(req)
        super().process_pending_chunked_abort()

    def _end_aborted(self) -> None:
        """Without the step after which SGLang does it; nothing of them may be in flight."""
        self.process_pending_chunked_abort()
        for req in self.collect_inflight_reqs():
            if req.to_finish is not None and not req.finished():
                release_kv_cache(req, self.tree_cache)
                self._end(req)

    def _end(self, req: Req) -> None:
        req.finished_reason, req.to_finish = req.to_finish or FINISH_ABORT(), None
        self.output_streamer.stream_output([req], req.return_logprob)

    # -- scoring beside a pause --------------------------------------------------------------------------------------

    def ingest_requests(self) -> list[Any]:
        if self._kept is not None and self._all_scored():
            self._put_back()  # before anything is received that is meant for what is kept
        received: list[Any] = super().ingest_requests()
        if self._kept is None and self._engine_paused and any(map(_is_scored, self.waiting_queue)):
            self._set_aside()
        return received

    def on_idle(self) -> None:
        if self._kept is None:  # or the memory of what is kept looks lost
            super().on_idle()
        elif self.waiting_queue:
            self._make_room()

    def _make_room(self) -> None:
        """What is scored does not fit beside what is kept: that gives its memory back, and goes on as if retracted.

        Where nothing is left to give back, the scores end as aborted.
        """
        scored = self.waiting_queue
        self._put_back()
        empty = not self.collect_inflight_reqs() and self.chunked_req is None
        others, self.waiting_queue = self.waiting_queue, []
        super().pause_generation(PauseGenerationReqInput(mode="retract"))
        self.waiting_queue += [*others, *scored]
        if empty:
            self.abort_request(AbortReq(rid=SCORE))

    def _set_aside(self) -> None:
        scored = [req for req in self.waiting_queue if _is_scored(req)]
        others = [req for req in self.waiting_queue if not _is_scored(req)]
        self._kept = (self.running_batch, self.last_batch, self.chunked_req, others)
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.last_batch = self.chunked_req = None
        self.waiting_queue = scored
        self._engine_paused = False

    def _all_scored(self) -> bool:
        batches = [self.running_batch, *([self.last_batch] if self.last_batch else [])]
        under_way = any(not req.finished() for batch in batches for req in batch.reqs) or self.chunked_req is not None
        return not (under_way or self.waiting_queue or getattr(self, "result_queue", None))

    def _put_back(self) -> None:
        assert self._kept is not None
        self.running_batch, self.last_batch, self.chunked_req, self.waiting_queue = self._kept
        self._kept = None
        self._engine_paused = True


def _is_scored(req: Req) -> bool:
    return bool(req.rid.startswith(SCORE))


def _means(abort: AbortReq, req: Req) -> bool:
    return bool(abort.abort_all or req.rid.startswith(abort.rid))


@dataclass(frozen=True)
class Settings:
    """What every scheduler process is told."""

    tokenizer: Any
    threads: int | None
    """That compute on a CPU; None: as the system says."""


def run_scheduler(settings: Settings, *args: Any, **kwargs: Any) -> None:
    """In place of SGLang's `run_scheduler_process`, with its arguments."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    tqdm.set_lock(threading.RLock())  # its own one is a file in /dev/shm, which outlives a process that is killed
    _spare_the_parent()
    sampler.install(settings.tokenizer)
    sglang_scheduler.Scheduler = Scheduler
    sglang_scheduler.run_scheduler_process(*args, **kwargs)
    _end_this_process(0)  # taking all modules apart takes seconds


def _spare_the_parent() -> None:
    """SGLang's processes end the one that started them when they fail; here it sees itself that they ended."""
    parent, send = os.getppid(), psutil.Process.send_signal

    def send_signal(process: psutil.Process, number: int) -> None:
        if process.pid == parent and number == signal.SIGQUIT:
            _end_this_process(1)
        send(process, number)

    psutil.Process.send_signal = send_signal  # type: ignore[method-assign,assignment]


def _end_this_process(status: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(status)
