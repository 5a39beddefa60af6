"""`train(..., out=)`: a script's run has the folder of a command's run, and goes on in it bit for bit."""

import io
import json
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

import covey
from covey import (
    ClusterConfig,
    CoveyError,
    EnvsConfig,
    EvalConfig,
    GRPOConfig,
    GRPOLearner,
    Learner,
    LoRAConfig,
    OptimizerConfig,
    PPOConfig,
    RewardRunner,
    RewardSafetyConfig,
    RLCluster,
    RLTrainingConfig,
    RolloutConfig,
    SFTConfig,
    train_grpo,
)
from covey.cli.checks import resume_command
from covey.cli.main import main
from covey.config import recipe
from covey.config.base import all_contradictions
from covey.config.metrics import CLOCKS
from covey.config.recipe import load_any
from covey.errors import RecipeError, ResumeError, Stopped, WeightsError
from covey.models.loading.weights import load
from covey.monitor.record import History, StepRecord
from covey.monitor.run_files import METRICS, SAMPLES
from covey.run.signals import SignalHandler

pytestmark = pytest.mark.usefixtures("shared_programs", "small_scratch")

ROWS = [{"prompt": f"{a}+{b}="} for a in range(1, 5) for b in range(1, 4)]
HELD_OUT = [{"prompt": "7+8="}]


def length(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


def cluster_config_of(steps: int, seed: int, tokens: int, **more: Any) -> ClusterConfig:
    training = RLTrainingConfig(
        max_steps=steps,
        prompts_per_step=2,
        actor_optimizer=OptimizerConfig(learning_rate=1e-3),
        show=("loss",),
        token_values_every_n_steps=tokens,
        row_length=64,
        max_tokens_per_micro_batch=64,
        **{"checkpoint_every_n_steps": 2, **more},
    )
    rollout = RolloutConfig(max_new_tokens=4, max_prompt_length=8, slots=4, seed=seed)
    return ClusterConfig(training_config=training, rollout_config=rollout)


def cluster_of(steps: int, seed: int, actor: str, tokens: int) -> RLCluster:
    return RLCluster.load(actor=actor, cluster_config=cluster_config_of(steps, seed, tokens))


def learner(
    steps: int = 4, seed: int = 0, actor: str = "scratch:arithmetic-tiny@3", tokens: int = 0, **more: Any
) -> GRPOLearner:
    cluster = cluster_of(steps, seed, actor, tokens)
    algorithm = GRPOConfig(beta=0.05, num_generations=2)
    return GRPOLearner(rl_cluster=cluster, reward_fns=length, grpo_config=algorithm, **more)


class Echo:
    """An environment of two turns, which pays by the length of each."""

    def __init__(self, row: Mapping[str, Any]):
        self.prompt, self.turns = row["prompt"], 0

    def reset(self) -> str:
        return str(self.prompt)

    def step(self, reply: str) -> Any:
        self.turns += 1
        return covey.Step("+1=", reward=float(len(reply) % 3), done=self.turns == 2)


def measured(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics without times, which differ from run to run."""
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCKS)} for row in rows]


def weights(of: Learner) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(of.cluster.state())]


def check_token_values(folder: Path) -> None:
    """Each step that is due has one group with the log-probs that its completions were sampled with, and changes."""
    rows = [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]
    assert [(row["step"], row["sample"]) for row in rows] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    samples = [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]
    shown = {(one["step"], one["group"], one["sample"]): one for one in samples}
    for row in rows:
        sample, length = shown[row["step"], row["group"], row["sample"]], len(row["texts"])
        assert length == sample["length"]
        assert {len(row[name]) for name in ("sampler_logps", "logps", "change", "entropy", "kl")} == {length}
        assert "".join(row["texts"]).startswith(sample["text"])
        assert row["advantage"] == pytest.approx(sample["advantage"], abs=1e-3)
        assert row["logps"] == pytest.approx(row["sampler_logps"], abs=1e-4)
        if row["advantage"]:
            assert sum(row["change"]) * row["advantage"] > 0


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GRPOLearner]:
    """A run of four steps that nothing has stopped."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    one = learner()
    phases: list[str] = []
    one.on_phase = phases.append
    one.train(ROWS, HELD_OUT, out=out)
    assert "evaluate" not in phases, "the run evaluates, and the learner not once more"
    return out, one


@pytest.mark.slow
def test_the_folder_has_what_a_run_of_a_command_has(straight: tuple[Path, GRPOLearner]) -> None:
    pytest.importorskip("covey_status")
    out, one = straight
    files = {"recipe.yaml", METRICS, SAMPLES, "summary.json", "before.jsonl", "after.jsonl", "heartbeat.json"}
    assert files <= {path.name for path in out.iterdir()}
    assert sorted(path.name for path in (out / "checkpoints").iterdir() if path.is_dir()) == ["00000002", "00000004"]
    settings = recipe.read_settings(out)
    assert settings["rewards"] == ["length"]
    assert settings["grpo.beta"] == 0.05
    assert {"reward", "samples"} <= json.loads((out / "summary.json").read_text())["after"].keys()
    assert len((out / SAMPLES).read_text().splitlines()) == 4 * 2 * 2
    assert [row["step"] for row in one.history] == [1, 2, 3, 4]
    assert resume_command(out) == "the script that began it: learner.train(rows, out=...)"


@pytest.mark.slow
def test_the_folder_is_reported_and_watched_as_that_of_a_command(straight: tuple[Path, GRPOLearner]) -> None:
    page, watching = (pytest.importorskip(f"covey_report.{name}") for name in ("page", "cli.watch"))
    out, _ = straight
    assert (out / "report.html").is_file()
    data = page.read_run(out)
    assert (data.state, list(data.steps)) == ("finished", [1, 2, 3, 4])
    file = io.StringIO()
    assert watching.watch(out, once=True, console=Console(file=file, width=80)) == 0
    assert "steps" in file.getvalue()


@pytest.mark.slow
def test_one_call_is_the_cluster_and_the_learner(straight: tuple[Path, GRPOLearner], tmp_path: Path) -> None:
    """The same bits, from a file, with the evaluations of the held-out rows and without a folder."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = cluster_config_of(steps=4, seed=0, tokens=0, eval_every_n_steps=2)
    one = train_grpo(
        model="scratch:arithmetic-tiny@3",
        reward_funcs=length,
        train_dataset=tmp_path / "rows.jsonl",
        eval_dataset=HELD_OUT,
        grpo_config=GRPOConfig(beta=0.05, num_generations=2),
        training_config=config.training_config,
        rollout_config=config.rollout_config,
    )
    assert one.history["reward"] == straight[1].history["reward"]
    assert all(np.array_equal(a, b) for a, b in zip(weights(one), weights(straight[1]), strict=True))
    assert one.evaluations == straight[1].evaluations
    assert [name for name in one.evaluations if one.evaluations[name]["samples"] == 1] == ["before", "after"]
    assert one.history["eval/reward"][-1] == one.evaluations["after"]["reward"]
    assert [row["step"] for row in one.history if "eval/reward" in row] == [2, 4]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "smolm2-135m"}, "did you mean 'smollm2-135m'?"),
    "no reward": ({"reward_funcs": ()}, "no reward function"),
    "reward": ({"reward_funcs": "exact_anser"}, "there is no reward function 'exact_anser'"),
    "empty": ({"train_dataset": []}, "train_dataset: the data set is empty"),
    "file": ({"train_dataset": "none.jsonl"}, "train_dataset: data.path: there is no none.jsonl"),
    "column": ({"reward_funcs": "arithmetic_answer"}, "train_dataset: .*'arithmetic_answer' asks for 'answer'"),
    "held-out column": (
        {"eval_config": EvalConfig(accuracy="arithmetic_answer"), "eval_dataset": HELD_OUT},
        "eval_dataset",
    ),
    "keyword": ({"peft_config": 1}, "train_grpo has no keyword 'peft_config'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_one_call_is_told_before_anything_is_loaded(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.rl.cluster.load_models", None)
    changed, told = MISTAKES[mistake]
    call: dict[str, Any] = {"model": "smollm2-135m", "reward_funcs": length, "train_dataset": ROWS, **changed}
    began = time.monotonic()
    with pytest.raises(CoveyError, match=re.escape(told) if mistake != "column" else told):
        train_grpo(**call)
    assert time.monotonic() - began < 1


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(straight: tuple[Path, GRPOLearner], tmp_path: Path) -> None:
    def stop(record: StepRecord) -> None:
        if record.step == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Stopped) as stopped:
        learner(observers=[stop], tokens=2).train(ROWS, HELD_OUT, out=tmp_path / "run")
    assert stopped.value.step == 3
    again = learner(tokens=2)
    again.train(ROWS, HELD_OUT, out=tmp_path / "run")
    assert measured(tmp_path / "run") == measured(straight[0])  # in which no tokens were scored
    if find_spec("covey_report"):
        check_token_values(tmp_path / "run")
    assert all(np.array_equal(a, b) for a, b in zip(weights(again), weights(straight[1]), strict=True))
    assert again.history["reward"] == straight[1].history["reward"]


@pytest.mark.slow
def test_a_finished_run_gives_its_weights_to_a_new_learner(straight: tuple[Path, GRPOLearner]) -> None:
    again = learner()
    again.train(ROWS, HELD_OUT, out=straight[0])
    assert again.step == 4
    assert len(again.history) == 4
    assert all(np.array_equal(a, b) for a, b in zip(weights(again), weights(straight[1]), strict=True))


@pytest.mark.slow
def test_a_run_of_ppo_keeps_its_critic(tmp_path: Path) -> None:
    """The second learner makes a critic of its own, which the checkpoint's replaces."""
    kind = pytest.importorskip("covey_ppo.learner").PPOLearner
    one, again = (
        kind(
            rl_cluster=cluster_of(2, 0, "scratch:guess-tiny@1", 0),
            reward_fns=length,
            ppo_config=PPOConfig(num_generations=2),
        )
        for _ in range(2)
    )
    for each in (one, again):
        each.train(ROWS, out=tmp_path / "run")
    assert [row["critic/value_loss"] > 0 for row in measured(tmp_path / "run")] == [True, True]
    assert again.step == 2
    assert "critic" in again.cluster.state()
    assert all(np.array_equal(a, b) for a, b in zip(weights(again), weights(one), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rows", "words"),
    [
        ({"seed": 7}, ROWS, "seed was 0, is 7"),
        ({}, ROWS[1:], "the data does not go on where it stopped"),
        ({"actor": "scratch:arithmetic-tiny@2"}, ROWS, "this run began with the weights"),
    ],
)
def test_another_run_is_refused(
    straight: tuple[Path, GRPOLearner], how: Mapping[str, Any], rows: list[Any], words: str
) -> None:
    before = (straight[0] / METRICS).read_bytes()
    with pytest.raises(ResumeError, match=words):
        learner(**how).train(rows, out=straight[0])
    assert (straight[0] / METRICS).read_bytes() == before


@pytest.mark.slow
def test_commands_say_that_the_script_has_the_data(
    straight: tuple[Path, GRPOLearner], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["train", "--resume"], ["eval"]):
        assert main([*words, str(straight[0])]) == 2
        assert "script" in capsys.readouterr().err, words


def test_what_is_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    one = learner()
    with pytest.raises(CoveyError, match="this folder is not empty"):
        one.train(ROWS, out=tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: x\nrewards: [first_letter]\n")
    with pytest.raises(ResumeError, match="begun by a command"):
        one.train(ROWS, out=tmp_path)
    one.step = 3
    with pytest.raises(RecipeError, match="already made 3 steps"):
        one.train(ROWS, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_second_signal_ends_the_run_and_not_the_script() -> None:
    def interrupted_twice() -> None:
        with SignalHandler(second_ends_process=False) as signals, signals.deferring():
            signal.raise_signal(signal.SIGINT)
            assert signals.requested() == "SIGINT"
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second signal has not ended the run")

    with pytest.raises(Stopped):
        interrupted_twice()


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    def needs_column(prompts: Any, completions: Any, answer: Any) -> list[float]:
        return [0.0] * len(completions)

    one = learner()
    one.reward_fns = [needs_column]
    with pytest.raises(CoveyError, match="answer"):
        one.train(ROWS, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert one.cluster.trainer is None  # the data are checked before anything is built


@pytest.mark.slow
def test_supervised_runs_keep_theirs_too(tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(12)]

    def made(stop: bool = False) -> Any:
        def observer(record: StepRecord) -> None:
            if stop and record.step == 2:
                signal.raise_signal(signal.SIGINT)

        optimizer = OptimizerConfig(learning_rate=1e-3)
        config = SFTConfig(max_steps=3, batch_size=4, optimizer=optimizer, row_length=64, max_tokens_per_micro_batch=64)
        return pytest.importorskip("covey_sft.learner").SFTLearner(
            model="scratch:arithmetic-tiny@1", config=config, observers=[observer]
        )

    straight, resumed = made(), made()
    straight.train(rows, rows[:4], out=tmp_path / "straight")
    with pytest.raises(Stopped):
        made(stop=True).train(rows, rows[:4], out=tmp_path / "run")
    resumed.train(rows, rows[:4], out=tmp_path / "run")
    assert measured(tmp_path / "run") == measured(tmp_path / "straight")
    assert resumed.history["loss"] == straight.history["loss"]
    states = (jax.tree.leaves(one.trainer.state()) for one in (straight, resumed))
    assert all(np.array_equal(a, b) for a, b in zip(*states, strict=True))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"]
    assert (tmp_path / "run" / "report.html").is_file() or not find_spec("covey_report")


@pytest.mark.slow
def test_the_actor_is_saved_for_transformers(straight: tuple[Path, GRPOLearner], tmp_path: Path) -> None:
    pytest.importorskip("covey_formats")
    cluster = straight[1].cluster
    assert cluster.save(tmp_path / "model").max_difference < 1e-4
    found = load(str(tmp_path / "model"))
    assert list(found.tokenizer.encode("7+8=")) == list(cluster.tokenizer.encode("7+8="))
    with pytest.raises(CoveyError):
        cluster.save(tmp_path / "model")


@pytest.mark.slow
def test_a_history_becomes_a_frame_or_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History([{"step": 1, "reward": 0.5}, {"step": 2, "reward": 1.0, "kl": 0.25}])
    pytest.importorskip("pandas")
    frame = history.to_frame()
    assert list(frame.index) == [1, 2]
    assert frame["reward"].tolist() == [0.5, 1.0]
    assert frame["kl"].isna().tolist() == [True, False]
    assert len(History().to_frame()) == 0
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(CoveyError, match="pandas is not installed"):
        history.to_frame()


# --- the settings of a script and those of a recipe


def changed(settings: Any, name: str, value: Any) -> Any:
    """The settings with another value at a dotted name, whatever else contradicts it."""
    first, _, rest = name.partition(".")
    new = copy(settings)
    vars(new)[first] = changed(getattr(settings, first), rest, value) if rest else value
    return new


WRONG: list[tuple[str, Any]] = [
    ("rollout.temperature", 0.0),
    ("rollout.kv_cache_size", 1),
    ("rollout.tool", "calculator"),
    ("grpo.overlong_buffer", 5000.0),
    ("grpo.credit", "turn"),
    ("grpo.reward_weights", (1.0,) * 9),
    ("training.off_policy_steps", 10**6),
    ("training.keep_best", "reward"),
    ("training.keep_best", "eval/accuracy"),
    ("training.keep_best", "rewards/none/mean"),
    ("training.show", ("rewards/none/mean",)),
    ("reward_safety.on_error_of", {"none": "raise"}),
    ("envs.action_field", "text"),
    ("envs.python_engine", "wasm"),
]
"""Settings and values that contradict others in some recipes, or in all."""
ROW = {"prompt": "1+1=", **dict.fromkeys(("answer", "letter", "topic", "solution", "hidden", "low", "high"), "2")}


def script_verdict(of: recipe.Recipe) -> str:
    """What `train_grpo` says of the settings of a recipe before it loads anything; "" if they are right."""
    environments = covey.EnvironmentRunner(config=of.envs) if of.envs.environment or of.envs.tools else None
    try:
        train_grpo(
            model="smollm2-135m", train_dataset=[ROW], reward_funcs=list(of.rewards), grpo_config=of.grpo,
            training_config=of.training, rollout_config=of.rollout, eval_config=of.evaluation,
            reward_runner=RewardRunner(of.reward_safety), environments=environments,
        )  # fmt: skip
    except RecipeError as error:
        return str(error)
    except NotImplementedError:
        return ""
    raise AssertionError


@pytest.mark.parametrize("name", recipe.names(recipe.Recipe))
def test_the_settings_of_each_recipe_get_the_same_verdicts_in_a_script(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_nothing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr("covey.recipes.train_grpo.load_for", load_nothing)
    ready, refused = recipe.read_built_in(name), 0
    plays = bool(ready.envs.environment or ready.envs.tools)  # else a script has no place for the settings of one
    for package, is_needed in {"covey_envs": plays, "covey_gsm8k": name.startswith("gsm8k")}.items():
        if is_needed:
            pytest.importorskip(package)
    for setting, value in [("seed", 5), *WRONG] if plays else [("seed", 5), *WRONG[:-2]]:
        section, tried = setting.partition(".")[0], changed(ready, setting, value)
        problems = [problem.what for problem in all_contradictions(tried) if problem.key.startswith(section)]
        verdict = script_verdict(tried)
        assert bool(problems) == bool(verdict), (setting, problems, verdict)
        assert all(what in verdict for what in problems), (setting, verdict)
        refused += bool(problems)
    assert 8 <= refused <= len(WRONG)


def learner_with(
    environments: Any = None, safety: RewardSafetyConfig | None = None, algorithm: GRPOConfig | None = None, **more: Any
) -> GRPOLearner:
    config = cluster_config_of(4, 0, 0, **more.pop("training", {}))
    cluster = RLCluster.load(actor="scratch:arithmetic-tiny@1", cluster_config=config, environments=environments)
    grpo = algorithm or GRPOConfig(num_generations=2, beta=0.0)
    runner = RewardRunner(safety) if safety else None
    return GRPOLearner(rl_cluster=cluster, reward_fns=length, grpo_config=grpo, reward_runner=runner, **more)


def in_turns(**more: Any) -> Any:
    pytest.importorskip("covey_envs")
    return covey.EnvironmentRunner(Echo, EnvsConfig(**{"max_turns": 2, **more}))


def kill(record: StepRecord) -> None:
    if record.step == 3:
        raise InterruptedError


def test_turns_of_an_environment_that_is_an_object_get_their_credit_and_others_none() -> None:
    turns = GRPOConfig(num_generations=2, beta=0.0, credit="turn")
    assert learner_with(in_turns(), algorithm=turns).algorithm.credit == "turn"
    with pytest.raises(RecipeError, match=r"grpo\.credit is turn, and there is no environment"):
        learner_with(algorithm=turns)


def test_a_critic_that_nothing_reads_is_refused_in_a_script_too() -> None:
    cluster = RLCluster.load(
        actor="scratch:arithmetic-tiny@1", critic="scratch:arithmetic-tiny@1", cluster_config=cluster_config_of(4, 0, 0)
    )
    with pytest.raises(RecipeError, match="critic is set, and grpo has none"):
        GRPOLearner(rl_cluster=cluster, reward_fns=length, grpo_config=GRPOConfig(num_generations=2))


def test_what_can_do_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    one = learner_with(training={"keep_best": "reward", "eval_every_n_steps": 2})
    one.step = 4
    one.train(ROWS)
    assert caplog.messages == [
        "nothing is written without train(..., out=FOLDER), but training.checkpoint_every_n_steps, training.keep_best"
        " is set",
        "training.eval_every_n_steps is set, and there are no held-out rows: nothing is evaluated",
    ]
    caplog.clear()
    one = learner_with(training={"eval_every_n_steps": 2})
    one.step = 4
    one.train(ROWS, HELD_OUT)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("name", recipe.names(recipe.SFTRecipe))
def test_a_supervised_recipe_and_a_script_get_the_same_verdicts(name: str) -> None:
    ready = recipe.read_built_in(name)
    for setting, value in (("keep_best", ""), ("keep_best", "loss"), ("keep_best", "eval/loss"), ("show", ("reward",))):
        tried = changed(ready, f"training.{setting}", value)
        problems = [p.what for p in all_contradictions(tried) if p.key.startswith("training")]
        with pytest.raises(RecipeError) if problems else nullcontext() as error:
            pytest.importorskip("covey_sft.learner").SFTLearner(
                model="scratch:arithmetic-tiny@1", config=tried.training
            )
        assert all(what in str(error.value) for what in problems)


def test_the_metrics_of_a_loss_of_the_users_may_be_shown_and_others_not() -> None:
    config = SFTConfig(max_steps=1, show=("my_metric",))
    pytest.importorskip("covey_sft.learner").SFTLearner(
        model="scratch:arithmetic-tiny@1", config=config, loss_fn=lambda graph, params, rows: (0.0, {})
    )
    with pytest.raises(RecipeError, match="my_metric"):
        pytest.importorskip("covey_sft.learner").SFTLearner(model="scratch:arithmetic-tiny@1", config=config)


@pytest.mark.slow
def test_a_script_is_resumed_with_its_settings_or_told_what_differs(
    tmp_path: Path, write_meta: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out, older = tmp_path / "run", tmp_path / "older"
    rows = [*ROWS, {"prompt": "1+1+1+1+1+1="}]
    drop: dict[str, Any] = {"training": {"too_long": "drop"}}
    with pytest.raises(InterruptedError):
        learner_with(in_turns(), RewardSafetyConfig(), observers=[kill], **drop).train(rows, out=out)
    assert json.loads((out / "summary.json").read_text())["data"]["dropped"] == 1
    settings = recipe.read_settings(out)
    assert (settings["envs.environment"], settings["rewards"]) == (f"{__name__}:Echo", ["length"])
    shutil.copytree(out, older)
    (saved,) = older.glob("checkpoints/0*")
    meta = json.loads((saved / "meta.json").read_text())
    del meta["extra"]["base"]  # an older version had recorded neither
    meta["extra"]["settings"] |= {"envs.environment": None, "envs.max_turns": 8, "rewards": ["echo", "length"]}
    write_meta(saved, json.dumps(meta))

    with pytest.raises(ResumeError, match=r"envs\.max_turns was 2, is 4"):
        learner_with(in_turns(max_turns=4), **drop).train(rows, out=out)
    with pytest.raises(ResumeError, match=r"too_long was 'drop', is 'truncate'; rows was 12, is 13"):
        learner_with(in_turns(), training={"too_long": "truncate"}).train(rows, out=out)
    capsys.readouterr()
    learner_with(in_turns(), RewardSafetyConfig(on_error="none", budget=5), **drop).train(rows, out=out)
    assert (
        "reward_safety.on_error was 'raise', is 'none'; reward_safety.budget was 100, is 5" in capsys.readouterr().out
    )
    capsys.readouterr()
    learner_with(in_turns(), **drop).train(rows, out=older)
    assert "was saved" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), [(0.1, 5.0), (0.0, 5.0), (0.1, 0.0)])
def test_another_beta_acts_when_a_script_is_resumed(then: float, now: float, tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        learner_with(algorithm=GRPOConfig(num_generations=2, beta=then), observers=[kill]).train(
            ROWS, out=tmp_path / "run"
        )
    again = learner_with(algorithm=GRPOConfig(num_generations=2, beta=now))
    again.train(ROWS, out=tmp_path / "run")
    last = measured(tmp_path / "run")[-2:]
    assert len(again.history) == 4
    if now:  # with one update on a batch the rest of the loss is 0
        assert [row["loss"] / row["kl"] for row in last] == pytest.approx([now, now], rel=1e-3)
    else:
        assert [row["loss"] for row in last] == pytest.approx([0.0, 0.0], abs=1e-6)


@pytest.mark.slow
def test_the_best_checkpoint_is_that_of_the_metric_in_force(tmp_path: Path) -> None:
    def kept(metric: str) -> dict[str, Any]:
        return {"training": {"keep_best": metric, "checkpoint_every_n_steps": 1, "eval_every_n_steps": 4}}

    with pytest.raises(InterruptedError):
        learner_with(observers=[kill], **kept("step")).train(ROWS, out=tmp_path / "run")
    last = learner_with(eval_config=EvalConfig(during_prompts=1), **kept("learning_rate"))
    last.train(ROWS, ROWS[:2], out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"] == 3  # of 3 and 4: it decays
    assert (last.history["eval/samples"], last.evaluations["after"]["samples"]) == ([1], 2)


def small(**more: Any) -> dict[str, Any]:
    config = cluster_config_of(1, 0, 0)
    return {
        "train_dataset": ROWS[:2],
        "reward_funcs": length,
        "training_config": config.training_config,
        "rollout_config": config.rollout_config,
        "grpo_config": GRPOConfig(num_generations=2, beta=0.0),
        **more,
    }


@pytest.mark.slow
def test_commands_open_a_run_of_adapters_that_a_script_began(tmp_path: Path) -> None:
    """Its recipe says what the script gave; the run and its exported adapter are models to train further."""
    pytest.importorskip("covey_formats")
    first, adapter = tmp_path / "first", tmp_path / "adapter"
    train_grpo(model="scratch:arithmetic-tiny@1", lora=LoRAConfig(rank=2), out=first, **small())
    model = load_any(first).model
    assert (model.source, model.lora.rank) == ("scratch:arithmetic-tiny@1", 2)
    assert main(["generate", str(first), "1+2=", "--rollout.max-new-tokens=2"]) == 0
    assert main(["export", str(first), "--out", str(adapter), "--format", "peft"]) == 0
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "scratch:arithmetic-tiny@1"
    again = train_grpo(model=str(adapter), **small())
    second = train_grpo(model=str(first), out=tmp_path / "second", **small())
    assert again.history["reward"] == second.history["reward"]
    assert load_any(tmp_path / "second").model.source == str(first)


def test_an_adapter_without_a_base_says_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "tiny"}')
    with pytest.raises(WeightsError, match="no base that can be loaded: 'tiny'"):
        train_grpo(model=str(tmp_path), **small())
