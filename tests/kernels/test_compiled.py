"""Code that Triton compiles for compute capability 9.0. No such GPU is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """PTX and assembler log of each kernel, and the integer arguments it is specialised for."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def ptx(compiled):
    """The PTX of each kernel."""
    return {name: each["ptx"] for name, each in compiled["compiled"].items()}


def wide(text):
    """Find reads of 16 bytes, to registers or to shared memory."""
    return re.findall(r"ld\.global[\w:.]*\.v4\.[bu]32|cp\.async\.cg\.shared\.global \[[^,]*, \[[^,]*, 0x10", text)


def narrow(text):
    """Find reads of less than 4 bytes."""
    return re.findall(r"ld\.global[\w:.]*\.[bu](?:8|16)\b", text)


def test_every_kernel_compiles(ptx):
    assert all(".target sm_90" in text for text in ptx.values())


def test_attention_reads_keys_and_values_16_bytes_at_a_time(ptx):
    # Keys and values of a block are 64 rows of 256 bytes, read by 128 threads: at least 8 reads each in the loop.
    assert len(wide(ptx["attend"])) >= 16
    assert not narrow(ptx["attend"])


def test_blocks_in_place_are_read_16_bytes_at_a_time(ptx):
    # K and V of four blocks are 64 rows of 256 bytes each, read by 128 threads: 8 reads each.
    assert len(wide(ptx["attend_units"])) >= 16
    assert not narrow(ptx["attend_units"])
    assert "ld.local" not in ptx["attend_units"]


@pytest.mark.parametrize("name", ["add_norm", "gated", "rope_scatter", "transfer_exact"])
def test_rows_are_read_16_bytes_at_a_time(ptx, name):
    assert wide(ptx[name])
    assert not narrow(ptx[name]) or name == "rope_scatter"  # a row has as many cosines as threads


def test_blocks_are_read_and_admitted_16_bytes_at_a_time(ptx):
    # K and V of four blocks are each 128 rows of 256 bytes, and 256 threads read and write them: 8 reads and writes.
    text = ptx["progress"]
    assert len(wide(text)) >= 16
    assert len(re.findall(r"st\.global[\w:.]*\.v4\.[bu]32", text)) >= 16
    assert not narrow(text)
    assert "ld.local" not in text


def test_the_map_of_a_pool_is_read_again_after_an_update(ptx):
    """It must not be read through the cache for constant data."""
    assert "ld.global.nc" not in ptx["progress"] + ptx["load_ahead"]


def test_blocks_are_loaded_ahead_16_bytes_at_a_time(ptx):
    # K and V of a block are 16 rows of 256 bytes, copied by 128 threads: 2 reads and 2 writes each.
    assert len(wide(ptx["load_ahead"])) >= 4
    assert len(re.findall(r"st\.global[\w:.]*\.v4\.[bu]32", ptx["load_ahead"])) >= 4


@pytest.mark.parametrize("name", ["transfer_int8", "transfer_fp8"])
def test_codes_and_scales_of_keys_are_read_16_bytes_at_a_time(ptx, name):
    assert len(wide(ptx[name])) >= 4
    assert len(narrow(ptx[name])) <= 1, "only the scales of V, one for each token and head"


def test_numbers_that_differ_between_requests_do_not_trigger_a_compilation(compiled):
    """A compilation takes about a second, in the middle of a request."""
    assert len(compiled["specialised"]) >= 12
    assert not {name: numbers for name, numbers in compiled["specialised"].items() if numbers}


def test_many_rows_read_blocks_by_the_copy_engine(compiled):
    """Both products of an iteration use warp groups, and keys and values are copied as rectangles."""
    text = compiled["compiled"]["tiles"]["ptx"]
    assert len(re.findall(r"cp\.async\.bulk\.tensor", text)) >= 4  # before the loop and in it
    assert "wgmma.mma_async" in text
    # A program reads its queries through registers, but no keys or values.
    assert "cp.async.cg" not in text


def test_products_of_many_rows_are_not_serialised(compiled):
    """The assembler serialises them, and reports it, where registers are too few for unfinished products."""
    log = compiled["compiled"]["tiles"]["log"]
    assert "Used 128 registers" in log, "two programs of 256 threads share 65,536 registers"
    assert "serialized" not in log
    spilt = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spilt is not None
    # triton 3.6, with which the kernel was measured, spills nothing. Later versions spill a little.
    assert max(map(int, spilt.groups())) <= 96


def test_a_product_of_several_rows_multiplies_bytes_on_tensor_cores(ptx):
    products = set(re.findall(r"mma\S*", ptx["fp8_linear_rounded"]))
    assert {each for each in products if "e4m3.e4m3" in each}, products


def test_a_product_of_one_row_has_weights_on_their_way_while_it_multiplies(ptx):
    """Three pieces of 8 rows of 1,024 bytes before the loop and one in it, by 128 threads that read 16 bytes each."""
    assert len(re.findall(r"cp\.async\.cg\.shared\.global \[[^,]*, \[[^,]*, 0x10", ptx["fp8_linear"])) >= 4 * 4
