"""Adapter of Covey, through its public API: a cluster, a learner, and what a user may put in their places.

The rows of a check take the place of what the rollout samples (`RLCluster.generate`), their advantages that of
rewards (`advantage_fn`), and an optax transformation that of AdamW where a gradient is asked for. Sampling, packing,
micro-batches, loss, trainer and files are what a run uses.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

import covey
from covey import types as covey_types
from covey.models import families
from covey.parallel import processes
from covey.parallel.arrays import flatten
from covey.rl.step_data import Experience, PromptBatch, gather_table
from covey_conformance import worker
from covey_hosts.local import LocalOptions, TrainingCommand, launch

VERSION = covey.__version__
NO_PADDING = "rows are padded, not samples: invariance/packing changes how"
SETTINGS = {
    "": "GRPOConfig(algorithm=...); packing='dense' unless the check packs",
    "invariance/micro-batch": "max_tokens_per_micro_batch of 8, 4, 2 samples",
}
REASONS = {
    "gradient/grpo-k1": "a choice of design: k1 has zero expected gradient on-policy, so kl_in='reward' takes it alone",
    "invariance/padding-before": NO_PADDING,
    "invariance/padding-behind": NO_PADDING,
}
ROW = 32
"""Tokens of a row of one sample."""
Arrays = dict[str, np.ndarray]
Row = Mapping[str, Any]


class _Learner(covey.GRPOLearner):
    """Learner whose old and reference log-probs may be given with the rows."""

    rows: Sequence[Row] = ()

    def compute_logps(self, x: Experience) -> Experience:
        x = super().compute_logps(x)
        if not self.rows:
            return x
        own = {group.columns["number"] for group in x.groups}
        old, ref = ([np.asarray(r[n]) for r in self.rows if r["group"] in own] for n in ("old_logps", "ref_logps"))
        return replace(x, old_logps=old, ref_logps=x.ref_logps and ref)


class Trainer:
    """A model with what it takes to train it; learners are made when they are asked for."""

    def __init__(self, folder: str, settings: Mapping[str, Any]):
        self.folder, self.settings, self.draws = folder, settings, 0
        self._learners: dict[str, _Learner] = {}

    @property
    def main(self) -> _Learner:
        """Learner with AdamW."""
        return self._learner("adamw", _adamw(self.settings))

    @property
    def recorder(self) -> _Learner:
        """Learner whose optimizer keeps the gradient and moves nothing."""
        return self._learner("record", optax.GradientTransformation(lambda params: params, _record))

    def _learner(self, name: str, optimizer: Any) -> _Learner:
        if name not in self._learners:
            self._learners[name] = make_learner(self.folder, self.settings, optimizer)
        return self._learners[name]


def load(folder: str, settings: Mapping[str, Any]) -> Trainer:
    """Load the model; settings that Covey refuses are named by its own error."""
    if settings["pad_prompt"] or settings["pad_completion"]:
        raise NotImplementedError("samples are not padded one by one")
    trainer = Trainer(folder, settings)
    _refusals(lambda: _algorithm(settings))
    return trainer


def make_learner(folder: str, s: Mapping[str, Any], optimizer: Any, **others: Any) -> _Learner:
    """Make a learner with its cluster; `advantage_fn` returns the rewards, which are the advantages of the rows."""
    training = covey.RLTrainingConfig(
        max_steps=s["total_steps"],
        prompts_per_step=s["prompts"],
        actor_optimizer=optimizer,
        packing="groups" if s["packing"] else "dense",
        row_length=ROW * 2,
        max_tokens_per_micro_batch=s["micro_batch"] * ROW,
        train_micro_batch_size=max(1, s["micro_batch"] // s["samples"]),
    )
    rollout = covey.RolloutConfig(
        max_prompt_length=64, max_new_tokens=s["max_tokens"], temperature=s["temperature"], top_p=s["top_p"],
        seed=s["seed"],
    )  # fmt: skip
    mesh = {covey.Role.ACTOR: covey.make_mesh((s["devices"], 1), devices=jax.devices()[: s["devices"]])}
    cluster = covey.RLCluster.load(
        actor=folder,
        cluster_config=covey.ClusterConfig(mesh if s["devices"] > 1 else {}, training, rollout),
        lora=covey.LoRAConfig(rank=s["lora_rank"], alpha=s["lora_alpha"]) if s["lora_rank"] else None,
        environments=others.pop("environments", None),
        param_dtype=s["dtype"],
        compute_dtype=s["dtype"],
    )
    given = {"reward_fns": _advantage_of_row, "advantage_fn": np.asarray, **others}
    learner = _Learner(rl_cluster=cluster, grpo_config=_algorithm(s), observers=[], **given)
    learner.prepare(s["total_steps"])
    return learner


def gradient(trainer: Trainer, rows: Sequence[Row]) -> Arrays:
    """Compute the gradient of one step: the learner makes it, with an optimizer that keeps the gradient."""
    if trainer.settings["processes"] > 1:
        return _gradient_of_processes(trainer, rows)
    learner = trainer.recorder
    _train(learner, rows)
    assert learner.cluster.trainer is not None, "made by `prepare`"
    return _arrays(learner, learner.cluster.trainer.opt_state)


def _gradient_of_processes(trainer: Trainer, rows: Sequence[Row]) -> Arrays:
    """Compute the gradient in several processes, each of which samples a share; this file is their script."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {**trainer.settings, "processes": 1}
        arguments = worker.write([trainer.folder, settings, rows], f"{folder}/rows.npz")
        Path(folder, "arguments.json").write_text(json.dumps(arguments))
        script = TrainingCommand((__file__, folder), run=None)
        options = LocalOptions(processes=trainer.settings["processes"], logs=folder)
        # Of all devices that XLA_FLAGS may ask for on a CPU, each process has one.
        if code := launch(script, options, program=("env", "XLA_FLAGS=", sys.executable, "-P")):
            raise ChildProcessError(f"the processes ended with exit code {code}")
        with np.load(f"{folder}/gradient.npz") as arrays:
            return dict(arrays)


def _join(folder: str) -> None:
    """Compute the gradient together with other processes; the first one writes it."""
    with processes.start():
        with np.load(f"{folder}/rows.npz") as arrays:
            arguments = worker.decode(json.loads(Path(folder, "arguments.json").read_text()), dict(arrays))
        found = gradient(load(*arguments[:2]), arguments[2])
        if processes.here().is_first:
            np.savez(f"{folder}/gradient.npz", **found)  # type: ignore[arg-type]  # NumPy takes names for switches


def step(trainer: Trainer, rows: Sequence[Row]) -> Arrays:
    """Make one step; return the weights that `RLCluster.save` writes."""
    _train(trainer.main, rows)
    with tempfile.TemporaryDirectory() as folder:
        export(trainer, f"{folder}/model")
        return {name: np.asarray(w, np.float32) for name, w in load_file(f"{folder}/model/model.safetensors").items()}


def logps(trainer: Trainer, rows: Sequence[Row]) -> list[np.ndarray]:
    """Compute the log-probs before an update, as a learner does that makes several on a batch."""
    return _old_logps(trainer.main, _groups(rows))


def sample(trainer: Trainer, prompts: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Draw completions with the rollout's weights; what goes into training is read from the rows that it packs."""
    trainer.draws += 1
    groups = trainer.main.cluster.generate([{"prompt": text} for text in prompts], count, step=trainer.draws)
    completions = [(g.prompt_tokens, c) for g in groups for c in g.completions]
    return [
        {"prompt": prompt.tolist(), "sampled": c.tokens.tolist(), "completion": scored.tolist(),
         "logps": c.logps, "finished": not c.finish.was_cut}
        for (prompt, c), scored in zip(completions, _scored_tokens(trainer.main, groups), strict=True)
    ]  # fmt: skip


def advantages(trainer: Trainer, rewards: np.ndarray) -> np.ndarray:
    """Score groups by reward functions that return these rewards, and estimate the advantages."""
    prompts, samples, functions = rewards.shape
    s = {**trainer.settings, "samples": samples, "prompts": prompts}
    scores = [_column(rewards[..., k]) for k in range(functions)]
    learner = _refusals(lambda: make_learner(trainer.folder, s, optax.identity(), reward_fns=scores, advantage_fn=None))
    rows = [{"prompt": [5], "completion": [6, 2], "group": p, "finished": True} for p in range(prompts)]
    groups = learner.make_experience(learner.rollout(_stand_in(learner, [r for r in rows for _ in range(samples)])))
    return np.array([g.advantages for g in groups.groups])


def export(trainer: Trainer, folder: str) -> None:
    """Write the actor as a Hugging Face folder, adapters merged."""
    trainer.main.cluster.save(folder)


def save(trainer: Trainer, folder: str) -> None:
    """Write a checkpoint, as a run does."""
    learner = trainer.main
    with covey.Checkpointer(folder) as checkpoints:
        checkpoints.save(learner.step, learner.cluster.state(), learner.state())


def restore(folder: str, settings: Mapping[str, Any]) -> Trainer:
    """Load the model, and then the last checkpoint of the folder, as a run does that goes on."""
    trainer = load(settings["model"], settings)
    learner = trainer.main
    with covey.Checkpointer(folder, read_only=True) as checkpoints:
        step = checkpoints.latest()
        state, extra = checkpoints.restore(step, learner.cluster.state_shapes())
    learner.cluster.load_state(state, step or 0)
    learner.load_state(extra, step or 0)
    return trainer


def agreement(trainer: Trainer, prompts: Sequence[str]) -> float:
    """Sample and make an update; return the metric of its record."""
    learner = make_learner(trainer.folder, trainer.settings, optax.identity(), reward_fns=_either)
    return _step(learner, [{"prompt": text} for text in prompts], 1).metrics["sampling/token_agreement"]  # type: ignore[no-any-return]


def turns(trainer: Trainer, messages: Sequence[covey_types.Message], replies: Sequence[str]) -> list[dict[str, Any]]:
    """Play episodes in an environment that replies as it is told, with the history that the template renders."""
    config = covey.EnvsConfig(
        max_turns=len(replies) + 1, max_turn_tokens=trainer.settings["turn_tokens"], history="template", rehearsal=False
    )
    environments = covey.EnvironmentRunner(lambda row: _Script(messages, replies), config)
    s = {**trainer.settings, "max_tokens": 128}
    with environments:
        learner = make_learner(trainer.folder, s, optax.identity(), environments=environments)
        groups = learner.cluster.generate([{"prompt": ""}] * 2, s["samples"])
    completions = [c for g in groups for c in g.completions]
    return list(map(_episode, completions, _scored_tokens(learner, groups), _old_logps(learner, groups)))


class _Script:
    """Environment that says `replies`, one after each turn of the model."""

    def __init__(self, messages: Sequence[covey_types.Message], replies: Sequence[str]):
        self.messages, self.replies = messages, iter(replies)

    def reset(self) -> Sequence[covey_types.Message]:
        return self.messages

    def step(self, reply: str) -> covey.Step:
        text = next(self.replies, None)
        return covey.Step("" if text is None else text, done=text is None)


def _episode(completion: covey.Completion, scored: np.ndarray, trainer_logps: np.ndarray) -> dict[str, Any]:
    assert completion.episode is not None
    assert completion.mask is not None
    ends, at = completion.episode.turn_ends, np.flatnonzero(completion.mask)
    turns = [completion.tokens[at[(at >= start) & (at < end)]] for start, end in pairwise([0, *ends])]
    names = {"trained": scored, "logps": completion.logps, "trainer_logps": trainer_logps}
    return {"sampled": [turn.tolist() for turn in turns]} | {name: x[at] for name, x in names.items()}


def _scored_tokens(learner: _Learner, groups: list[covey.Group]) -> list[np.ndarray]:
    """Return the tokens of each completion as the rows of its training have them."""
    x = learner.compute_logps(Experience(groups, gather_table(groups)))
    assert x.packed is not None, "made by `compute_logps`"
    rows, tokens = x.packed.slice(0, len(groups)).rows, [np.full(n, -1) for n in x.lengths]
    for (number, place), token in zip(rows.scatter_index[rows.scored], rows.target[rows.scored], strict=True):
        tokens[number][place] = token
    return tokens


def _old_logps(learner: _Learner, groups: list[covey.Group]) -> list[np.ndarray]:
    several = replace(learner.config, num_iterations=2)
    scorer = _Learner(rl_cluster=learner.cluster, grpo_config=several, reward_fns=_either)
    found = scorer.compute_logps(Experience(groups, gather_table(groups))).old_logps
    assert found is not None, "several updates need them"
    return found


def _train(learner: _Learner, rows: Sequence[Row]) -> None:
    _step(learner, _stand_in(learner, rows).examples, learner.step + 1)
    del learner.cluster.generate  # that of the class samples again
    learner.rows = ()


def _step(learner: _Learner, examples: Sequence[Row], total: int) -> Any:
    """Make one step on these prompts, in a run of `total` updates, and return its record."""
    return next(learner.steps(covey.PromptLoader(examples, len(examples), shuffle=False, num_epochs=1), total))


def _stand_in(learner: _Learner, rows: Sequence[Row]) -> PromptBatch:
    """Let the cluster give these rows for what it would sample; return their prompts."""
    groups = {group.columns["number"]: group for group in _groups(rows)}
    learner.rows = rows if "old_logps" in rows[0] else ()
    learner.cluster.generate = lambda examples, *_, **__: [groups[row["number"]] for row in examples]  # type: ignore[method-assign]
    examples = [{"prompt": "", "number": number} for number in groups]
    return PromptBatch(learner.step, 0, examples)


def _groups(rows: Sequence[Row]) -> list[covey.Group]:
    groups = []
    for number in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == number]
        columns = {"advantage": [row.get("advantage", 0.0) for row in members], "number": number}
        prompt = np.array(members[0]["prompt"], np.int32)
        groups.append(covey.Group("", prompt, tuple(map(_completion, members)), columns))
    return groups


def _completion(row: Row) -> covey.Completion:
    tokens = np.array(row["completion"], np.int32)
    logps = np.asarray(row.get("logps", row.get("old_logps", np.zeros(len(tokens)))), np.float32)
    finish = covey.FinishReason.STOP if row["finished"] else covey.FinishReason.LENGTH
    return covey.Completion(tokens, logps, logps, finish, mask=np.array(row["mask"], bool) if "mask" in row else None)


def _either(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Reward function: every second sample has 1."""
    return [float(n % 2) for n in range(len(completions))]


def _advantage_of_row(number: Sequence[int], advantage: Sequence[Sequence[float]], **columns: Any) -> list[float]:
    """Reward function that returns each row's advantage; both columns are those of the row's group."""
    return [of_group[number[:n].count(number[n])] for n, of_group in enumerate(advantage)]


def _column(rewards: np.ndarray) -> Callable[..., list[float | None]]:
    """Return the reward function of one column of a table [P, G]; NaN is what it does not score."""
    by_sample = iter(rewards.reshape(-1).tolist())

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [None if np.isnan(x := next(by_sample)) else x for _ in completions]

    return reward


def _algorithm(s: Mapping[str, Any]) -> covey.GRPOConfig:
    others: dict[str, Any] = {"kl": s["kl"]} if s["beta"] else {}
    if s["algorithm"] == "dapo":  # the loss alone
        others |= {"max_sampling_rounds": 1, "overlong_buffer": 0.0}
    return covey.GRPOConfig(
        algorithm=s["algorithm"], num_generations=s["samples"], num_iterations=s["iterations"],
        epsilon=s["epsilon"], epsilon_high=s["epsilon_high"],
        beta=s["beta"], mask_truncated=s["mask_truncated"], advantage=s["advantage"],
        reward_weights=s["reward_weights"] and tuple(s["reward_weights"]), **others,
    )  # fmt: skip


def _adamw(s: Mapping[str, Any]) -> covey.OptimizerConfig:
    return covey.OptimizerConfig(
        learning_rate=s["learning_rate"], b1=s["b1"], b2=s["b2"], eps=s["eps"], weight_decay=s["weight_decay"],
        warmup_ratio=s["warmup_steps"] / s["total_steps"], schedule="constant", max_grad_norm=s["max_grad_norm"],
    )  # fmt: skip


def _record(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return jax.tree.map(jnp.zeros_like, gradient), gradient


def _arrays(learner: _Learner, tree: Any) -> Arrays:
    """Return the arrays of a tree like the weights, by Hugging Face name and in that layout."""
    names = families.tensor_names(learner.cluster.actor.config)
    return {
        names[path]: families.convert_layout(path, processes.here().to_host(x)) for path, x in flatten(tree).items()
    }


def _refusals(make: Callable[[], Any]) -> Any:
    """Call `make`; what Covey refuses does not apply, with the first line of its error."""
    try:
        return make()
    except covey.CoveyError as error:
        raise NotImplementedError(str(error).splitlines()[0]) from None


if __name__ == "__main__":
    _join(sys.argv[1])
