"""What a replica of the simulated cluster takes for its work: measured on one machine, the source beside each number.

Names of results pages are those of docs/results. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.errors import InputError


@dataclass(frozen=True)
class ReplicaSpeeds:
    """Sizes and times of one replica and of the store that it reads.

    Attributes:
        chunk_tokens: Tokens of a chunk.
        token_bytes: KV of a token.
        load: What a question reads of a chunk, head record included, over the chunk's KV.
        start: Work before the first pass that questions do not share: the search, opening and planning.
        passes: Forwards until the first token.
        pass_shared: Part of a forward that its questions share: reading the weights, launches.
        pass_own: Part of a forward that each question adds.
        together: Questions that one forward takes at most.
        step_shared: Part of a decode step that its answers share.
        step_own: Part of a decode step that each answer adds.
        encode: Encoding a chunk that is in no tier, and storing it.
        link: Bytes a second from host memory to where the model computes.
        read: Bytes a second that one replica reads from the store, verification included.
        node: Bytes a second that one node of the store sends.
        latency: Time of a load from the store before its first byte.
    """

    chunk_tokens: int
    token_bytes: int
    load: float
    start: float
    passes: int
    pass_shared: float
    pass_own: float
    together: int
    step_shared: float
    step_own: float
    encode: float
    link: float
    read: float
    node: float
    latency: float

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated. Raises InputError."""
        if self.load < 0 or self.passes < 1 or self.together < 1:
            raise InputError("a question reads at least nothing, in at least one pass of at least one question")

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk in the store."""
        return self.chunk_tokens * self.token_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of a chunk that a question reads, and that the host tier keeps."""
        return int(self.load * self.chunk_bytes)

    def alone(self, top_k: int) -> float:
        """Return the time to first token of a question that is alone and finds its chunks in host memory."""
        loading = top_k * self.read_bytes / self.link
        return self.start + loading + self.passes * (self.pass_shared + self.pass_own) + self.step_shared


LLAMA_8B = ReplicaSpeeds(
    chunk_tokens=1024,
    token_bytes=128 * 1024,  # operations.md: Llama-3.1-8B, bfloat16
    load=0.214,  # cpu.md, the default model beside llama.cpp: a trained model's; random weights keep next to nothing
    start=0.0118 + 0.0011,  # cpu.md: retrieve; gpu.md, nothing recomputed, 16 chunks: open
    passes=1,  # ragkv/engine/loop.py: recorded graphs run all passes of a question at once, and share none
    pass_shared=0.0,
    pass_own=0.0263,  # gpu.md, nothing recomputed, 16 chunks: 32.7 ms less opening (1.1) and loading (5.3)
    together=1,
    step_shared=0.0073,  # gpu.md, weights in FP8, exact: 8.2, 10.5 and 21.2 ms for 1, 4 and 16 answers
    step_own=0.00087,
    encode=(0.973 + 2.6) / 16,  # gpu.md: 16 chunks are encoded in 973 ms and stored in Redis in 2.6 s
    link=55.5e9,  # gpu.md: link
    read=64 * 2**20 / 0.0492,  # gpu.md, other tiers: 64 MiB from Redis in 49.2 ms
    node=2.93e9,  # store.md: redis, ranges of 4 MiB
    latency=0.0003,  # store.md: 0.12 ms for 64 KiB over loopback; the rest is a network's, which was not measured
)
"""Llama-3.1-8B on an H100 or H200, chunks of 1,024 tokens."""

SMOLLM2 = ReplicaSpeeds(
    chunk_tokens=485,  # cpu.md: 3,877 tokens in 8 chunks
    token_bytes=2 * 30 * 3 * 64 * 2,  # 30 layers, 3 kv heads of 64, bfloat16
    load=0.214,  # cpu.md, the default model beside llama.cpp: loaded
    start=0.0118 + 0.0003,  # the same table: retrieve, open
    passes=3,  # two looks and the question
    pass_shared=0.0091,  # the same table: plan and prefill, 62.0 ms, in three passes; serve.md: 154 ms of one question
    pass_own=0.0116,  # are 91 for each of 16, so that 67 of 154 are shared
    together=16,
    step_shared=0.0285,  # cpu.md: 35 tokens a second after a short prompt
    step_own=0.0191,  # cpu.md: 21 tokens a second after 3,900 tokens
    encode=485 / 420,  # cpu.md, ingest of small documents, both cores: 420 tokens a second
    link=8.65e9,  # store.md: host pool
    read=1.36e9,
    node=2.93e9,
    latency=0.0003,
)
"""SmolLM2-135M-Instruct on two CPU cores, chunks of 485 tokens."""

SPEEDS = {"llama-3.1-8b": LLAMA_8B, "smollm2-135m": SMOLLM2}
"""By the names of the command."""


def speeds_of(name: str) -> ReplicaSpeeds:
    """Return measured speeds by their name. Raises InputError for another name."""
    if name not in SPEEDS:
        raise InputError(f"there are no speeds {name!r}: choose from {', '.join(SPEEDS)}")
    return SPEEDS[name]
