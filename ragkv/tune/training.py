"""The training run: transformers' `Trainer` with our rows and our loss, and peft's adapters.

    rows → Student (student.py) → checkpoint-N/ (a stopped run goes on from the last one) → a PEFT folder

On several GPUs start one process for each (`torchrun -m ragkv.tune …`); every process then makes its own rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers.trainer_utils import get_last_checkpoint

from ragkv.model.wrapper import Wrapper
from ragkv.tune.adapters import WrappedModel, save_adapter, with_lora, without_deprecations
from ragkv.tune.attention import AttentionName, quicker, row_attention
from ragkv.tune.contexts import Source
from ragkv.tune.options import TuneOptions
from ragkv.tune.rows import RowMaker, TrainingRow
from ragkv.tune.student import Student

LEAST_ROWS_TOKENS = 1024
"""Rows of one pass are not made shorter than this for want of memory."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class TunedAdapter:
    """What a run did.

    Attributes:
        folder: The PEFT folder.
        steps: Optimiser steps taken.
        tokens: Tokens of all rows.
        seconds: Time of the training alone, of this process since its start.
        losses: (step, loss) of the log.
        gpu_bytes: Most memory of a GPU that was in use; 0 on a CPU.
    """

    folder: Path
    steps: int
    tokens: int
    seconds: float
    losses: tuple[tuple[int, float], ...]
    gpu_bytes: int = 0


class RowBatches(Dataset[dict[str, Tensor]]):
    """Batch n: rows of one length. It depends on the seed and on n alone."""

    def __init__(self, source: Source, maker: RowMaker, options: TuneOptions, count: int):
        """Make `count` batches."""
        self._source, self._maker, self.options, self._count = source, maker, options, count

    def __len__(self) -> int:
        return self._count

    def halved(self) -> RowBatches:
        """Return batches of half as many tokens, twice as many of which make a step."""
        fewer = replace(self.options, rows_tokens=self.options.rows_tokens // 2, accumulate=2 * self.options.accumulate)
        return RowBatches(self._source, self._maker, fewer, 2 * self._count)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return what `Student.forward` takes."""
        options = self.options
        rng = Random(f"{options.seed}/{number}")
        length = rng.choices(*zip(*options.lengths, strict=True))[0]
        rows = []
        for row in range(max(1, options.rows_tokens // length)):
            own = Random(f"{options.seed}/{number}/{row}")
            rows.append(self._maker.row(self._source.context(own, length), length, own))
        return {**columns(rows), "stored": torch.tensor(rng.random() < options.stored)}


def columns(rows: Sequence[TrainingRow]) -> dict[str, Tensor]:
    """Stack rows as `Student.forward` takes them; `kept` is padded with False to the most questions and blocks."""
    joined = np.stack([np.stack([row.ids, row.positions, row.kinds, row.parts, row.blocks]) for row in rows])
    targets = np.stack([row.targets for row in rows])
    sizes = np.array([row.kept.shape for row in rows]).max(0)
    kept = np.zeros((len(rows), *sizes), np.bool_)
    for row, piece in zip(rows, kept, strict=True):
        piece[: row.kept.shape[0], : row.kept.shape[1]] = row.kept
    return {"columns": torch.from_numpy(joined), "targets": torch.from_numpy(targets), "kept": torch.from_numpy(kept)}


def train(model: Any, batches: RowBatches, options: TuneOptions, out: Path, say: Say, base: str = "") -> TunedAdapter:
    """Train an adapter; go on from the last checkpoint under `out`, if there is one.

    Args:
        model: What `with_adapter` returns.
        batches: Rows; see `RowBatches`.
        options: The run.
        out: The folder: `adapter_config.json`, `adapter_model.safetensors`, `checkpoints/`.
        say: Is told the progress.
        base: Hash of the weights, which the adapter carries.
    """
    transformers.utils.logging.set_verbosity_error()
    student = Student(model, options)
    if torch.cuda.is_available():
        student.cuda()
        batches = fitting(student, batches, say)
        options = batches.options
        student.compile_layers()
        if student.takes_sdpa:
            student.attend_with(row_attention(_quickest_attention(student, batches, say)))
    clock = _Clock(options)
    trainer = transformers.Trainer(
        model=student,
        args=_arguments(options, out / "checkpoints"),
        train_dataset=batches,
        data_collator=lambda items: items[0],
        callbacks=[_Log(say, clock, options.steps)],
        optimizers=_optimisers(student, options, clock),
    )
    for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
        trainer.remove_callback(callback)
    found = get_last_checkpoint(str(out / "checkpoints")) if (out / "checkpoints").is_dir() else None
    if found:
        say(f"going on from {found}")
    start = time.monotonic()
    with without_deprecations():
        trainer.train(resume_from_checkpoint=found)
    seconds = time.monotonic() - start
    if trainer.is_world_process_zero():
        save_adapter(model, out, base)
    history = [(int(each["step"]), float(each["loss"])) for each in trainer.state.log_history if "loss" in each]
    done = trainer.state.global_step
    tokens = done * options.rows_tokens * options.accumulate * trainer.args.world_size
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return TunedAdapter(out, done, tokens, seconds, tuple(history), memory)


def fitting(student: Student, batches: RowBatches, say: Say) -> RowBatches:
    """Return batches of so many tokens that a pass with its gradients fits the GPU's memory.

    Raises:
        torch.OutOfMemoryError: Not even the smallest fit.
    """
    while True:
        try:
            with torch.autocast("cuda", torch.bfloat16):
                loss = student(**_on_gpu(batches))["loss"]
            loss.backward()
            return batches
        except torch.OutOfMemoryError:
            longest = max(length for length, _ in batches.options.lengths)
            if batches.options.rows_tokens // 2 < max(LEAST_ROWS_TOKENS, longest):
                raise
            batches = batches.halved()
            say(f"memory: {batches.options.rows_tokens} tokens in a pass")
        finally:
            student.zero_grad()
            torch.cuda.empty_cache()


def _on_gpu(batches: RowBatches) -> dict[str, Tensor]:
    return {name: value.cuda() for name, value in batches[0].items()} | {"stored": torch.tensor(True)}


def _quickest_attention(student: Student, batches: RowBatches, say: Say) -> AttentionName:
    """Return the attention that trains this model, on a GPU, quickest there."""
    tried = _on_gpu(batches)

    def attempt(name: AttentionName) -> None:
        student.attend_with(row_attention(name))
        with torch.autocast("cuda", torch.bfloat16):
            loss = student(**tried)["loss"]
        loss.backward()
        student.zero_grad()

    return quicker(attempt, say)


class _Clock:
    """How far a run is: by steps, or by time where that is limited."""

    def __init__(self, options: TuneOptions):
        self._options, self._start = options, 0.0

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return bool(self._options.seconds) and self._start > 0 and self._share_of_time() >= 1

    def rate(self, step: int) -> float:
        """Share of the peak learning rate at a step: linear warm-up, flat, linear to a fiftieth."""
        options = self._options
        if step and not self._start:
            self._start = time.monotonic()  # the first step also starts the row makers
        done = max(step / options.steps, self._share_of_time())
        left = (1 - done) / max(1 - options.hold, 1e-9)
        return min(1.0, (step + 1) / max(1, options.warmup)) * max(0.02, min(1.0, left))

    def _share_of_time(self) -> float:
        if not self._options.seconds or not self._start:
            return 0.0
        return (time.monotonic() - self._start) / self._options.seconds


class _Log(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is Any to mypy
    """Tells the progress, and stops a run whose time is over."""

    def __init__(self, say: Say, clock: _Clock, steps: int):
        self._say, self._clock, self._steps = say, clock, steps

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **rest: Any) -> None:
        if logs and "loss" in logs and state.is_world_process_zero:
            self._say(f"step {state.global_step} of {self._steps}  loss {logs['loss']:.4f}")

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        if self._clock.late:
            control.should_training_stop = control.should_log = True
        return control


def _arguments(options: TuneOptions, folder: Path) -> transformers.TrainingArguments:
    cuda = torch.cuda.is_available()
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=options.accumulate,
        max_steps=options.steps,
        max_grad_norm=1.0,
        bf16=cuda,
        use_cpu=not cuda,
        logging_steps=max(1, min(20, options.steps // 5)),
        save_steps=options.save_every,
        save_total_limit=1,
        save_strategy="steps",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=options.workers,
        dataloader_prefetch_factor=4 if options.workers else None,
        dataloader_pin_memory=cuda,
        seed=options.seed,
        label_names=[],
    )


def _optimisers(student: Student, options: TuneOptions, clock: _Clock) -> tuple[Any, Any]:
    trained = [value for value in student.parameters() if value.requires_grad]
    adam = torch.optim.AdamW(
        trained, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=torch.cuda.is_available()
    )
    return adam, torch.optim.lr_scheduler.LambdaLR(adam, clock.rate)


def with_adapter(model: Any, options: TuneOptions, start: Path | None, wrapper: Wrapper | None = None) -> Any:
    """Return the model with what is trained (`Adapted`); its own weights are frozen.

    Args:
        model: A causal language model.
        options: What is trained.
        start: Folder of a LoRA adapter to go on from; None makes a new one, which changes nothing yet.
        wrapper: Wrapper tokens to begin with; None where a LoRA adapter is trained.
    """
    return with_lora(model, options, start) if wrapper is None else WrappedModel(model, wrapper)


def is_first_process() -> bool:
    """Return whether this is the first of the processes that torchrun started, or the only one."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)
