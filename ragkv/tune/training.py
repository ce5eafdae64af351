"""The training run: transformers' `Trainer` with our rows and our loss, and peft's adapters.

    rows → Student (student.py) → checkpoint-N/ (a stopped run goes on from the last one) → a PEFT folder

On several GPUs start one process for each (`torchrun -m ragkv.tune …`); every process then makes its own rows.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers.trainer_utils import get_last_checkpoint

from ragkv.tune.attention import AttentionName, quicker, row_attention
from ragkv.tune.contexts import Source
from ragkv.tune.options import TuneOptions
from ragkv.tune.rows import RowMaker, TrainingRow
from ragkv.tune.student import Student

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices that an adapter changes."""

SCALE = 2.0
"""An adapter adds SCALE · B A to a matrix, whatever its rank."""

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
    """

    folder: Path
    steps: int
    tokens: int
    seconds: float
    losses: tuple[tuple[int, float], ...]


class RowBatches(Dataset[dict[str, Tensor]]):
    """Batch n: rows of one length. It depends on the seed and on n alone."""

    def __init__(self, source: Source, maker: RowMaker, options: TuneOptions, count: int):
        """Make `count` batches."""
        self._source, self._maker, self._options, self._count = source, maker, options, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return what `Student.forward` takes."""
        options = self._options
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


def train(model: Any, batches: RowBatches, options: TuneOptions, out: Path, say: Say) -> TunedAdapter:
    """Train an adapter; go on from the last checkpoint under `out`, if there is one.

    Args:
        model: A PeftModel.
        batches: Rows; see `RowBatches`.
        options: The run.
        out: The folder: `adapter_config.json`, `adapter_model.safetensors`, `checkpoints/`.
        say: Is told the progress.
    """
    transformers.utils.logging.set_verbosity_error()
    student = Student(model, options)
    if torch.cuda.is_available():
        student.cuda()
        student.compile_layers()
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
    with _without_deprecations():
        trainer.train(resume_from_checkpoint=found)
    seconds = time.monotonic() - start
    if trainer.is_world_process_zero():
        _save(model, out)
    history = [(int(each["step"]), float(each["loss"])) for each in trainer.state.log_history if "loss" in each]
    done = trainer.state.global_step
    tokens = done * options.rows_tokens * options.accumulate * trainer.args.world_size
    return TunedAdapter(out, done, tokens, seconds, tuple(history))


def _save(model: Any, out: Path) -> None:
    """Write the adapter in the dtype of the model's weights, which is what it is merged into."""
    for value in model.parameters():
        if value.requires_grad:
            value.data = value.data.to(model.dtype)
    model.save_pretrained(out, save_embedding_layers=False)  # else it looks for the base model on the hub
    (out / "README.md").unlink(missing_ok=True)  # peft's form for a model card, with nothing filled in


def _quickest_attention(student: Student, batches: RowBatches, say: Say) -> AttentionName:
    """Return the attention that trains this model, on a GPU, quickest there."""
    tried = {name: each.cuda() for name, each in batches[0].items()} | {"stored": torch.tensor(True)}

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


def with_adapter(model: Any, options: TuneOptions, start: Path | None) -> Any:
    """Return the model with a trainable adapter.

    Args:
        model: A causal language model; its own weights are frozen.
        options: Rank of a new adapter.
        start: Folder of an adapter to go on from; None makes a new one, which changes nothing yet.
    """
    import peft

    with _without_deprecations():
        return _with_adapter(peft, model, options, start)


def _with_adapter(peft: Any, model: Any, options: TuneOptions, start: Path | None) -> Any:
    from ragkv.tune.merged import CUSTOM

    if start is not None:
        known = peft.LoraConfig.from_pretrained(start)
        known.inference_mode = False
        known._register_custom_module(CUSTOM)
        return peft.PeftModel.from_pretrained(model, start, is_trainable=True, config=known)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=int(SCALE * options.rank),
        target_modules=list(PROJECTIONS),
        task_type=peft.TaskType.CAUSAL_LM,
    )
    config._register_custom_module(CUSTOM)
    torch.manual_seed(options.seed)
    return peft.get_peft_model(model, config)


def is_first_process() -> bool:
    """Return whether this is the first of the processes that torchrun started, or the only one."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Hide what peft's and transformers' releases have to tell each other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="torch|peft|transformers|accelerate")
        yield
