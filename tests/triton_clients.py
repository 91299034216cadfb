"""Several clients of an inference server at once, half over HTTP and half over gRPC; run by the server's environment.

    python triton_clients.py HTTP_ADDRESS GRPC_ADDRESS MODEL IMAGES.npy LOGITS.npz

IMAGES [N,3,H,W] are dealt out among the clients, which send one or two at a time. LOGITS.npz holds `logits`
[N,classes], `labels` (the first class of each image, as the server names it) and `requests`, the number sent.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc  # type: ignore[import-not-found]  # lives in the server's environment
import tritonclient.http  # type: ignore[import-not-found]

CLIENTS = 8
TIMEOUT_S = 30.0
Share = list[tuple[list[int], Any, Any]]


def ask(library: Any, client: Any, model: str, images: Any, limit: dict[str, float]) -> tuple[Any, list[str]]:
    """Logits and first labels of one request, both from the server."""
    given = library.InferInput("images", list(images.shape), "FP32")
    given.set_data_from_numpy(images)
    logits = client.infer(model, [given], outputs=[library.InferRequestedOutput("logits")], **limit).as_numpy("logits")
    asked = library.InferRequestedOutput("logits", class_count=1)
    named = client.infer(model, [given], outputs=[asked], **limit).as_numpy("logits")
    return logits, [text.decode().split(":")[-1] for text in named.reshape(-1)]


def run_client(
    index: int, model: str, images: Any, start: Any, opened: Callable[[], Any], library: Any, limit: dict[str, float]
) -> Share:
    """Every CLIENTS-th image from `index` on, in requests of one and two images in turn."""
    mine, answers, size = list(range(index, len(images), CLIENTS)), [], 1
    with opened() as client:
        start.wait(TIMEOUT_S)
        while mine:
            now, mine = mine[:size], mine[size:]
            answers.append((now, *ask(library, client, model, images[now], limit)))
            size = 3 - size
    return answers


def main() -> None:
    http_address, grpc_address, model, source, target = sys.argv[1:]
    images = np.load(source)
    start = threading.Barrier(CLIENTS)

    def over_http() -> Any:
        return tritonclient.http.InferenceServerClient(http_address, network_timeout=TIMEOUT_S)

    def over_grpc() -> Any:
        return tritonclient.grpc.InferenceServerClient(grpc_address)

    with ThreadPoolExecutor(CLIENTS) as pool:
        kinds: Any = [(over_http, tritonclient.http, {}), (over_grpc, tritonclient.grpc, {"client_timeout": TIMEOUT_S})]
        running = [pool.submit(run_client, index, model, images, start, *kinds[index % 2]) for index in range(CLIENTS)]
        answers = [answer for client in running for answer in client.result(2 * TIMEOUT_S)]
    where = np.concatenate([indices for indices, _, _ in answers])
    order = np.argsort(where)
    logits = np.concatenate([part for _, part, _ in answers])[order]
    labels = np.concatenate([part for _, _, part in answers])[order]
    np.savez(Path(target), logits=logits, labels=labels, requests=2 * len(answers))


if __name__ == "__main__":
    main()
