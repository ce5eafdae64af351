"""Training in stages. A stopped run resumes from its last checkpoint.

A checkpoint holds weights, optimisers, random states (of the dropout), stage and step. Batch n of a stage is the same
whether a run was stopped or not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import AutoTokenizer, LlamaForCausalLM

from ragkv.model.prompt import Prompt
from tools.demo_model import near
from tools.demo_model.optimiser import Muon
from tools.demo_model.recipe import PROMPT, Recipe, Stage, config
from tools.demo_model.rows import ANSWER, CONTEXT, Batches, RowMaker
from tools.demo_model.team import Team

Say = Callable[[str], None]
EVERY = 100  # steps between lines of the log
PAUSE = 10  # steps between checks of the time, which wait for the GPU


@dataclass
class Place:
    """Position of a run: the next step of a stage."""

    stage: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


class TrainingRun:
    """One training run in a folder: tokenizer/, near.json, checkpoint.pt, model/, log.txt."""

    def __init__(self, recipe: Recipe, folder: Path, team: Team, workers: int, say: Say):
        self.recipe, self.folder, self.team, self.workers, self._say = recipe, folder, team, workers, say
        device = self.device = team.device
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self._tokenizer = tokenizer
        self._prompt = Prompt(tokenizer, PROMPT)
        self._near = near.load(folder)
        self.model = LlamaForCausalLM._from_config(config(recipe, recipe.dropout), attn_implementation="sdpa").to(
            device
        )
        embedding = self.model.get_input_embeddings().weight
        self._muon = Muon([p for p in self.model.parameters() if p.ndim == 2 and p is not embedding])
        rest = [p for p in self.model.parameters() if p.ndim == 1 or p is embedding]
        self._adam = torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.95), weight_decay=0.01, fused=device == "cuda")
        self.place = Place()
        if self._checkpoint.exists():
            self._resume()
        if team.rank:
            torch.manual_seed(recipe.seed + 1000 * team.rank)  # every process has its own rows and its own dropout

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def train(self, until: float) -> bool:
        """Train until done (True) or until time.monotonic() passes `until` (False), and save."""
        loss = torch.compile(self._loss, dynamic=False) if self.device == "cuda" else self._loss
        while self.place.stage < len(self.recipe.stages):
            done = self._stage(self.recipe.stages[self.place.stage], loss, until)
            if done:
                self.place.stage, self.place.step = self.place.stage + 1, 0
            if self.team.rank == 0:
                self.save()
            self.team.wait()
            if not done:
                return False
        return True

    def _stage(self, stage: Stage, loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], until: float) -> bool:
        place, team, began = self.place, self.team, time.monotonic() - self.place.seconds
        loader = self._loader(stage)
        for ids, weights in loader:
            rate = stage.rate * _schedule(place.step, stage)
            ids, weights = (x.to(self.device, non_blocking=True) for x in (ids, weights))
            counts = torch.stack([(weights[:, 1:] == kind).sum() for kind in (ANSWER, CONTEXT)]).float().clamp(min=1)
            late = torch.tensor(float(time.monotonic() > until), device=self.device)
            team.total([counts, late])
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
                answers, context = (sums / count for sums, count in zip(loss(ids, weights), counts, strict=True))
            (answers + self.recipe.context_weight * context).backward()
            means = torch.stack([answers.detach(), context.detach()])
            team.total([means, *(p.grad for p in self.model.parameters() if p.grad is not None)])
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._muon.step(rate)
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self._adam.zero_grad(set_to_none=True)
            place.step += 1
            place.tokens += ids.numel() * team.size
            place.seconds = time.monotonic() - began
            if team.rank == 0 and (place.step % EVERY == 0 or place.step == stage.steps):
                self._say(
                    f"{place.seconds:5.0f} s  stage {place.stage + 1} step {place.step} of {stage.steps}  "
                    f"length {ids.shape[1]}  {place.tokens / 1e6:.0f} M tokens  "
                    f"loss: answers {means[0].item():.4f} context {means[1].item():.3f}"
                )
            if place.step % PAUSE == 0 and late.item() and place.step < stage.steps:
                return False
        return True

    def _loader(self, stage: Stage) -> DataLoader[tuple[Tensor, Tensor]]:
        """The remaining batches of a stage."""
        number = self.place.stage
        rng = Random(f"{self.recipe.seed}/{number}")
        lengths = rng.choices(list(stage.mix), list(stage.mix.values()), k=stage.steps)
        maker = RowMaker(self._tokenizer, self._prompt, stage.shape, self._near)
        batches = Batches(maker, lengths, self.recipe.batch, self.recipe.seed * 100 + number, self.team)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return DataLoader(
            Subset(batches, range(self.place.step, stage.steps)),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=4 if self.workers else None,
            pin_memory=self.device == "cuda",
            generator=torch.Generator(),  # the global generator is used by the dropout
        )

    def _loss(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of the losses of answer tokens and of context tokens. ids, weights: [rows, length]."""
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = self.model.lm_head(hidden).float()
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        kinds = weights[:, 1:].flatten()
        return (losses * (kinds == ANSWER)).sum(), (losses * (kinds == CONTEXT)).sum()

    def save(self) -> None:
        """Write the checkpoint, which replaces the last one atomically."""
        state = {
            "place": vars(self.place),
            "model": self.model.state_dict(),
            "muon": self._muon.state_dict(),
            "adam": self._adam.state_dict(),
            "random": [torch.get_rng_state(), *torch.cuda.get_rng_state_all()],
        }
        temporary = self._checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self._checkpoint)

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, map_location=self.device, weights_only=True)
        self.place = Place(**state["place"])
        self.model.load_state_dict(state["model"])
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])
        on_cpu, *on_gpus = (each.cpu() for each in state["random"])
        torch.set_rng_state(on_cpu)
        torch.cuda.set_rng_state_all(on_gpus)
        self._say(f"resumed at stage {self.place.stage + 1}, step {self.place.step}")

    def export(self, folder: Path, shard: str = "1GB") -> None:
        """Save bf16 weights and the tokenizer in Hugging Face form. Training can continue afterwards."""
        state = {name: tensor.to(torch.bfloat16) for name, tensor in self.model.state_dict().items()}
        model = LlamaForCausalLM._from_config(config(self.recipe), dtype=torch.bfloat16)
        model.load_state_dict(state)
        model.save_pretrained(folder, max_shard_size=shard)
        self._tokenizer.save_pretrained(folder)
        PROMPT.save(folder / "profile.json")


def _schedule(step: int, stage: Stage) -> float:
    """Share of the peak learning rate: linear warm-up, flat, linear to 2%."""
    left = (1 - step / stage.steps) / max(1 - stage.hold, 1e-9)
    return min(1.0, (step + 1) / stage.warmup) * max(0.02, min(1.0, left))
