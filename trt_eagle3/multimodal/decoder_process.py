"""Program of a decoder process: reads jobs from a socket, returns arrays in shared memory.

It decodes untrusted input. So it holds no engine, it can be killed at any time, and its replies are
JSON, which is safe to parse. It imports Pillow, numpy and (for a video) PyAV, but neither torch nor
a tokenizer.

Messages of the SOCK_SEQPACKET socket, to the process: ``{"job", "size"}``, and ``{}`` after each
video frame that the parent has read. From the process, for each job: ``{"begun"}``, parts
``{"facts", "shape"}``, and finally ``{"done"}`` or ``{"error"}``. Encoded bytes and arrays are in a
`SharedArena`. The descriptor of a new arena is sent with the job. While the parent reads a frame,
the process decodes the next one, but no further.
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

# above the largest message: the times of 7,200 frames take 144,000 bytes
MAX_MESSAGE_BYTES = 1 << 18
# bytes of address space for an interpreter, its libraries and the threads of a video codec
_BASE_MEMORY = 4 << 30
# bytes per pixel of the largest permitted image: decoded, upright, resized, cut; codec frames
_MEMORY_PER_PIXEL = 64


def main(socket_descriptor: int, lifeline: int) -> None:
    """Run jobs until the socket or the lifeline, a pipe that the parent holds, is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
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
    """Run one job and send its parts."""
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
    """Limit the memory for untrusted input. A policy without a pixel limit sets none."""
    if policy.max_pixels is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = _BASE_MEMORY + _MEMORY_PER_PIXEL * policy.max_pixels
    resource.setrlimit(
        resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
