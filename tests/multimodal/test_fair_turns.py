"""Who is next where many want few places."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from trt_eagle3.errors import RequestCancelledError
from trt_eagle3.multimodal.caller import Caller
from trt_eagle3.multimodal.fair_turns import FairTurns


class Hall:
    """Callers that come one after the other and stay until they are told to leave."""

    def __init__(self, count: int) -> None:
        self.turns = FairTurns(count)
        self.served: list[str] = []
        self._threads = ThreadPoolExecutor(32)
        self._may_leave = threading.Semaphore(0)
        self._stays: list[Future[None]] = []

    def come(self, name: str, caller: Caller) -> None:
        def stay() -> None:
            with self.turns.turn(caller):
                self.served.append(name)
                self._may_leave.acquire()

        num_waiting, num_served = len(self.turns._waiting), len(self.served)
        self._stays.append(self._threads.submit(stay))
        while len(self.turns._waiting) == num_waiting and len(self.served) == num_served:
            time.sleep(0.001)

    def leave(self, count: int) -> None:
        """One after the other leaves, and who follows has come in."""
        for _ in range(count):
            expected = min(len(self.served) + 1, len(self._stays))
            self._may_leave.release()
            while len(self.served) < expected:
                time.sleep(0.001)

    def close(self) -> None:
        self._may_leave.release(len(self._stays))
        for stay in self._stays:
            stay.result(60)
        self._threads.shutdown()


def test_client_never_holds_all_places() -> None:
    hall = Hall(3)
    for i in range(5):
        hall.come(f"a{i}", Caller("a"))
    assert hall.served == ["a0", "a1"]
    hall.come("b", Caller("b"))
    assert hall.served == ["a0", "a1", "b"]
    hall.close()
    assert sorted(hall.served) == ["a0", "a1", "a2", "a3", "a4", "b"]


def test_free_place_goes_to_the_client_that_holds_fewest() -> None:
    hall = Hall(2)
    hall.come("a0", Caller("a"))
    hall.come("b0", Caller("b"))
    for i in range(1, 4):
        hall.come(f"a{i}", Caller("a"))
    hall.come("c0", Caller("c"))
    hall.leave(1)
    assert hall.served[2] in {"a1", "c0"}
    hall.leave(1)
    assert set(hall.served[2:]) == {"a1", "c0"}, "nobody has two while another has none"
    hall.close()


def test_clients_take_turns_at_one_place() -> None:
    hall = Hall(1)
    for name in ("a0", "a1", "a2", "b0", "b1"):
        hall.come(name, Caller(name[0]))
    hall.leave(4)
    assert hall.served == ["a0", "b0", "a1", "b1", "a2"]
    hall.close()


def test_requests_of_one_client_take_turns() -> None:
    hall, album, single = Hall(3), Caller("a"), Caller("a")
    for i in range(4):
        hall.come(f"album{i}", album)
    hall.come("single", single)
    hall.leave(1)
    assert hall.served == ["album0", "album1", "single"]
    hall.close()


def test_requests_of_unknown_clients_are_clients_of_their_own() -> None:
    hall = Hall(3)
    for i in range(4):
        hall.come(f"r{i}", Caller())
    assert hall.served == ["r0", "r1", "r2"]
    hall.close()


def test_cancelled_request_gives_its_place_in_the_queue_up() -> None:
    turns = FairTurns(2)
    with turns.turn(Caller()), turns.turn(Caller()):
        for _ in range(2):
            with pytest.raises(RequestCancelledError), turns.turn(Caller(cancelled=lambda: True)):
                raise AssertionError
    for _ in range(2):
        with turns.turn(Caller()), turns.turn(Caller()):  # nobody is before them, or stayed
            pass
