"""The simulated cluster against closed forms, and what must grow or shrink with what."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("simpy")

from benchmarks.scale import ClusterParams, ScaleResult, ScaleSimulation, simulate
from benchmarks.scale_load import ScaleLoad, SimulatedQuestion, apart, zipf_ranks
from benchmarks.scale_routing import POLICIES, Directory, HashRouter, RunningQuestions, SpillParams, router_of
from benchmarks.scale_speeds import LLAMA_8B, ReplicaSpeeds
from benchmarks.scale_tiers import HostTier, SharedStore, StoreLookup
from ragkv.cli import run
from ragkv.errors import InputError

SECOND = replace(LLAMA_8B, load=0.0, start=1.0, pass_own=0.0, step_shared=0.0, step_own=0.0, latency=0.0)
"""A question takes a second of one replica, and nothing else costs anything."""
SMALL = ScaleLoad(rate=20.0, questions=600, warmup=2000, collections=50, chunks=10**6)


def one_at_a_time(replicas: int = 1) -> ClusterParams:
    return ClusterParams(replicas, SECOND, batch=1, queue=10**6)


def queued(utilisation: float, variation: float) -> ScaleResult:
    load = ScaleLoad(utilisation, 20_000, 0, top_k=1, neighbours=1, answer_tokens=1, variation=variation)
    return simulate(one_at_a_time(), load, "random")


# Closed forms


def test_equal_questions_wait_as_long_as_m_d_1_says() -> None:
    result = queued(0.6, 0.0)
    assert np.mean(result.ttft) - 1 == pytest.approx(0.6 / (2 * (1 - 0.6)), rel=0.05)
    assert result.busy[0] == pytest.approx(0.6, rel=0.02)


def test_exponential_questions_wait_as_long_as_m_m_1_says() -> None:
    assert np.mean(queued(0.5, 1.0).ttft) - 1 == pytest.approx(0.5 / (1 - 0.5), rel=0.1)


@pytest.mark.parametrize(("capacity", "exponent"), [(100, 1.0), (1000, 0.6)])
def test_the_host_tier_hits_as_often_as_che_says(capacity: int, exponent: float) -> None:
    """H. Che, Y. Tung and Z. Wang, "Hierarchical web caching systems" (IEEE JSAC 20(7), 2002), eq. 4 and 5."""
    ranks = 20_000
    shares = np.arange(1, ranks + 1) ** -exponent
    shares /= shares.sum()
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - np.exp(-shares * middle)).sum() < capacity else (low, middle)
    expected = (shares * (1 - np.exp(-shares * low))).sum()
    tier, drawn = HostTier(capacity), zipf_ranks(ranks, exponent, 150_000, np.random.default_rng(3)).tolist()
    hits = [tier.touch(rank) for rank in drawn]
    assert np.mean(hits[30_000:]) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.4])
def test_ranks_are_drawn_by_zipfs_law(exponent: float) -> None:
    count, ranks = 200_000, 50
    drawn = Counter(zipf_ranks(ranks, exponent, count, np.random.default_rng(1)).tolist())
    shares = np.arange(1, ranks + 1) ** -exponent
    expected = count * shares / shares.sum()
    assert set(drawn) == set(range(ranks))
    # Chi squared with 49 degrees of freedom exceeds 85.4 once in a thousand times.
    assert sum((drawn[rank] - expected[rank]) ** 2 / expected[rank] for rank in range(ranks)) < 85.4


def test_a_hundred_million_ranks_are_drawn_without_listing_them() -> None:
    drawn = zipf_ranks(10**8, 1.0, 100_000, np.random.default_rng(1))
    assert 0 <= drawn.min() < drawn.max() < 10**8
    # Half of the weight lies below the square root.
    assert np.mean(drawn < 10**4) == pytest.approx((np.log(10**4) + 0.5772) / (np.log(10**8) + 0.5772), abs=0.01)


def test_the_passages_of_a_question_differ() -> None:
    rows = apart(np.array([[3, 3, 4], [9, 9, 9], [1, 2, 3]]), 10)
    assert rows.tolist() == [[3, 4, 5], [9, 0, 1], [1, 2, 3]]


# Conservation


@pytest.mark.parametrize("policy", POLICIES)
def test_every_question_is_answered_or_refused_and_every_chunk_found_once(policy: str) -> None:
    cluster = ClusterParams(4, LLAMA_8B, queue=2, batch=2, node_bytes=2**40)
    result = simulate(cluster, SMALL, policy)
    assert result.asked == SMALL.questions == result.answered + result.refused
    assert result.refused, "the queues are short"
    assert result.host + result.stored + result.encoded == result.answered * SMALL.top_k
    assert min(result.host, result.stored, result.encoded) > 0
    assert result.received == result.stored * LLAMA_8B.read_bytes
    assert result.sent == result.encoded * LLAMA_8B.chunk_bytes
    assert len(result.ttft) == result.answered
    assert 0 < min(result.busy) <= max(result.busy) <= 1


def test_a_seed_decides_everything() -> None:
    cluster = ClusterParams(4, LLAMA_8B)
    first, again = (simulate(cluster, SMALL, "least-loaded") for _ in range(2))
    assert first == again
    assert simulate(cluster, replace(SMALL, seed=2), "least-loaded") != first


def test_every_policy_is_asked_the_same_questions() -> None:
    first, again = (list(SMALL.drawn(100, "questions")) for _ in range(2))
    assert first == again
    slower = replace(SMALL, rate=9.0).drawn(100, "questions")
    assert [each.chunks for each in first] == [each.chunks for each in slower]


# More of one is less of another


def hit_ratio(**given: Any) -> float:
    result = simulate(ClusterParams(4, LLAMA_8B, **given), replace(SMALL, rate=2.0), "round-robin")
    return result.host / (result.host + result.stored + result.encoded)


def test_more_host_memory_is_more_hits() -> None:
    ratios = [hit_ratio(host_bytes=gib * 2**30) for gib in (0, 4, 16, 64)]
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[-1]
    assert ratios[1] > 0


def test_more_questions_wait_longer_and_more_replicas_less() -> None:
    def slowest(replicas: int, rate: float) -> float:
        cluster = ClusterParams(replicas, LLAMA_8B, nodes=8, queue=10**6)
        return simulate(cluster, replace(SMALL, rate=rate), "least-loaded").percentile(99)

    assert slowest(4, 2.0) < slowest(4, 6.0)
    assert slowest(8, 6.0) < slowest(4, 6.0)


def test_a_smaller_store_encodes_more() -> None:
    encoded = [
        simulate(ClusterParams(4, LLAMA_8B, node_bytes=size), replace(SMALL, rate=2.0), "random").encoded
        for size in (2**45, 2**44, 2**42)
    ]
    assert encoded[0] < encoded[1] < encoded[2]


def test_hashing_the_collection_finds_more_in_host_memory_than_any_replica() -> None:
    cluster = ClusterParams(8, LLAMA_8B, nodes=8, spill=SpillParams(least=4))
    load = replace(SMALL, rate=4.0)
    found = {policy: simulate(cluster, load, policy) for policy in ("random", "hash")}
    assert found["hash"].host > 1.5 * found["random"].host


def test_questions_in_one_forward_share_what_it_costs() -> None:
    apart_ = replace(LLAMA_8B, pass_shared=0.1, pass_own=0.0, load=0.0)
    slow = simulate(ClusterParams(1, apart_), replace(SMALL, rate=8.0, questions=300), "random")
    quick = simulate(ClusterParams(1, replace(apart_, together=16)), replace(SMALL, rate=8.0, questions=300), "random")
    assert quick.percentile(50) < slow.percentile(50)


# A replica, step by step


def asked(at: float, tokens: int = 1, chunks: tuple[int, ...] = (0,)) -> SimulatedQuestion:
    return SimulatedQuestion(at, 0, chunks, tokens, 1.0)


def times(speeds: ReplicaSpeeds, *questions: SimulatedQuestion, **given: Any) -> ScaleResult:
    return ScaleSimulation(ClusterParams(1, speeds, **given), 100, "random", 1).run(questions)


def test_a_token_takes_a_step_and_the_last_one_none() -> None:
    steps = replace(SECOND, step_shared=0.1)
    result = times(steps, asked(0.0, tokens=4))
    assert result.ttft == pytest.approx((1.1,))
    assert result.seconds == pytest.approx(1.3)
    assert times(steps, asked(0.0)).ttft == pytest.approx((1.0,))


def test_an_answer_waits_for_the_question_that_comes_between_two_of_its_tokens() -> None:
    steps = replace(SECOND, step_shared=0.1)
    result = times(steps, asked(0.0, tokens=11), asked(1.25))
    assert result.ttft == pytest.approx((1.3 + 1.0 - 1.25, 1.1)), "the step that runs ends before the question starts"
    assert result.seconds == pytest.approx(3.0)


def test_a_chunk_that_is_missing_is_encoded_once_and_others_wait_for_it() -> None:
    speeds = replace(SECOND, encode=10.0, load=0.5, link=1e30)
    cluster = ClusterParams(2, speeds, host_bytes=0, nodes=1, node_bytes=100 * speeds.chunk_bytes)
    simulation = ScaleSimulation(cluster, 10**6, "round-robin", 1)
    chunk = next(c for c in range(100) if cluster.store(10**6).find(c, 0.0) is StoreLookup.MISSING)
    result = simulation.run([asked(0.0, chunks=(chunk,)), asked(2.0, chunks=(chunk,))])
    assert (result.encoded, result.stored) == (1, 1)
    assert result.ttft[0] == pytest.approx(11.0)
    assert result.ttft[1] == pytest.approx(11.0 - 2.0, abs=0.1), "it waits until the chunk is stored, and loads it"


# Tiers and routers


def test_the_chunk_that_was_used_longest_ago_leaves_first() -> None:
    directory = Directory(1)
    tier = HostTier(2, 5, directory)
    assert [tier.touch(chunk) for chunk in (1, 2, 1, 3, 2, 1)] == [False, False, True, False, False, False]
    assert directory.holders == {2: {5: None}, 1: {5: None}}


def test_a_store_evicts_what_nobody_asked_for_first() -> None:
    store = SharedStore(1000, 500, 1, 1.0, 1.0, 0.0)
    stored = [chunk for chunk in range(1000) if store.find(chunk, 0.0) is StoreLookup.STORED]
    assert 400 < len(stored) < 600
    kept = SharedStore(1000, 500, 1, 1.0, 1.0, 0.0)
    first = stored[0]
    kept.find(first, 0.0)
    for chunk in range(10_000, 10_499):
        kept.put(chunk, 0.0)
    assert kept.find(first, 1.0) is StoreLookup.STORED
    assert sum(kept.find(chunk, 1.0) is StoreLookup.STORED for chunk in stored[1:]) < 5


@pytest.mark.parametrize("fewest", [False, True])
def test_a_loaded_replica_passes_on_to_another_that_is_not(fewest: bool) -> None:
    router, running = HashRouter(4, SpillParams(1.25, 2), fewest=fewest), RunningQuestions(4)
    home, spilled = router.route(asked(0.0), running)
    assert not spilled
    for replica in range(4):
        running.add(replica, 1 + (replica == home))
    free = next(replica for replica in range(4) if replica != home)
    running.add(free, -1)
    other, spilled = router.route(asked(0.0), running)
    assert spilled
    assert other == free if fewest else other != home


def test_few_collections_move_when_a_replica_is_added() -> None:
    def homes(replicas: int) -> list[int]:
        router, running = HashRouter(replicas, SpillParams()), RunningQuestions(replicas)
        return [router.route(asked(0.0)._replace(collection=name), running)[0] for name in range(2000)]

    moved = [(old, new) for old, new in zip(homes(10), homes(11), strict=True) if old != new]
    assert {new for _, new in moved} == {10}
    assert len(moved) / 2000 == pytest.approx(1 / 11, abs=0.05)


def test_the_replica_that_holds_most_is_chosen_unless_it_is_loaded() -> None:
    directory, running = Directory(1), RunningQuestions(3)
    router = router_of("holders", 3, SpillParams(1.25, 2), directory, 1)
    question = asked(0.0, chunks=(7, 8))
    for chunk, replica in ((7, 1), (8, 1), (8, 2)):
        directory.add(chunk, replica)
    assert router.route(question, running) == (1, False)
    running.add(1, 2)
    assert router.route(question, running) == (2, True)


def test_what_does_not_exist_or_cannot_be_asked_is_refused() -> None:
    with pytest.raises(InputError, match="holders"):
        simulate(one_at_a_time(), SMALL, "by-colour")
    with pytest.raises(InputError, match="fewer collections"):
        ScaleLoad(1.0, chunks=1000, collections=100)
    with pytest.raises(InputError):
        replace(LLAMA_8B, passes=0)


# Size


@pytest.mark.scale
def test_a_thousand_replicas_and_a_hundred_million_chunks_take_less_than_a_minute() -> None:
    load = ScaleLoad(rate=1000.0, questions=100_000, warmup=300_000, chunks=10**8)
    began = time.process_time()
    result = simulate(ClusterParams(1000, LLAMA_8B, nodes=500), load, "hash")
    took = time.process_time() - began
    assert result.answered + result.refused == 100_000
    print(f"\n{took:.1f} s")  # seen with -s
    assert took < 60


# The command


def test_the_command_prints_writes_and_draws_a_row_for_each_policy_and_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "bench scale --replicas 2 --replicas 4 --policy hash --policy random --questions 200 --warmup 500"
    files = {"--json": "a.json", "--table": "a.md", "--plot": "a.svg"}
    options = [word for option, name in files.items() for word in (option, str(tmp_path / name))]
    assert run([*words.split(), *options]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(row["policy"], row["replicas"]) for row in rows] == [
        ("hash", 2),
        ("random", 2),
        ("hash", 4),
        ("random", 4),
    ]
    assert all(row["answered"] == 200 and 0 < row["ttft_p50"] <= row["ttft_p99"] for row in rows)
    assert all(row["host"] + row["store"] + row["encoded"] == pytest.approx(1) for row in rows)
    assert (tmp_path / "a.md").read_text().count("| hash |") == 2
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert "answers/s" in capsys.readouterr().out


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--policy", "by-colour"], ["--speeds", "a-mainframe"]):
        assert run(["bench", "scale", "--questions", "10", *wrong]) != 0
        assert "choose from" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    assert run(["bench", "scale"]) == 2
    assert "pip install 'simpy" in capsys.readouterr().err
