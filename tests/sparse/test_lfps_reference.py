"""LFPS step by step against a naive reference: tables, thresholds, neighbours, the sinks' share, bypass and output."""

from __future__ import annotations

import pytest
import torch

from ragkv.sparse.lfps import Lfps
from ragkv.sparse.lfps_candidates import thresholds
from ragkv.sparse.lfps_tables import TableMoments
from tests.sparse.naive_lfps import NaiveLfps
from tests.sparse.toy_request import Request, make_request

STEPS = 14


def request_with_sinks(seed: int) -> Request:
    """Return a request in which some heads attend to the sinks, and some steps to the tokens just before them."""
    request = make_request(rows=70, question=9, steps=STEPS, gapped=False, sharp=1.5, seed=seed)
    request.k[:4] = 0.0
    request.k[:4, :, 0] = 6.0
    request.q[9 + 4 : 9 + 9, 2:6, 0] = 6.0
    for at in (2, 3, 11):
        request.k[70 + at - 3, 0] = 4 * request.q[9 + at, 0]
        request.k[70 + at - 1, 1] = 4 * request.q[9 + at, 6]
    return request


@pytest.mark.parametrize("heads", ["kv", "query"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_step_is_that_of_the_reference(heads, seed):
    request = request_with_sinks(seed)
    params = Lfps(least=6, share=0.05, bypass=0.85, heads=heads)
    naive, state = NaiveLfps(request, params), params.start()
    request.prefill(state)
    bypassed, local_wins, lists = 0, 0, set()
    for at in range(STEPS):
        out, wanted = request.step(state, at), naive.step(at)
        rho = torch.tensor(wanted.rho, dtype=torch.float64)
        torch.testing.assert_close(state.rho[0], rho, rtol=0, atol=1e-12)
        assert torch.equal(state.bypassed[0], rho > 0.85)
        torch.testing.assert_close(out, torch.stack(wanted.out), rtol=0, atol=1e-12)
        read = [len(found) + params.sinks for found in wanted.candidates]
        assert state.key_counts[-1].read.tolist() == read
        assert_same_tables(state.scores[0], naive)
        bypassed += int((rho > 0.85).sum())
        local_wins += sum(wanted.local_wins)
        lists |= set(map(len, wanted.candidates))
    assert bypassed > 5
    assert local_wins > 2
    assert len(lists) > 5


def assert_same_tables(scores, naive: NaiveLfps) -> None:
    vertical, slash = scores.vertical.scores, scores.slash.scores.flip(-1)
    for found, tables in ((vertical, naive.vertical), (slash, naive.slash)):
        wanted = torch.zeros_like(found)
        for number, table in enumerate(tables):
            for index, value in table.items():
                wanted[number, index] = value
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_threshold_is_the_mean_and_beta_deviations_weighted_by_the_root_of_the_kurtosis():
    """Kurtoses 64 and 4: their geometric mean is 16, the factors are sqrt(16/64) = .5 and sqrt(16/4) = 2."""

    def moments(mean: float, deviation: float, kurtosis: float) -> TableMoments:
        return TableMoments(*(torch.tensor([x], dtype=torch.float64) for x in (mean, deviation, kurtosis)))

    tau_v, tau_s = thresholds(moments(1.0, 10.0, 64.0), moments(2.0, 20.0, 4.0), 0.2)
    assert (tau_v.item(), tau_s.item()) == pytest.approx((1 + 0.2 * 10 * 0.5, 2 + 0.2 * 20 * 2))
    tau_v, tau_s = thresholds(moments(0.0, 1.0, 1e9), moments(0.0, 1.0, 1.0), 1.0)
    assert (tau_v.item(), tau_s.item()) == (0.25, 4.0)


def test_by_default_the_neighbours_are_one_before_and_two_behind_and_no_head_is_bypassed():
    p = Lfps()
    assert (p.reach, p.local, p.sinks, p.decay, p.bypass, p.beta) == ((-1, 1, 2), 5, 4, 0.95, 1.0, 0.2)
