"""A whole run from its recipe: load, evaluate, train, evaluate, write down. Also what uses a finished one: eval,
generate, chat.

The run folder is the run: `recipe.yaml` says what was asked, `metrics.jsonl` and `samples.jsonl` what happened,
`before.jsonl` and `after.jsonl` what it answered to held-out prompts, `checkpoints/` how to go on, `summary.json` what
came of it.
"""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from covey import recipe as recipes
from covey.configs import ModelOptions, RolloutConfig
from covey.data import source as data_source
from covey.data.loader import PromptLoader
from covey.errors import CoveyError, ResumeError
from covey.evaluate import Evaluation, Generates
from covey.evaluate import evaluate as judge
from covey.models import weights
from covey.models.decoder import Decoder
from covey.models.lora import split_trainable, with_lora
from covey.recipe import Recipe, is_run
from covey.rl.cluster import ClusterConfig, RLCluster
from covey.rl.grpo import GRPOLearner, StepRecord, total_steps
from covey.rl.rollout import RolloutWorker
from covey.tokenizer import Tokenizer
from covey.train.checkpoint import Checkpointer
from covey.train.metrics import METRICS, SUMMARY, MetricsWriter, prompt_text, write_answers, write_summary
from covey.train.progress import Progress, SampleLine, printable

CHECKPOINTS = "checkpoints"
Say = Callable[[str], None]


def train(ready: Recipe, out: Path) -> dict[str, Any]:
    """Runs `ready` in the new folder `out`; returns what `summary.json` says."""
    run = _Run(ready, out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(recipes.to_yaml(ready), encoding="utf-8")
    try:
        return run.go()
    except CoveyError:
        if not (out / METRICS).stat().st_size:
            shutil.rmtree(out)  # nothing was learnt in it, and the corrected command will want the name
        raise


def resume(folder: Path) -> dict[str, Any]:
    """Goes on from the last checkpoint in `folder` (from the start when there is none); the result is that of a run
    never stopped.
    """
    return _Run(recipes.load(folder), folder, resuming=True).go()


def evaluate(source: str, ready: Recipe) -> dict[str, Any]:
    """Evaluates the model or run at `source` on the held-out prompts of `ready`, prints and returns the figures."""
    held_out = data_source.load(ready.data).test
    with Progress(0) as progress:
        model, tokenizer = open_model(source, ready.model, progress.phase)
        worker = RolloutWorker(model, tokenizer, ready.rollout)
        progress.phase("sampling answers")
        found = _judge(worker, held_out, ready, progress)
        progress.evaluation(source, found.summary())
    return found.summary()


def generate(source: str, prompt: str, samples: int, rollout: RolloutConfig) -> list[str]:
    """`samples` answers of the model or run at `source` to one user message."""
    model, tokenizer = open_model(source, ModelOptions(), _quiet)
    worker = RolloutWorker(model, tokenizer, rollout)
    (group,) = worker.generate([{"prompt": _as_chat(tokenizer, prompt)}], samples)
    return [completion.text for completion in group.completions]


def chat(source: str, rollout: RolloutConfig) -> None:
    """A conversation on the terminal; an empty line or end of input leaves it."""
    model, tokenizer = open_model(source, ModelOptions(), lambda text: print(text, flush=True))
    limit = max(rollout.max_prompt_length, model.config.max_positions - rollout.max_new_tokens)
    worker = RolloutWorker(model, tokenizer, dataclasses.replace(rollout, max_prompt_length=limit))
    messages: list[dict[str, str]] = []
    print("Say something; an empty line ends the chat.", flush=True)
    while text := _read_line():
        messages.append({"role": "user", "content": text})
        while tokenizer.chat_template and len(tokenizer.encode_prompt(messages)) > limit and len(messages) > 1:
            messages = messages[2:]
            print("(the oldest turn is forgotten: the conversation has outgrown the model)", flush=True)
        prompt = messages if tokenizer.chat_template else text
        (group,) = worker.generate([{"prompt": prompt}], 1, step=len(messages))
        answer = group.completions[0].text
        messages.append({"role": "assistant", "content": answer})
        print(printable(answer, keep="\n\t"), flush=True)


def open_model(source: str, options: ModelOptions, say: Say) -> tuple[Decoder, Tokenizer]:
    """The model at `source`: a run folder (its recipe's model with its last checkpoint) or any model source."""
    if not is_run(source):
        model, tokenizer, _ = _load(options, source, say)
        return model, tokenizer
    recipe = recipes.load(source)
    model, tokenizer, origin = _load(recipe.model, recipe.model.source, say, recipe.seed)
    with Checkpointer(Path(source) / CHECKPOINTS, read_only=True) as saves:
        graph, trained, rest = split_trainable(model)
        held, extra = saves.restore(target={"params": nnx.to_pure_dict(trained)}, subset=True)
    _refuse_other_weights(extra["model"], origin, Path(source))
    nnx.replace_by_pure_dict(trained, held["params"])
    return nnx.merge(graph, trained, rest), tokenizer


class _Run:
    """One run in its folder."""

    def __init__(self, ready: Recipe, out: Path, resuming: bool = False):
        self.recipe, self.out, self.resuming = ready, out, resuming
        self.started = time.monotonic()
        self.data = data_source.load(ready.data)
        self.loader = PromptLoader(self.data.train, ready.training.prompts_per_step, seed=ready.seed)

    def go(self) -> dict[str, Any]:
        training = self.recipe.training
        with Checkpointer(self.out / CHECKPOINTS, training.max_to_keep) as self.saves:
            at = (self.saves.latest() or 0) if self.resuming else None
            with MetricsWriter(self.out, resume_at=at) as self.writer:
                return self._go()

    def _go(self) -> dict[str, Any]:
        total = total_steps(self.recipe.training, self.recipe.grpo, len(self.loader))
        with Progress(total) as self.progress:
            cluster, origin = self._cluster()
            learner = self._learner(cluster)
            cluster.prepare(self.recipe.grpo, total)
            self.origin = origin
            learner.check_prompts(self.loader.rows)
            self._restore(learner)
            summary = self._written() or {"model": origin, "before": self._judged(cluster, "before").summary()}
            write_summary(self.out, summary)
            learner.train(self.loader, self.data.test)
            if self.saves.latest() != learner.step:
                self._save(learner)
            after = self._judged(cluster, "after").summary()
            seconds = time.monotonic() - self.started
            summary |= {"after": after, "steps": learner.step, "seconds": round(seconds, 1)}
            self.saves.wait()
            write_summary(self.out, summary)
            self.progress.done(summary, self.out)
        return summary

    def _cluster(self) -> tuple[RLCluster, str]:
        ready = self.recipe
        model, tokenizer, origin = _load(ready.model, ready.model.source, self.progress.phase, ready.seed)
        config = ClusterConfig(training_config=ready.training, rollout_config=ready.rollout)
        return RLCluster(actor=model, tokenizer=tokenizer, cluster_config=config), origin

    def _learner(self, cluster: RLCluster) -> GRPOLearner:
        learner = GRPOLearner(
            rl_cluster=cluster,
            reward_fns=self.recipe.rewards,
            grpo_config=self.recipe.grpo,
            on_phase=self.progress.phase,
            eval_config=self.recipe.evaluation,
            observers=[self._write, self._show],
        )
        learner.observers.append(lambda record: self._save_when_due(learner, record))
        return learner

    def _judged(self, cluster: RLCluster, name: str) -> Evaluation:
        ready = self.recipe
        self.progress.phase(f"evaluating {name} training")
        found = _judge(cluster, self.data.test, ready, self.progress)
        self.progress.evaluation(name, found.summary())
        write_answers(self.out, name, found.groups)
        return found

    def _write(self, record: StepRecord) -> None:
        self.writer.step(record.metrics)
        self.writer.samples(record.step, record.groups)

    def _show(self, record: StepRecord) -> None:
        lines = [
            SampleLine(prompt_text(g.prompt), c.text, float(r))
            for g in record.groups
            for c, r in zip(g.completions, _given(g.rewards), strict=True)
        ]
        self.progress.step(record.metrics, lines)

    def _save_when_due(self, learner: GRPOLearner, record: StepRecord) -> None:
        if record.due(self.recipe.training.checkpoint_every_n_steps):
            self._save(learner)

    def _save(self, learner: GRPOLearner) -> None:
        trainer = learner.cluster.trainer
        assert trainer is not None
        seconds = time.monotonic() - self.started
        extra = {"data": self.loader.state(), "model": self.origin, "seconds": seconds}
        self.saves.save(learner.step, trainer.state(), extra)

    def _restore(self, learner: GRPOLearner) -> None:
        if not self.resuming:
            return
        if self.saves.latest() is None:
            self.progress.phase("no checkpoint was written yet: starting from the beginning")
            return
        trainer = learner.cluster.trainer
        assert trainer is not None
        state, extra = self.saves.restore(target=trainer.state())
        _refuse_other_weights(extra["model"], self.origin, self.out)
        self.started -= extra["seconds"]
        learner.step = self.saves.latest() or 0
        trainer.load_state(state, learner.step)
        self.loader.restore(extra["data"])
        learner.cluster.sync_weights()

    def _written(self) -> dict[str, Any] | None:
        path = self.out / SUMMARY
        return json.loads(path.read_text(encoding="utf-8")) if self.resuming and path.is_file() else None


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, so that the next run starts faster; JAX_COMPILATION_CACHE_DIR says where, empty
    is off.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(weights.sources.cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _load(options: ModelOptions, source: str, say: Say, seed: int = 0) -> tuple[Decoder, Tokenizer, str]:
    use_compilation_cache()
    say(f"loading {source}")
    loaded = weights.load(
        source,
        param_dtype=options.dtype,
        compute_dtype=options.compute_dtype,
        remat=options.remat,
        scan_layers=options.scan_layers,
        say=say,
    )
    model = with_lora(loaded.model, options.lora, seed=seed) if options.lora.rank else loaded.model
    return model, loaded.tokenizer, loaded.origin


def _refuse_other_weights(then: str, now: str, where: Path) -> None:
    if then != now:
        raise ResumeError(
            f"this run began with the weights {then!r}, and {now!r} is what can be had now",
            fix="make the first available again: other weights would not continue the run",
            where=str(where),
        )


def _judge(model: Generates, held_out: Sequence[Any], ready: Recipe, progress: Progress) -> Evaluation:
    weights = ready.grpo.reward_weights
    return judge(model, held_out, ready.evaluation, ready.rollout, ready.rewards, weights, progress=progress.advance)


def _as_chat(tokenizer: Tokenizer, text: str) -> Any:
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


def _given(rewards: Any) -> Sequence[float]:
    assert rewards is not None, "observers see scored groups"
    return rewards


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _quiet(text: str) -> None:
    """For commands whose output is the answer alone."""
