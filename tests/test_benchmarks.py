"""A benchmark runs, its variants compute the same, and it ends in the line of JSON that all parts promise; the work
that it is measured by is counted right.

Of the comparison with peers: the driver with our own worker, and the checkpoint that makes lengths ragged. The peers
themselves are not installed.
"""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import agreement, common, curves, ragged, restarts, sizes, step
from benchmarks.__main__ import main
from benchmarks.layouts import CASES, LAYOUTS, MESHES, resumes
from benchmarks.memory import Phase, selected
from benchmarks.memory_events import live_bytes
from benchmarks.peers.__main__ import compare, tell
from benchmarks.peers.__main__ import main as peers_main
from benchmarks.peers.checkpoint import write
from benchmarks.peers.runner import _environment, turns
from benchmarks.peers.whole import Clock, whole
from benchmarks.peers.work import PAD, SHARE, STOP, Work
from benchmarks.restarts import _parser, command, draw_kills
from benchmarks.sizes import size_of
from covey.cli.main import main as covey
from covey.config import recipe
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.loading.weights import load
from covey_plan import roofline

MODEL = ModelConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    tie_embeddings=True,
)  # fmt: skip
SHAPE = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "rope_theta": 1e4,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("shared_programs")


# --- the parts


@pytest.fixture
def smallest(monkeypatch):
    size = sizes.Size(MODEL, 2, 4, prompt_length=16, mean_length=8, max_new_tokens=24, slots=4)
    monkeypatch.setitem(sizes.SIZES, "smallest", size)
    monkeypatch.setattr(roofline, "STREAMED", 2**20)
    monkeypatch.setattr(roofline, "CALLS", 1)
    return size


@pytest.fixture
def told(smallest, capsys):
    """The line of JSON of a part."""

    def measured(part, *words):
        assert main([part, "--size", "smallest", "--repeat", "1", *words]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return measured


@pytest.mark.slow
def test_a_part_ends_in_its_line_of_json(told):
    found = told("logprobs")
    asked = {"part": "logprobs", "size": "smallest", "ragged": True, "lora": 0, "repeat": 1, "dtype": "float32"}
    assert found.items() >= asked.items()
    assert found.keys() == asked.keys() | {"tokens", "variants", "checks", "peaks", "machine", "versions"}
    assert found["machine"].keys() == {"device", "devices", "cpu", "cores", "load"}
    assert found["versions"].keys() == {"python", "jax", "jaxlib", "flax", "numpy"}
    assert found["peaks"].keys() == {"matmul", "bandwidth"}
    assert list(found["variants"]) == ["dense, plain", "dense, chunked", "groups, plain", "groups, chunked"]
    names = {"seconds", "tokens_per_second", "speedup", "percent_of_peak", "rows", "padding", "temp_mb"}
    for figures in found["variants"].values():
        assert figures.keys() == names
        assert figures["seconds"].keys() == figures["speedup"].keys() == {"median", "low", "high"}
        assert figures["percent_of_peak"] > 0
    assert found["checks"].keys() == {"logps_difference", "gradient_difference"}
    assert max(found["checks"].values()) < 1e-5


@pytest.mark.slow
def test_decoding_keeps_every_slot_busy(told):
    found = told("decode", "--lora", "2")
    assert found["tokens"] == 4 * 8 * 32
    assert {"batch 8", "batch 32"} <= set(found["variants"])
    assert set(found["checks"].values()) == {True}
    for figures in found["variants"].values():
        assert figures["percent_of_peak"] > 0
        assert figures["binds"] == ("reading" if figures["reading_ms"] > figures["products_ms"] else "products")


@pytest.mark.slow
def test_rollouts_draw_the_same_and_have_a_limit(told):
    found = told("rollout")
    assert found["checks"] == {"same_tokens": True}
    assert all(figures["percent_of_peak"] > 0 for figures in found["variants"].values())


@pytest.mark.slow
def test_updates_agree_and_have_a_limit(told):
    found = told("update", "--lora", "2", "--only", "no remat")
    assert list(found["variants"]) == ["dense, no remat", "groups, no remat"]
    assert found["checks"]["grad_norm_difference"] < 1e-5
    assert all(figures["percent_of_peak"] > 0 for figures in found["variants"].values())


@pytest.mark.slow
def test_a_repetition_is_the_same_step_and_compiles_nothing(smallest):
    settings = common.Settings("smallest", True, 0, 1, smallest)
    way, words, compiled = step.Way(settings), step.prompts(settings), []

    def heard(event, duration_secs, **_):
        compiled.append(event) if event.endswith("backend_compile_duration") else None

    first = way.step(words)
    jax.monitoring.register_event_duration_secs_listener(heard)
    again = way.step(words)
    jax.monitoring.unregister_event_duration_listener(heard)
    assert compiled == []
    for one, other in zip(first.groups, again.groups, strict=True):
        assert [c.tokens.tolist() for c in one.completions] == [c.tokens.tolist() for c in other.completions]


@pytest.mark.slow
def test_a_second_start_finds_what_the_first_compiled(told, monkeypatch, tmp_path):
    real = tmp_path / "cache"
    (real / "compiled").mkdir(parents=True)
    monkeypatch.setenv("COVEY_CACHE", str(real))
    variants = told("startup")["variants"]
    assert list(variants) == ["cold", "warm"]
    assert variants["cold"]["from_cache"] == 0 < variants["cold"]["programs"] == variants["warm"]["programs"]
    assert list((real / "compiled").iterdir()) == []


def test_buffers_that_arrays_share_count_once():
    array = jax.device_put(np.zeros(1000, np.float32))
    assert live_bytes([array, array, jnp.ones(1000, jnp.float32)]) == 8000


def test_phases_are_told_at_their_first_time_and_at_their_peak():
    phases = [Phase(name, 1.0, 1.0, peak, 1.0, 0.0) for name, peak in [("a", 2.0), ("b", 1.0), ("a", 1.0), ("a", 3.0)]]
    assert selected(phases) == [phases[0], phases[1], phases[3]]


@pytest.mark.slow
def test_memory_is_told_by_phase_and_by_part(capsys):
    words = ["--model.source", "scratch:arithmetic-tiny", "--max-steps", "1", "--evaluation.prompts", "1"]
    words += ["--prompts-per-step", "2", "--num-generations", "2", "--max-sampling-rounds", "1"]
    assert main(["memory", "--recipe", "arithmetic-tiny", *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    # A phase that is shorter than the time between two readings has none; those below compile.
    assert {"imports", "rollout", "update"} <= {p["name"] for p in found["phases"]}
    parts = found["parts"]
    assert 0 < parts["weights"] < parts["optimizer"] < parts["floor"] < parts["peak"]
    assert parts["optimizer"] <= 2 * parts["weights"] + 2  # Adam's two moments, and nothing that a rollout left


@pytest.mark.slow
def test_curves_cost_every_axis_and_longer_maxima_change_no_token(smallest, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(curves, "FACTORS", (2,))
    monkeypatch.setattr(curves, "MAXIMA", (1, 2))
    monkeypatch.setattr(curves, "AXES", {name: curves.AXES[name] for name in ("prompt length",)})
    settings = common.Settings("smallest", True, 0, 1, smallest)
    found, maxima = curves.measure(settings), curves.longer_maxima(settings)
    curves.tell(found, maxima, settings)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [point["at"] for point in told["curves"]["prompt length"]] == [32]
    assert all(point[part]["median"] > 0 for points in found.values() for point in points for part in curves.PARTS)
    assert told["checks"]["maxima_same_tokens"]
    pytest.importorskip("matplotlib")
    curves.draw({**found, "maximum lengths": maxima}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_real_questions_are_told_by_their_padding_and_programs(monkeypatch, capsys, tmp_path):
    rows = [{"question": f"How much is {n} and 1 ?", "answer": f"It is so . #### {n + 1}"} for n in range(8)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fewer = {"grpo.num-generations": 2, "training.prompts-per-step": 2, "evaluation.prompts": 1}
    monkeypatch.setattr(ragged, "SETTINGS", ragged.SETTINGS | {"rollout.max-new-tokens": 8} | fewer)
    monkeypatch.setitem(ragged.SHAPES, "tiny", SHAPE)
    monkeypatch.setattr(ragged.subprocess, "call", lambda words, **_: covey(words[3:]))  # without another process
    assert ragged.main([str(tmp_path), "--steps", "2"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["steps_that_compiled"][0] == 1
    assert all(0 <= share["low"] <= share["mean"] <= share["high"] < 1 for share in told["waste"].values())
    assert {"rollout", "logps", "update"} <= set(told["programs"])


# --- sizes


def test_tokens_behind_the_first_that_differs_do_not_count():
    """Their contexts differ too; where a forward pass scores the tokens of another they do not."""
    first, other = np.array([[[1, 2, 3], [4, 5, 6]]]), np.array([[[1, 9, 9], [4, 5, 6]]])
    assert agreement.compare(first, other, whole=False) == (1, 2 + 3)
    assert agreement.compare(first, other, whole=True) == (2, 6)


def test_a_recipe_is_a_size():
    size = size_of("arithmetic-tiny", ["--model.source", "scratch:arithmetic-tiny", "--model.lora.rank", "4"])
    assert (size.model.hidden_size, size.model.num_layers) == (320, 2)
    assert (size.prompts, size.samples, size.prompt_length, size.max_new_tokens) == (48, 8, 6, 3)
    assert (size.slots, size.decode_chunk, size.row_length, size.micro_batch, size.lora) == (64, 2, 192, 1152, 4)


def test_the_model_of_a_run_is_the_one_it_began_with(tmp_path):
    run = tmp_path / "sft"
    run.mkdir()
    (run / "recipe.yaml").write_text(
        "name: sft\nmethod: sft\nmodel:\n  source: scratch:arithmetic-tiny\ndata:\n  task: sums\n"
    )
    assert size_of("arithmetic-tiny", ["--model.source", str(run)]).model.hidden_size == 320


def test_a_size_that_is_none_is_answered(capsys):
    assert main(["decode", "--size", "smolm2"]) == 2
    assert "there is no size or recipe 'smolm2'" in (said := capsys.readouterr().err)
    assert "did you mean 'smollm2'" in said
    assert main(["decode", "--size", "tiny", "--grpo.beta", "0"]) == 2
    assert "a size takes no settings" in capsys.readouterr().err


# --- the comparison with peers


@pytest.mark.slow
def test_peers_take_the_same_steps_in_turn(capsys):
    sizes = {"prompts": 2, "samples": 2, "prompt_length": 4, "max_prompt_length": 8, "max_new_tokens": 6}
    work = Work("smallest", "lora", "fixed", 500, **sizes, lora_rank=2, micro_prompts=2)
    tell(compare(work, SHAPE, 2, {"covey": sys.executable}), work)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told.keys() == {"part", "work", "results", "machine"}
    ours = told["results"]["covey"]
    assert [step["lengths"] for step in ours["steps"]] == [[6] * 4] * 3
    assert ours["times_covey"] == {"median": 1, "low": 1, "high": 1}
    assert 0 < ours["rollout"] < ours["seconds"]["high"] < ours["first_step"]
    sides = [64 + 64, 64 + 32, 64 + 32, 64 + 64, *[64 + 96] * 3]  # of the projections of a layer
    assert ours["parameters"] > ours["trainable"] == 2 * sum(sides)


def finished(start, *seconds):
    """A process that took steps of so many seconds."""
    programs = {"compiled": 2, "from_cache": 1, "compile_seconds": 0.5}
    steps = [{"seconds": s, "lengths": [3, 5], "cores": 2.0, **programs} for s in seconds]
    return SimpleNamespace(start=start, facts={"processor": 1.0, **programs}, steps=steps)


def test_the_whole_time_counts_start_compiling_and_every_step():
    told = whole(finished(4.0, 10.0, 1.0, 2.0), (1, 3, 5))
    assert told["from_enter"] == {0: 4, 1: 14, 3: 17, 5: None}
    assert told["from_first_step"] == {1: 10, 3: 13, 5: None}
    assert (told["steps"], told["tokens"], told["processor"]) == (3, 8, 1 + 2 * 13)
    assert (told["programs"], told["from_cache"], told["compile_seconds"]) == (4 * 2, 4, 2)


def test_steps_are_limited_by_peer_and_by_cache():
    clock = Clock((1, 100), at_most={"tunix": 20}, warm_steps=50)
    steps = {cache: [clock.steps(name, cache) for name in ("covey", "tunix")] for cache in clock.caches}
    assert steps == {"cold": [100, 20], "warm": [50, 20]}
    assert list(turns({"a": 3, "b": 2})) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a")]


def test_a_cache_goes_to_the_library_that_has_one(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "the/user's")
    names = ("COVEY_CACHE", "JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("COVEY_CACHE", raising=False)
    kept = {w: [_environment(f"{w}_worker", tmp_path).get(n) for n in names] for w in ("covey", "tunix", "trl")}
    assert kept == {"covey": [str(tmp_path), None], "tunix": [None, str(tmp_path)], "trl": [None, None]}
    assert [_environment("covey_worker", None).get(n) for n in names] == [None, ""]


@pytest.mark.parametrize("words", [["--whole", "0"], ["--whole", "1,200"], ["--at-most", "torch=3"]])
def test_steps_that_cannot_be_taken_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        peers_main(words)
    assert re.search("the data last for 127|no peer is called torch", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("probability", [0.0, 0.02, 0.3])
def test_the_stop_token_has_its_probability_at_every_step(tmp_path, probability):
    write(tmp_path, SHAPE, probability)
    loaded = load(tmp_path)
    assert loaded.tokenizer.stop_ids == (STOP,)
    tokens = np.random.default_rng(0).integers(2, SHAPE["vocab_size"], (4, 40)).astype(np.int32)
    positions = np.broadcast_to(np.arange(40), tokens.shape)
    hidden, _ = loaded.model(tokens, positions, causal_attention(jnp.ones(tokens.shape, bool), positions))
    shares = jax.nn.softmax(loaded.model.logits(hidden))
    np.testing.assert_allclose(shares[..., STOP], probability, rtol=0.02, atol=1e-9)
    assert shares[..., PAD].max() < 1e-9
    assert shares[..., 2:].max() < 5 / SHAPE["vocab_size"]  # and no other token stands out


def test_ragged_lengths_are_a_third_of_the_most():
    work = Work.of("tiny", "lora", "ragged")
    drawn = np.random.default_rng(0).geometric(work.stop_probability, 100_000)
    assert np.minimum(drawn, work.max_new_tokens).mean() == pytest.approx(SHARE * work.max_new_tokens, rel=0.02)
    assert Work.of("tiny", "full", "fixed").stop_probability == 0


# --- the comparison of processes


def test_the_cases_of_the_layouts_cover_every_pair_and_are_recipes():
    values = [("GRPO", "PPO", "SFT"), ("LoRA", "full"), tuple(MESHES)]
    rows = [(case.algorithm, case.weights, case.mesh) for case in CASES]
    for one, other in itertools.combinations(range(3), 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(values[one], values[other]))
    for case in CASES:
        supervised = case.algorithm == "SFT"
        loaded = recipe.load("sft-tiny", case.settings(), recipe.SFTRecipe) if supervised else None
        loaded = loaded or recipe.load("arithmetic-tiny", case.settings())
        assert (loaded.model.lora.rank > 0) == (case.weights == "LoRA")
        assert sorted(resumes(case)) == sorted(set(resumes(case)))
    assert {pair for case in CASES for pair in resumes(case)} == set(itertools.permutations(LAYOUTS, 2))


def test_kills_hit_every_rank_and_come_in_the_order_of_their_steps():
    asked = _parser().parse_args([])
    kills = draw_kills(asked)
    assert len(kills) == 20
    assert {kill.rank for kill in kills} == {0, 1}
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    assert sum(kill.saving for kill in kills) == 10
    asked.settings = ["--training.off_policy_steps=1"]
    words = " ".join(command(asked, Path("run"), 20))
    assert "--max-restarts 20 train arithmetic-tiny" in words
    assert words.endswith("--training.off_policy_steps=1 --out=run")


def test_a_run_of_an_earlier_call_is_not_taken_for_the_killed_one(tmp_path, monkeypatch):
    """The trap: two finished runs of other settings were compared, without a kill."""
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")
    (tmp_path / "killed-4-processes-6-steps-2-seed-0").mkdir()
    with pytest.raises(SystemExit, match="is from an earlier call; remove it"):
        restarts.main(["--processes", "4", "--steps", "6", "--folder", str(tmp_path)])


LAUNCHER = """
import sys
from covey_hosts import LocalOptions, launch, local
from covey_hosts.local import TrainingCommand
local.NOTICE_SECONDS = 0.1
last = "import os, sys, time\\nwhile not os.path.exists('process-1-restart-2.log'): time.sleep(0.02)"
command = TrainingCommand(("train", "recipe"), "run")
sys.exit(launch(command, LocalOptions(max_restarts=2, logs="."), (sys.executable, "-c", last)))
"""


@pytest.mark.slow
def test_the_rank_that_was_drawn_is_killed(tmp_path, monkeypatch):
    """The trap: process 0 alone is there already, and is taken for all of them."""

    def run(words, log):
        with log.open("wb") as file:
            return subprocess.Popen([sys.executable, "-c", LAUNCHER], cwd=tmp_path, stderr=file)

    monkeypatch.setattr(restarts, "run", run)
    kills = [restarts.Kill(0, rank, saving=False, seconds=0.0) for rank in (1, 0)]
    done = restarts.killed((), tmp_path / "run", kills, tmp_path / "log")
    assert [kill["rank"] for kill in done] == [1, 0]
    told = re.findall(r"process (\d) was killed by SIGKILL", (tmp_path / "log").read_text())
    assert told == ["1", "0"]
