"""One job for tritonclient, as JSON on stdin; its replies as JSON on stdout.

Runs in the server's environment.
"""

from __future__ import annotations

import base64
import json
import queue
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

KINDS = {
    "max_tokens": np.int32,
    "top_k": np.int32,
    "stop_token_ids": np.int32,
    "seed": np.uint64,
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "stream": np.bool_,
    "speculation": np.bool_,
    "ignore_eos": np.bool_,
    "exclude_input_in_output": np.bool_,
    "return_token_ids": np.bool_,
}


def tensor(name, value):
    values = value if isinstance(value, list) else [value]
    values = [base64.b64decode(v["base64"]) if isinstance(v, dict) else v for v in values]
    if name in KINDS:
        array = np.array(values, dtype=KINDS[name])
    else:
        array = np.array(
            [v if isinstance(v, bytes) else v.encode() for v in values], dtype=np.object_
        )
    found = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    found.set_data_from_numpy(array)
    return found


def plain(array):
    return [v.decode() if isinstance(v, bytes) else v for v in array.tolist()]


def answer(job, requests):
    """``requests`` over one stream, all at once; an error ends the stream."""
    replies = [{"responses": [], "error": None} for _ in requests]
    arrived = queue.Queue()
    with triton.InferenceServerClient(job["url"]) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        for i, request in enumerate(requests):
            inputs = [tensor(name, value) for name, value in request.items()]
            client.async_stream_infer(
                job["model"], inputs, request_id=str(i), enable_empty_final_response=True
            )
        left, count = len(requests), 0
        while left and job.get("cancel_after") != count:
            result, error = arrived.get(timeout=50)
            if error is not None:
                replies[0]["error"] = error.message()
                break
            response = result.get_response()
            if response.outputs:
                found = {
                    output.name: plain(result.as_numpy(output.name)) for output in response.outputs
                }
                replies[int(response.id)]["responses"].append(found)
                count += 1
            left -= response.parameters["triton_final_response"].bool_param
        client.stop_stream(cancel_requests="cancel_after" in job)
    return replies


def main():
    job = json.load(sys.stdin)
    requests = job["requests"]
    groups = [requests] if job.get("one_stream") else [[request] for request in requests]
    with ThreadPoolExecutor(len(groups)) as pool:
        replies = [
            reply for group in pool.map(lambda group: answer(job, group), groups) for reply in group
        ]
    json.dump(replies, sys.stdout)


if __name__ == "__main__":
    main()
