"""The program of a decoder process: takes jobs from a socket, answers with arrays in shared memory.

It decodes what strangers send, so it can be killed at any time, holds no engine, and answers in
JSON, which can make its reader do nothing. It imports Pillow and numpy, for a video PyAV, and
neither torch nor a tokenizer.

Messages, of a SOCK_SEQPACKET socket: to it ``{"job", "size"}``, and ``{}`` when a frame of a video
has been read; from it for each job ``{"begun"}``, parts ``{"facts", "shape"}`` and at the end
``{"done"}`` or ``{"error"}``. Encoded bytes and arrays are in a `SharedArena`, whose descriptor
comes with a job when it is new. A video's next frame is decoded while the one before is read, and
no further.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.multimodal.media_job import MediaJob, run_job
from trt_eagle3.multimodal.policy import MediaPolicy
from trt_eagle3.multimodal.shared_arena import SharedArena

__all__ = ["MAX_MESSAGE_BYTES", "main"]

# more than the system sends at once: the times of 7,200 frames have 144,000 bytes
MAX_MESSAGE_BYTES = 1 << 18
# of address space: an interpreter, its libraries and the threads of a video codec
_BASE_MEMORY = 4 << 30
# of the largest permitted image: decoded, upright, resized, cut; a codec's frames
_MEMORY_PER_PIXEL = 64


def main(socket_descriptor: int, lifeline: int) -> None:
    """Serve jobs until the socket or the lifeline, a pipe that the parent holds, is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    with socket.socket(fileno=socket_descriptor) as link, contextlib.suppress(ConnectionError):
        arena: SharedArena | None = None
        while (message := socket.recv_fds(link, MAX_MESSAGE_BYTES, 1))[0]:
            if message[1]:
                if arena:
                    arena.close()
                arena = SharedArena(message[1][0])
            assert arena is not None
            _serve(link, json.loads(message[0]), arena)


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)


def _serve(link: socket.socket, message: dict[str, Any], arena: SharedArena) -> None:
    """Answer one job."""
    _send(link, {"begun": True})
    job = MediaJob.from_dict(message["job"])
    _limit_memory(job.policy)
    try:
        _answer(link, job, arena.array([message["size"]]).tobytes(), arena)
    except UserError as error:
        _send(link, {"error": "user", "message": str(error)})
    except EnvironmentMissingError as error:
        _send(link, {"error": "missing", "message": str(error)})
    except ConnectionError:
        raise
    except MemoryError:
        _send(
            link,
            {
                "error": "user",
                "message": f"{job.name}: takes too much memory to decode. Send a smaller one.",
            },
        )
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        _send(
            link,
            {
                "error": "user",
                "message": f"{job.name}: cannot be decoded ({reason}). Save it again.",
            },
        )


def _answer(link: socket.socket, job: MediaJob, data: bytes, arena: SharedArena) -> None:
    unread = False

    def allocate(shape: tuple[int, ...]) -> NDArray[np.uint8]:
        if unread and not link.recv(MAX_MESSAGE_BYTES):
            raise ConnectionError("the parent left")
        return arena.array(shape)

    with contextlib.closing(run_job(job, data, allocate)) as parts:
        for part in parts:
            shape = None if part.array is None else part.array.shape
            _send(link, {"facts": part.facts, "shape": shape})
            unread = job.kind == "video" and shape is not None
    if unread and not link.recv(MAX_MESSAGE_BYTES):
        raise ConnectionError("the parent left")
    _send(link, {"done": True})


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    link.send(json.dumps(message).encode())


def _limit_memory(policy: MediaPolicy) -> None:
    """What a stranger's file may take; on the user's own machine anything."""
    if policy.max_pixels is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = _BASE_MEMORY + _MEMORY_PER_PIXEL * policy.max_pixels
    resource.setrlimit(
        resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
