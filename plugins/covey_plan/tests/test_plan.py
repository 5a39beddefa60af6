"""A plan of a tiny recipe on this CPU, end to end, and the parts that it is made of."""

import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from covey.cli.main import main
from covey.config import recipe
from covey.errors import RecipeError
from covey.models.config import ModelConfig
from covey.parallel import flatten, make_mesh
from covey.parallel.shapes import abstract
from covey_plan import here, plan, roofline, table
from covey_plan.compiled import CompiledProgram, compile_program
from covey_plan.cost import cost_of
from covey_plan.hlo import Instruction
from covey_plan.lengths import Lengths
from covey_plan.machines import MACHINES, parse_target
from covey_plan.memory import DeviceArrays, Outline, RunArrays, nbytes, run_arrays
from covey_plan.overlap import overlap_of
from covey_plan.programs import RLPrograms
from covey_plan.roofline import Rates, phase_time
from covey_plan.schedule import Timeline
from covey_plan.topologies import Places
from covey_plan.work import GRID_STEP, CacheReads, Call, Phase, Sizes, cache_reads, step_phases, weights_in_products

TINY = str(Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama")
SETTINGS = [
    f"model.source={TINY}", "training.row_length=64", "training.max_tokens_per_micro_batch=64",
    "rollout.max_prompt_length=24", "rollout.max_new_tokens=8", "rollout.slots=4", "grpo.num_generations=4",
    "training.prompts_per_step=2", "grpo.beta=0.1",
]  # fmt: skip
SHAPE = ModelConfig(
    vocab_size=100, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of this CPU from one small call."""
    monkeypatch.setattr(roofline, "STREAMED", 2**20)
    monkeypatch.setattr(roofline, "CALLS", 1)
    roofline.machine_peaks.cache_clear()


def load(more: Sequence[str], mesh: Sequence[str] = ()) -> recipe.Recipe:
    return recipe.load("quickstart", [*SETTINGS, *mesh, *more])


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_tiny_recipe_is_planned_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    """With devices of its own for the rollout, whose programs are compiled for those."""
    told: list[str] = []
    meshes = ["model.mesh.fsdp=2", "role_to_mesh.rollout.data=2"]
    made = plan.make_plan(partial(load, mesh=meshes), parse_target("cpu"), told.append)
    found = json.loads(json.dumps(table.as_json(made)))
    assert "compiling gradients (2 of 6)" in told
    assert [one["name"] for one in found["programs"]] == ["score", "gradients", "apply", "prefill", "admit", "decode"]
    assert [one["name"] for one in found["phases"]] == ["rollout", "logps", "update"]
    actor, rollout = found["devices"]
    parts, sampling = actor["parts"], rollout["parts"]
    assert found["memory"]["parts"] == parts
    assert set(parts) == {"process", "weights", "optimizer", "reference", "gradients", "rows"}
    expected = {"process", "weights", "new weights of the rollout", "KV cache", "prompts"}
    assert set(sampling) - {"further programs"} == expected  # its size is measured, and may be 0
    assert actor["mesh"]["fsdp"] == rollout["mesh"]["data"] == 2
    assert parts["weights"] < sampling["weights"] == sampling["new weights of the rollout"]
    peaks = {one["name"]: one["peak"] for one in found["programs"]}
    assert found["sync"]["peak"] == sampling["process"] + 2 * sampling["weights"]
    assert rollout["peak"] == max(found["sync"]["peak"], *(peaks.pop(name) for name in ("prefill", "admit", "decode")))
    assert actor["peak"] == max(peaks.values())
    assert parts["optimizer"] == pytest.approx(2 * parts["weights"], rel=0.01)
    assert parts["reference"] == parts["weights"]
    assert found["memory"]["peak"] == max(actor["peak"], rollout["peak"])
    assert actor["peak"] > parts["process"] + parts["weights"] + parts["optimizer"]
    assert any(one["collectives"] for one in found["programs"])
    assert found["fits"]
    assert found["tried"] == []
    table.show(made, Console(width=120))
    out = capsys.readouterr().out
    assert "fits: peak" in out
    assert "(fsdp 2; rollout data 2)" in out
    assert re.search(rf"\nsync +{found['sync']['peak'] / 1e9:.2f} *\n", out)
    assert "memory of a device of the rollout" in out
    assert "does not pay: rollout and training share one processor" in out
    ahead = found["sampling_ahead"]
    assert (ahead["pays"], ahead["shared"]) == (False, "one processor")
    assert ahead["step_seconds"]["0"] == ahead["step_seconds"]["1"] == found["step_seconds"]["expected"]
    assert "completions of 3" in out
    assert "completions of 3 in the mean and 8 at most" in out
    assert "40% of the peak flops" in out
    assert "decode steps in 2 chunks until the longest completion ends" in out
    assert found["rollout"]["longest"] == 8
    assert all(sum(one["expected_parts"].values()) == one["expected_seconds"] for one in found["phases"])
    priced = cost_of(made, load(("training.num_epochs=2", "grpo.num_iterations=3", "training.max_steps=null")), 1.5)
    assert (priced.devices, priced.steps) == (1, 1296 // 2 * 2 * 3)
    assert priced.total == pytest.approx(1.5 * 1296 * found["step_seconds"]["expected"] / 3600)
    ahead_on(made, sampling["new weights of the rollout"])
    small = replace(made, machine=replace(made.machine, memory=1.0), trials=())
    table.show(small, Console(width=120))
    assert "does not fit: peak" in capsys.readouterr().out


def ahead_on(made: plan.Plan, new_weights: int) -> None:
    """On accelerators the two sides of this plan run at once: over steps, or in two parts of a step."""
    at_once = ["training.rollout_micro_batch_size=1", "training.train_micro_batch_size=1"]
    sides = made.phases, made.arrays, MACHINES["v5e"]
    stages = [f"training.{stage}_micro_batch_size=1" for stage in ("ref_logps", "old_logps")]
    now, later = (
        overlap_of(load([*at_once, *stages, *more]), *sides) for more in ((), ["training.off_policy_steps=1"])
    )
    rollout, other = made.phases[0].expected, sum(time.expected for time in made.phases[1:])
    assert now.sync == pytest.approx(new_weights / (50e9 * 0.4))
    assert (now.rollout, now.training) == (rollout, pytest.approx(other + now.sync))
    longer = max(now.rollout, now.training)
    assert (now.step, later.step) == (pytest.approx((now.rollout + now.training + longer) / 2), longer)
    assert now.pays
    assert later.to_json()["idle"] == {"rollout": 1 - now.rollout / longer, "training": 1 - now.training / longer}


class CompiledError(Exception):
    """A program would be compiled."""


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first program to be compiled raises."""

    def compile_program(*_: Any, **__: Any) -> None:
        raise CompiledError

    monkeypatch.setattr(plan, "compile_program", compile_program)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_what_follows_from_shapes_is_shown_before_a_program_is_compiled() -> None:
    shown: list[Outline] = []
    with pytest.raises(CompiledError):
        plan.make_plan(load, parse_target("cpu"), lambda text: None, show_outline=shown.append)
    (first,) = shown
    parts, settings = first.memory["actor"], load(())
    assert first.checkpoint == parts["weights"] + parts["optimizer"]
    assert first.step["completions"] == settings.training.prompts_per_step * settings.grpo.num_generations
    limit = settings.rollout.max_new_tokens
    assert first.step["completion tokens, at most"] == first.step["completions"] * limit


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_quick_plan_compiles_nothing(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    kept = ["training.checkpoint_every_n_steps=1", "training.max_to_keep=3", "training.keep_best=eval/accuracy"]
    words = [*SETTINGS, *kept, "training.eval_every_n_steps=1", "model.mesh.fsdp=2"]
    flags = [f"--{word}" for word in words]
    assert main(["plan", "quickstart", "--quick", *(["--json"] if as_json else []), *flags]) == 0
    out = capsys.readouterr().out
    if as_json:
        found = json.loads(out)
        assert (found["on"], found["checkpoints"]) == ("cpu", 4)
        assert found["checkpoint"] == pytest.approx(2 * found["memory"]["actor"]["weights"] * 3, rel=0.01)
    else:
        assert [line.partition(" ")[0] for line in out.splitlines()] == ["memory", "step", "disk"]
        assert "a device at most: weights " in out
        assert "at most 4 checkpoints of about " in out


def test_a_device_holds_its_shard() -> None:
    mesh = make_mesh((2, 2))
    split = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp", "tp")))
    whole = jax.ShapeDtypeStruct((8, 6), jnp.bfloat16)
    assert nbytes(split) == 8 * 6
    assert nbytes([split, whole, 1.0]) == 8 * 6 + 2 * 8 * 6
    assert nbytes(whole, like=split) == 2 * 8 * 6 // 4


def test_a_rollout_on_other_devices_has_a_copy_of_the_weights() -> None:
    """As in each of several processes, on a part of the actor's mesh; on that mesh it shares them."""
    made = plan.programs_of(load([], ["model.mesh.fsdp=2", "model.mesh.tp=2"]), Places(make_mesh((2, 2))))
    assert isinstance(made, RLPrograms)
    assert made.config.shares_weights
    weights, optimizer, programs = made.trainer.params, made.trainer.opt_state, made.largest()
    assert "weights of the rollout" not in run_arrays(weights, optimizer, programs, False).actor.always
    own = NamedSharding(make_mesh((2,), ("fsdp",), jax.devices()[:2]), PartitionSpec())
    copy = abstract(made.cluster.rollout.params, own)
    held = run_arrays(weights, optimizer, programs, False, copy, copy)
    assert held.rollout is None
    assert held.actor.always["weights of the rollout"] == nbytes(abstract(weights, own)) > held.actor.always["weights"]
    assert held.peaks([])["sync"] == sum(held.actor.always.values()) + nbytes(copy)


def test_a_rollout_on_accelerators_takes_the_stacks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the weights only adapters, rounded, are there twice; and all layers where a thread samples ahead."""
    monkeypatch.setattr("covey.parallel.arrays.platform_of", lambda place: "gpu")
    settings, ahead = (
        ["model.lora.rank=4", "model.dtype=bfloat16", "model.compute_dtype=bfloat16"],
        ["training.off_policy_steps=1"],
    )

    def twice(made: Any) -> int:
        return plan.arrays_of(made).actor.during["decode"]["weights to sample with"]

    runs: Any = [plan.programs_of(load(more, settings), Places(jax.devices()[0])) for more in ((), ahead)]
    layers = nbytes([x for name, x in flatten(runs[0].trainer.params).items() if name.startswith("layers.")])
    adapters = nbytes(runs[0].trainer.trainable)
    assert [twice(made) for made in runs] == [adapters // 2, layers - adapters // 2]


def test_token_values_are_planned_where_a_run_computes_them() -> None:
    every = lambda n: load([f"training.token_values_every_n_steps={n}"])  # noqa: E731
    runs = [plan.programs_of(every(n), Places(jax.devices()[0])) for n in (0, 1, 10**6)]
    called = [{program.name: program for program in run.called()} for run in runs]
    assert ["token values" in programs for programs in called] == [False, True, False]
    assert called[1]["token values"].args[1].tokens.shape == (1, 64)


def test_processes_sample_their_shares_with_weights_of_their_own() -> None:
    sizes = Sizes(weights=1000, optimizer_pass=10, cache_itemsize=4)
    one, two = (step_phases(load([]), SHAPE, Lengths(16, (8,)), sizes, 1, False, count)[0] for count in (1, 2))
    assert two.flops == one.flops
    assert two.calls["decode"].turns == one.calls["decode"].turns / 2
    assert two.bytes - one.bytes == 1000  # of a prefill in each
    # Two copies are read in seven steps of four slots, as two are of four, and in the prefill.
    copies = step_phases(load([]), SHAPE, Lengths(16, (8,)), replace(sizes, sampled=2000.0, copies=2), 1)[0]
    assert copies.bytes - one.bytes == 1000 + 14 * 4 * weights_in_products(SHAPE)


def test_the_peak_of_a_program_has_what_is_held_while_it_runs() -> None:
    arrays = DeviceArrays({"weights": 100, "optimizer": 200}, {"decode": {"KV cache": 50}})
    decode = CompiledProgram("decode", 1.0, arguments=160, results=4, temporary=7)
    assert arrays.peak(decode) == 361
    assert arrays.peak(replace(decode, name="apply")) == 311
    assert arrays.peak(replace(decode, refused=999)) == 999
    assert arrays.peak(replace(decode, compiling=20)) == 370
    further = RunArrays(arrays).with_programs(30)
    assert further.peaks([decode, replace(decode, name="apply")]) == {"decode": 391, "apply": 311}


def test_a_program_whose_text_cannot_be_read_has_its_memory_alone() -> None:
    """A compiler for TPUs may write instructions that the jaxlib beside it does not know, and not write them itself."""
    found = compile_program(unreadable(""), read_text=True, platform="tpu")
    assert (found.arguments, found.unread, found.collectives, found.cycles) == (4000, True, (), None)
    left = plan._not_counted(load([]), [found])
    assert left == ["collectives of apply, whose text this jaxlib cannot read"]


def test_the_plan_says_that_it_does_not_know_how_long_an_environment_takes() -> None:
    game, ahead = "envs.environment=guess", "training.off_policy_steps=1"
    waits = "waiting for its responses"
    assert plan._not_counted(load([]), ()) == []
    assert waits in plan._not_counted(load([game]), ())
    assert f"{waits} in a fixed order (envs.answer_lag)" in plan._not_counted(load([game, ahead]), ())


def test_the_text_that_the_compiler_writes_stands_in_for_one_that_cannot_be_read() -> None:
    fusion = 'fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"120"}'
    text = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n  %y = f32[8]{{0}} {fusion}\n}}\n"
    found = compile_program(unreadable(text), read_text=True, platform="tpu")
    assert (found.arguments, found.unread, found.cycles) == (4000, False, (120, 0))


def test_the_compiler_leaves_the_main_thread_to_ctrl_c() -> None:
    threads = []

    def refuse(options: None) -> None:
        threads.append(threading.current_thread())
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 17.50G of 15.75G hbm.")

    program: Any = SimpleNamespace(name="apply", args=(), kwargs={}, lower=lambda: SimpleNamespace(compile=refuse))
    assert compile_program(program, read_text=False).refused == 17.5 * 2**30
    assert threads != [threading.main_thread()]


def unreadable(written: str) -> Any:
    """Make a program whose text jaxlib cannot read; `written` is what its compiler writes, if anything."""
    made = jax.jit(jnp.sum).lower(jnp.ones(1000)).compile()

    def as_text() -> str:
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    def compile(options: dict[str, str]) -> Any:
        if written:
            Path(options["xla_dump_to"], "module_0000.jit_sum.after_codegen.txt").write_text(written)
        return SimpleNamespace(memory_analysis=made.memory_analysis, as_text=as_text)

    return SimpleNamespace(name="apply", args=(), kwargs={}, lower=lambda: SimpleNamespace(compile=compile))


def test_devices_that_the_compiler_refuses_are_told_as_those_of_two_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure\nmore")

    monkeypatch.setattr(plan, "compile_program", refuse)
    apply: Any = SimpleNamespace(name="apply", args=(), kwargs={})
    words = "compiler for v5e:4x4 refuses apply: INTERNAL: RET_CHECK failure\n.*a block of chips"
    with pytest.raises(RecipeError, match=words):
        plan._compile(
            [apply], parse_target("v5e:4x4"), MACHINES["v5e"], Places(*[make_mesh()] * 2), lambda text: None, []
        )
    with pytest.raises(jax.errors.JaxRuntimeError):
        plan._compile([apply], parse_target("v5e:4x4"), MACHINES["v5e"], Places(make_mesh()), lambda text: None, [])


def test_log_probs_and_updates_are_as_many_as_the_algorithm_asks_for() -> None:
    sizes = Sizes(weights=1000, optimizer_pass=10, cache_itemsize=4)
    phases: Callable[[Sequence[str]], dict[str, Phase]] = lambda more: {  # noqa: E731
        phase.name: phase for phase in step_phases(load(more), SHAPE, Lengths(16, (8,)), sizes, 1)
    }
    once, twice = phases(["grpo.beta=0"]), phases(["grpo.num_iterations=2"])
    assert list(once) == ["rollout", "update"]
    assert twice["update"].flops == 2 * once["update"].flops
    assert twice["update"].calls["apply"].count == 2
    # Two groups of 16 + 4 · 7 tokens, each a row of 64; old and reference log-probs of both.
    assert once["update"].calls["gradients"].count == 2
    assert twice["logps"].calls["score"] == Call(4, turns=4)
    assert once["update"].bytes == 3 * 2 * 1000 + 10
    # Eight samples in four slots, seven steps each after the first token.
    assert once["rollout"].calls["decode"].turns == 14


def test_rows_are_those_of_the_machine_and_their_head_is_computed_in_chunks() -> None:
    """Rows of 1024 have 896 scored places, seven chunks of 128 in six rows. A CPU chooses rows of 320 with 256 scored
    places, for which an accelerator compiles no programs: eight chunks of 32 in 19 rows.
    """
    sizes, lengths = Sizes(weights=1000, optimizer_pass=10, cache_itemsize=4), Lengths(16, (128,))
    more = ["training.row_length=1024", "training.max_tokens_per_micro_batch=8192", "training.prompts_per_step=7"]
    update = partial(step_phases, load([*more, "grpo.num_generations=5"]), SHAPE, lengths, sizes, 1)
    assert update(True)[-1].calls["gradients"] == Call(1, turns=7)
    assert update(False)[-1].calls["gradients"] == Call(1, turns=8)


def test_seconds_are_those_of_what_binds() -> None:
    v5e = MACHINES["v5e"]
    rates = Rates(197e12, 819e9, v5e.link, 1)
    phase = Phase("rollout", 197e12, 2 * 819e9, {"decode": Call(2, turns=16)})
    exchanged = Instruction("collective-permute", (), 5, (None,))
    moved = (exchanged, exchanged, Instruction("all-gather", (), 7, ()))
    program = CompiledProgram("decode", 1.0, collectives=moved)
    time = phase_time(phase, {"decode": program}, v5e, rates)
    assert (time.compute, time.memory, time.bound) == (1.0, 2.0, "memory")
    assert time.link_bytes == 16 * 10 + 2 * 7
    assert time.expected == pytest.approx(2.0 / v5e.memory_share + (16 * 2 + 2) * v5e.latency)
    assert set(time.parts) == {"memory", "beginning collectives"}


def test_estimates_of_the_compiler_count_turns_and_charge_kernels() -> None:
    v5e = MACHINES["v5e"]
    rates = Rates(197e12, 819e9, v5e.link, 1)
    program = CompiledProgram("gradients", 1.0, cycles=(3 * 10**9, 10**9))
    phase = Phase("update", 1.0, 1.0, {"gradients": Call(2)})
    assert phase_time(phase, {"gradients": program}, v5e, rates).expected == pytest.approx(2 * 4e9 / 1.5e9)
    summed = {"gradients": program, "reduce": CompiledProgram("reduce", 1.0, cycles=(0, 0))}  # collectives alone
    both = replace(phase, calls=phase.calls | {"reduce": Call(1)})
    assert phase_time(both, summed, v5e, rates).expected == pytest.approx(2 * 4e9 / 1.5e9)
    gathered = [
        Instruction("all-gather", (), 3_809_523_810, (), asynchronous=beside, group=8) for beside in (True, False)
    ]
    moved = tuple(3 * gathered)
    waited = phase_time(phase, {"gradients": replace(program, collectives=moved)}, v5e, rates)
    begun = 2 * (3 * v5e.latency + 12 * v5e.hop)
    assert waited.parts["waiting for links"] == pytest.approx(2 * 1e10 / v5e.link + begun)
    assert waited.expected == pytest.approx(2 * 4e9 / 1.5e9 + 2 * 1e10 / v5e.link + begun)
    charged = phase_time(replace(phase, kernel_flops=197e12), {"gradients": program}, v5e, rates)
    assert charged.expected == pytest.approx(2 * 4e9 / 1.5e9 + 2.0 / 0.6)


def test_a_rollout_is_charged_for_its_kernels_and_its_host() -> None:
    v5e = MACHINES["v5e"]
    program = CompiledProgram("decode", 1.0, cycles=(0, 1500))
    phase = Phase("rollout", 1.0, 1.0, {"decode": Call(2, turns=16)}, cache=CacheReads(5e8, 8.19e8, 1e6), host=0.25)
    found = phase_time(phase, {"decode": program}, v5e, Rates(197e12, 819e9, v5e.link, 1))
    assert found.parts == pytest.approx({"decode": 16e-6, "decode kernels": 1e-3, "host": 0.25})
    assert found.expected == pytest.approx(0.251016)
    beside = phase_time(replace(phase, runs_ahead=True), {"decode": program}, v5e, Rates(197e12, 819e9, v5e.link, 1))
    assert beside.parts["host"] == pytest.approx(0.25 - 0.001016)
    small = replace(phase, cache=phase.cache._replace(grid_step=0.5 * GRID_STEP * v5e.bandwidth))
    slower = phase_time(small, {"decode": program}, v5e, Rates(197e12, 819e9, v5e.link, 1))
    assert slower.parts["decode kernels"] == pytest.approx(2e-3)


def test_the_cache_is_read_in_blocks_and_also_for_idle_slots() -> None:
    made = Timeline(steps=10, slot_steps=40, drawn=30)
    sizes = Sizes(weights=1, optimizer_pass=1, cache_itemsize=2, cache_copies=2, block=64)
    found = cache_reads(SHAPE, [(9, 1)] * 30, made, sizes)
    position = 2 * 2 * 4 * 2  # keys and values, heads, width, bytes
    assert found.live == 2 * 30 * 10 * position
    assert found.read == 2 * (30 * 10 * 2 + 2 * (30 * 32 + 10 * 64)) * position


def test_what_is_measured_stands_beside_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    programs = [{"name": "decode", "peak": 2 * 10**9}, {"name": "prefill", "peak": 10**9}, {"name": "apply", "peak": 1}]
    found: dict[str, Any] = {"programs": programs, "measured": {"rollout": 1_600_000_000, "update": 2}}
    assert here.predicted(found) == {"rollout": 2 * 10**9, "update": 1}
    here.show(found, Console(width=100))
    assert "+25%" in capsys.readouterr().out


@pytest.mark.slow
def test_each_phase_has_its_own_peak() -> None:
    recorder = here.PeakRecorder()
    begun: list[str] = []
    phase = recorder.wrap(begun.append)
    phase("small")
    phase("large")
    block = bytearray(b"x") * 200_000_000
    phase("rest")
    del block
    assert begun == ["small", "large", "rest"]
    assert recorder.peaks["large"] > recorder.peaks["small"] + 150_000_000
