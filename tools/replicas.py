"""What Ray and several replicas cost and bring: the measurement behind `docs/results/scale.md`.

    python -m tools.replicas ttft         `ragkv serve` and `ragkv serve --replicas 1`, one client, question by question
    python -m tools.replicas throughput   `ragkv serve` and `ragkv serve --replicas 2`, several clients, by turns
    python -m tools.replicas ceiling      `ragkv serve` and two of it, without Ray, each with half of the clients

Both services of a comparison run at the same time, each with a data folder of its own, and are asked by turns, so that
other work on the machine falls on both. RAGKV_* settings hold for both; each replica has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

from ragkv.cli.samples import samples_folder
from ragkv.client import Client, Said
from ragkv.locality import HEADER, affinity

QUESTIONS = (
    "Who founded Calloway Yard?",
    "How often does the light on Skerrow flash?",
    "What does the salt line do?",
    "Who wrote the tidebook?",
    "What colour is the ember wren?",
)


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """Run `ragkv serve` with these options, over the sample documents; yields its address."""
    folder.mkdir()
    told = folder / "told"
    command = [sys.executable, "-m", "ragkv.cli", "serve", "--port", "0", *options]
    given = {**os.environ, "RAGKV_THREADS": "1", "RAGKV_DATA": str(folder / "data"), "RAGKV_LOG_LEVEL": "warning"}
    with told.open("wb") as file:
        process = subprocess.Popen(command, env=given, stdout=file, stderr=file)
    try:
        while not (address := re.search(r"serving at (\S+)", told.read_text())):
            if process.poll() is not None:
                raise SystemExit(told.read_text())
            time.sleep(0.1)
        with Client(address[1]) as client:
            client.wait(client.upload(sorted(samples_folder().glob("*.md"))))
        yield address[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ttft(client: Client, question: str, tokens: int) -> float:
    """Return the milliseconds from sending a question to the first text of its answer."""
    started, first = time.perf_counter(), 0.0
    for event in client.stream(question, max_tokens=tokens):
        if isinstance(event, Said) and not first:
            first = time.perf_counter()
    return 1000 * ((first or time.perf_counter()) - started)


def compare_ttft(addresses: Sequence[str], count: int, tokens: int) -> None:
    """Ask each service `count` questions, one at a time, by turns."""
    found: list[list[float]] = [[], []]
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(address)) for address in addresses]
        for number in range(-len(QUESTIONS), count):  # the first round warms up
            order = (0, 1) if number % 2 else (1, 0)
            for which in order:
                took = ttft(clients[which], QUESTIONS[number % len(QUESTIONS)], tokens)
                if number >= 0:
                    found[which].append(took)
    alone, behind = (statistics.median(each) for each in found)
    quarters = [statistics.quantiles(each, n=4) for each in found]
    print(f"| `ragkv serve` | {alone:.1f} | {quarters[0][0]:.1f} to {quarters[0][2]:.1f} |")
    print(f"| `--replicas 1` | {behind:.1f} | {quarters[1][0]:.1f} to {quarters[1][2]:.1f} |")
    print(f"\nRay adds {behind - alone:.1f} ms to the median of {count} questions")


def rate(address: str, clients: int, seconds: float, tokens: int, spread: bool) -> float:
    """Return the questions a second that are answered to clients which ask without a pause.

    They send bare requests: `ragkv.client` would take a twentieth of the two cores for itself.

    Args:
        address: Of the service.
        clients: How many ask at a time.
        seconds: How long. Answers that come later do not count.
        tokens: Longest answer.
        spread: Each client asks in conversations of its own, else each question goes where there are fewest.
    """
    ends, counts = time.perf_counter() + seconds, [0] * clients

    def ask(number: int) -> None:
        with closing(HTTPConnection(address.removeprefix("http://"), timeout=120)) as connection:
            while time.perf_counter() < ends:
                body = {"question": QUESTIONS[(number + counts[number]) % len(QUESTIONS)], "max_tokens": tokens}
                headers = {"Content-Type": "application/json"}
                if spread:
                    body["conversation_id"] = name = f"{number} {counts[number]} {ends}"
                    headers[HEADER] = affinity("", "default", name)
                connection.request("POST", "/v1/answers", json.dumps(body), headers)
                response = connection.getresponse()
                text = response.read()
                if response.status != 200:
                    raise SystemExit(text.decode())
                counts[number] += time.perf_counter() < ends

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def compare_rates(one: Sequence[str], two: Sequence[str], asked: argparse.Namespace) -> None:
    """Ask by turns, for some seconds each: all clients at the services of `one`, or spread over those of `two`."""
    found: list[list[float]] = [[], []]
    for address in (*one, *two):
        rate(address, asked.clients, 3, asked.tokens, asked.spread)  # warms up
    for turn in range(asked.turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            addresses = (one, two)[which]

            def measure(address: str, clients: int = asked.clients // len(addresses)) -> float:
                return rate(address, clients, asked.seconds, asked.tokens, asked.spread)

            with ThreadPoolExecutor() as pool:
                found[which].append(sum(pool.map(measure, addresses)))
    first, second = (statistics.median(each) for each in found)
    print(f"| {asked.clients} | {asked.tokens} | {first:.2f} | {second:.2f} | {second / first:.2f} |")
    print(f"\n{[[round(each, 2) for each in turns] for turns in found]}")


def main() -> None:
    """Run one comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ttft", "throughput", "ceiling"))
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--spread", action="store_true", help="a conversation for each question")
    asked = parser.parse_args()
    options: dict[str, list[list[str]]] = {
        "ttft": [["--replicas", "1"]],
        "throughput": [["--replicas", "2"]],
        "ceiling": [[], []],
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        alone = stack.enter_context(served(Path(folder) / "alone"))
        others = [
            stack.enter_context(served(Path(folder) / f"other-{number}", *given))
            for number, given in enumerate(options[asked.what])
        ]
        load = " ".join(f"{each:.2f}" for each in os.getloadavg())
        if asked.what == "ttft":
            compare_ttft((alone, *others), asked.questions, asked.tokens)
        else:
            compare_rates([alone], others, asked)
        print(f"load average before and after: {load}; {' '.join(f'{each:.2f}' for each in os.getloadavg())}")


if __name__ == "__main__":
    main()
