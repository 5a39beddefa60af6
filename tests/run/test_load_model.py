"""A run as a model: on the mesh that its recipe names, where the devices are there, and the same model everywhere."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from covey import recipes
from covey.config import recipe
from covey.config.recipe import AnyRecipe, Recipe, SFTRecipe
from covey.config.schema import LoRAConfig, MeshConfig, ModelOptions, RolloutConfig
from covey.errors import RecipeError, ResumeError, WeightsError
from covey.models.decoder import Decoder
from covey.models.loading import weights
from covey.models.lora import split_trainable
from covey.parallel import flatten, make_mesh, mesh_of
from covey.recipes import use as using
from covey.recipes.build import role_meshes
from covey.recipes.load_model import abstract_for, available_mesh, check_same_weights, load_source
from covey.rl.learner import Learner
from covey.rl.roles import Role
from covey.run.folder import EVERY_STEP
from covey.text.tokenizer import Tokenizer
from covey.train.checkpoint import Checkpointer
from covey.types import Completion, FinishReason, Group
from tests.one_layer import ONE_LAYER

TINY = str(ONE_LAYER)
LETTERS = ["data.task=jsonl", f"data.path={Path(__file__).parents[1] / 'letters.jsonl'}"]

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module", params=[0, 4], ids=["all weights", "adapters"])
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    """What a run on the mesh (1, 2) leaves: its recipe, and a checkpoint of weights that have moved."""
    out = tmp_path_factory.mktemp("trained") / "run"
    return left_by_a_run(TINY, out, f"model.lora.rank={request.param}", "model.mesh.tp=2")


def left_by_a_run(source: str, folder: Path, *settings: str) -> str:
    ready = recipe.load("quickstart", [f"model.source={source}", "evaluation.prompts=2", *settings])
    model, _, origin = load_source(ready.model, source)
    moved = nnx.to_pure_dict(jax.tree.map(lambda x: x + 0.1, split_trainable(model)[1]))
    with Checkpointer(folder / "checkpoints") as saves:
        saves.save(1, {"params": moved}, {"model": origin})
    (folder / "recipe.yaml").write_text(recipe.to_yaml(ready))
    return str(folder)


def arrays(model: Decoder) -> dict[str, jax.Array]:
    return flatten(nnx.state(model))


@pytest.mark.slow
@pytest.mark.parametrize("options", [ModelOptions(), ModelOptions(lora=LoRAConfig(rank=2))], ids=["plain", "adapters"])
def test_a_run_that_begins_with_a_run_gets_its_model_on_its_mesh(trained: str, options: ModelOptions) -> None:
    mesh = make_mesh((1, 4))
    there, here = (arrays(load_source(options, trained, mesh=where)[0]) for where in (mesh, None))
    assert mesh_of(there) == mesh
    assert there["layers.0.attn.q_proj.kernel"].addressable_shards[0].data.shape == (64, 16)
    assert there.keys() == here.keys()
    assert all(np.allclose(x, here[name], atol=1e-6) for name, x in there.items())


SHELL = [import_module("covey_shell.model")] if find_spec("covey_shell") else []


class Said:
    """Stands for the rollout worker: remembers where its model lies, and always says the same."""

    devices: list[int]

    def __init__(self, model: Decoder, tokenizer: Any, rollout: RolloutConfig, environments: None = None):
        self.tokenizer, self.config, self.environments = tokenizer, rollout, environments
        mesh = mesh_of(nnx.state(model))
        self.devices.append(1 if mesh is None else mesh.size)

    def generate(self, examples: Any, samples: int, **_: Any) -> list[Group]:
        one = Completion(np.zeros(1, np.int32), np.zeros(1), np.zeros(1), FinishReason.STOP, "five")
        return [Group(x["prompt"], np.zeros(1, np.int32), (one,) * samples, {**x}) for x in examples]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Over how many devices each model lay that was used."""
    found: list[int] = []
    for module in (using, *SHELL):
        monkeypatch.setattr(module, "RolloutWorker", type("Said", (Said,), {"devices": found}))
    lines = cycle(["2+3?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    return found


def shell_model() -> Any:
    return pytest.importorskip("covey_shell.model")


USES: dict[str, Callable[[str], Any]] = {
    "eval": lambda folder: recipes.evaluate(folder, recipe.load(folder)),
    "generate": lambda folder: shell_model().generate(folder, "2+3?", 1, RolloutConfig()),
    "chat": lambda folder: shell_model().chat(folder, RolloutConfig()),
}


@pytest.mark.slow
@pytest.mark.parametrize("trained", [4], indirect=True, ids=["adapters"])
@pytest.mark.parametrize("name", USES)
def test_what_uses_a_run_takes_its_mesh_or_says_that_it_cannot(
    trained: str, name: str, devices: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    USES[name](trained)
    assert "model.mesh" not in "".join(capsys.readouterr())
    one = jax.local_devices()[:1]
    monkeypatch.setattr(jax, "local_devices", lambda: one)
    monkeypatch.setattr(jax, "devices", lambda: one)
    USES[name](trained)
    said = capsys.readouterr()
    told = "model.mesh asks for 2 devices, and there are 1: the model is on one of them"
    assert told in " ".join((said.err if name == "generate" else said.out).split())
    assert name != "generate" or said.out == ""
    assert devices == [2, 1]


@pytest.mark.parametrize("trained", [4], indirect=True, ids=["adapters"])
def test_the_mesh_of_an_evaluation_can_be_changed(trained: str, devices: list[int]) -> None:
    recipes.evaluate(trained, recipe.load(trained, ["model.mesh.tp=1"]))
    recipes.evaluate(TINY, recipe.load(trained, ["model.mesh.tp=4"]))
    assert devices == [1, 4]


def sample_training_prompts(ready: Recipe) -> None:
    pytest.importorskip("covey_report.first_samples").sample_training_prompts(ready, 1)


def play(ready: Recipe) -> None:
    pytest.importorskip("covey_envs.play").play(ready, 1)


@pytest.mark.parametrize("trained", [4], indirect=True, ids=["adapters"])
@pytest.mark.parametrize("use", [play, sample_training_prompts])
def test_what_precedes_a_run_has_its_own_adapters_on_the_model_of_another(
    trained: str, use: Callable[[Recipe], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the run that it begins with are merged, as in training."""
    models: list[Decoder] = []
    said = type("Said", (Said,), {"devices": []})
    worker = lambda model, *others: models.append(model) or said(model, *others)  # noqa: E731
    monkeypatch.setattr(using, "RolloutWorker", worker)
    use(recipe.load("quickstart", [f"model.source={trained}", "model.lora.rank=2"]))
    lora = models[0].layers[0].attn.q_proj.lora
    assert lora is not None
    assert lora.a.shape[-1] == 2


def test_a_recipe_gives_the_rollout_devices_beside_those_of_the_actor() -> None:
    ready = recipe.load("quickstart", ["model.mesh.fsdp=2", "role_to_mesh.rollout.data=2"])
    found = role_meshes(ready, available_mesh(ready.model.mesh))
    assert {role: [device.id for device in mesh.devices.flat] for role, mesh in found.items()} == {
        Role.ACTOR: [0, 1],
        Role.ROLLOUT: [2, 3],
    }
    assert role_meshes(recipe.load("quickstart"), None) == {}
    with pytest.raises(RecipeError, match=r"role_to_mesh\.rollout takes 2 devices, and model.mesh leaves 0"):
        role_meshes(ready, make_mesh((4, 1)))


def test_one_device_needs_no_mesh() -> None:
    assert available_mesh(MeshConfig()) is None
    found = available_mesh(MeshConfig(fsdp=2, tp=2))
    assert found is not None
    assert found.size == 4


# --- a run knows its weights by their content


def adapted_run(source: Path, out: Path) -> Path:
    """One step of supervised training of adapters on the model at `source`; `recipe.yaml` asks for a second step."""
    data = out.with_name("data.jsonl")
    data.write_text("".join(json.dumps({"prompt": f"{n}", "completion": "yes"}) + "\n" for n in range(20)))
    settings = ["model.lora.rank=2", "training.max_steps=1", "training.batch_size=2", "training.row_length=64"]
    settings += ["evaluation.answers=0", "training.max_tokens_per_micro_batch=64", f"data.path={data}"]
    recipes.train(recipe.load("sft-smollm2", [f"model.source={source}", *settings], SFTRecipe), out)
    edit(out / "recipe.yaml", "max_steps: 1", "max_steps: 2")
    return out


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def as_folder(place: Path) -> Path:
    return Path(shutil.copytree(TINY, place / "model"))


def as_gguf(place: Path) -> Path:
    loaded = weights.load(TINY)
    write_gguf = pytest.importorskip("covey_formats.gguf_writer").write_gguf
    write_gguf(loaded.model, loaded.tokenizer, place / "gguf")
    return place / "gguf" / "model.gguf"


def add_a_half(model: Path) -> None:
    """To every number of the model, which keeps its place and size."""
    if model.is_dir():
        for file in model.glob("*.safetensors"):
            held = safetensors.numpy.load_file(file)
            safetensors.numpy.save_file({name: x + np.float32(0.5) for name, x in held.items()}, file)
        return
    import gguf

    for tensor in gguf.GGUFReader(model, "r+").tensors:
        tensor.data[...] += np.float32(0.5)
        tensor.data.flush()


@pytest.mark.slow
@pytest.mark.parametrize("make", [as_folder, as_gguf])
def test_adapters_stay_on_the_same_bytes_wherever_they_lie(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = make(tmp_path)
    out = left_by_a_run(str(source), tmp_path / "run", "model.lora.rank=2")
    moved = tmp_path / ("moved" + source.suffix)
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, moved)
    add_a_half(source)
    with pytest.raises(ResumeError, match="this run began with the weights"):
        recipes.open_model(out, ModelOptions())
    edit(Path(out) / "recipe.yaml", f"source: {source}", f"source: {moved}")
    recipes.open_model(out, ModelOptions())


@pytest.mark.slow
def test_a_run_of_adapters_goes_on_with_the_same_bytes_and_with_no_others(tmp_path: Path) -> None:
    pytest.importorskip("covey_sft")
    source = as_folder(tmp_path)
    out = adapted_run(source, tmp_path / "run")
    moved = shutil.copytree(source, tmp_path / "moved")
    add_a_half(source)
    with pytest.raises(ResumeError, match="this run began with the weights"):
        recipes.resume(out)
    edit(out / "recipe.yaml", f"source: {source}", f"source: {moved}")
    assert recipes.resume(out)["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("role", ["reward_model", "critic"])
def test_a_run_knows_its_reward_model_and_its_critic_by_content(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write_meta: Any
) -> None:
    """Under adapters a checkpoint holds nothing of either. A run of an older version drew tokens by an inverse CDF."""
    pytest.importorskip("covey_ppo")
    models, out = {name: as_reward_model(tmp_path / name) for name in ("reward_model", "critic")}, tmp_path / "run"
    settings = [f"{name}={place}" for name, place in models.items()]
    settings += [f"model.source={TINY}", "model.lora.rank=2", "grpo.algorithm=ppo", "evaluation.prompts=2"]
    settings.append("grpo.reward_weights=[1, 0.5, 2]")  # the last is the weight of the reward model
    settings += [*LETTERS, "rollout.max_new_tokens=4", "rollout.max_prompt_length=32", "training.prompts_per_step=2"]
    monkeypatch.setattr(Learner, "steps", one_more_step)
    monkeypatch.setitem(EVERY_STEP, "rl", ())
    recipes.train(recipe.load("quickstart", [*settings, "training.max_steps=2"]), out)
    moved = shutil.copytree(models[role], tmp_path / "moved")
    add_a_half(models[role])
    with pytest.raises(ResumeError, match=f"this run began with {role} with the weights '{models[role]}"):
        recipes.resume(out)
    recipes.resume(Path(shutil.copytree(out, tmp_path / "copy")), [f"{role}={moved}"])
    assert "another draw of tokens" not in capsys.readouterr().out
    forget(out / "checkpoints" / "00000001", "draw_version", write_meta)
    recipes.resume(out, [f"{role}={moved}"])
    told = " ".join(capsys.readouterr().out.split())
    assert "another draw of tokens (an inverse CDF, now Gumbel-max in two levels)" in told


def one_more_step(self: Learner, *_: Any) -> Iterator[None]:
    """Counts a step that changes nothing and writes no row."""
    self.step += 1
    yield from ()


def as_reward_model(place: Path) -> Path:
    """The tiny model with a head of one label."""
    held = {k: v for file in Path(TINY).glob("*.safetensors") for k, v in safetensors.numpy.load_file(file).items()}
    held.pop("lm_head.weight", None)
    place.mkdir()
    for file in Path(TINY).glob("*.json"):
        if "safetensors" not in file.name:
            shutil.copyfile(file, place / file.name)
    config = json.loads((place / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    (place / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(held | {"score.weight": np.ones((1, 64), np.float32)}, place / "model.safetensors")
    return place


def forget(saved: Path, name: str, write_meta: Any) -> None:
    """Makes a checkpoint of a version of Covey that did not note `name`."""
    meta = json.loads((saved / "meta.json").read_text())
    del meta["extra"][name]
    write_meta(saved, json.dumps(meta))


ADAPTER = " with the adapter sha256 0123456789abcdef"
ONE, OTHER = ", sha256 " + "1" * 16, ", sha256 " + "2" * 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "now", "accepted"),
    [
        ("/a" + ONE, "/b" + ONE, True),
        ("/a" + ONE, "/a" + OTHER, False),
        ("/a" + ONE + ADAPTER, "/b" + ONE + ADAPTER, True),
        ("/a" + ONE + ADAPTER, "/a" + ONE, False),
        ("/a" + ONE, "/a" + ONE + ADAPTER.replace("0", "f"), False),
        ("/a", "/a" + ONE, False),
        ("/a" + ONE, "hf:org/name@0123", False),
        ("hf:org/name@0123", "/a" + ONE, False),
        ("hf:org/name@0123", "hf:org/name@0123", True),
        ("hf:org/name@0123", "hf:org/name@4567", False),
        ("/a\nb" + ONE, "/c" + ONE, True),
        ("/a" + ONE + ONE, "/b" + ONE, True),
    ],
)
def test_which_weights_continue_a_run(then: str, now: str, accepted: bool) -> None:
    if accepted:
        check_same_weights(then, now, Path("run"))
        return
    with pytest.raises(ResumeError, match=re.escape(repr(then))):
        check_same_weights(then, now, Path("run"))


def test_adapters_whose_base_is_gone_say_so(tmp_path: Path) -> None:
    settings = recipe.load("quickstart", [f"model.source={tmp_path / 'base'}", "model.lora.rank=2"])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(settings))
    with pytest.raises(WeightsError, match=r"the checkpoints of this run are adapters, and their base .*base is gone"):
        recipes.open_model(str(tmp_path))


@pytest.mark.slow
def test_a_run_is_opened_and_resumed_without_the_folder_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began with relative paths in another working directory, and its checkpoint has every weight."""
    shutil.copytree(TINY, tmp_path / "base")
    shutil.copy(LETTERS[1].partition("=")[2], tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    small = (Path(__file__).parents[1] / "faults" / "small_run.txt").read_text().split()
    given = ["model.source=base", *small, "data.task=jsonl", "data.path=rows.jsonl", "grpo.beta=0"]
    recipes.train(recipe.load("quickstart", [*given, "training.max_steps=2"]), Path("out"))
    learnt = arrays(recipes.open_model("out")[0])
    shutil.rmtree(tmp_path / "base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model, tokenizer = recipes.open_model("../out")
    own = Tokenizer.from_folder(TINY)
    assert tokenizer.stop_ids == own.stop_ids
    assert tokenizer.chat_template == own.chat_template
    assert {name: x.tobytes() for name, x in arrays(model).items()} == {n: x.tobytes() for n, x in learnt.items()}
    summary = recipes.resume(Path("../out"), ["training.max_steps=3"])
    assert summary["steps"] == 3


THINKS = "{{ messages[0].content }}:{{ 'answer' if enable_thinking is defined and not enable_thinking else 'think' }}"


@pytest.mark.parametrize(("thinking", "end"), [("default", "think"), ("on", "think"), ("off", "answer")])
def test_a_setting_says_whether_the_chat_template_lets_the_model_think(tmp_path: Path, thinking: Any, end: str) -> None:
    folder, chat = shutil.copytree(TINY, tmp_path / "model"), [{"role": "user", "content": "Hi"}]
    (folder / "chat_template.jinja").write_text(THINKS)
    options = ModelOptions(source=str(folder), thinking=thinking)
    loaded = load_source(options, str(folder))[1], abstract_for(AnyRecipe(model=options), "cpu")[1]
    for tokenizer in loaded:
        assert tokenizer.render(chat) == f"Hi:{end}"
        assert tokenizer.decode(tokenizer.encode_prompt(chat)).endswith(f":{end}")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    if thinking != "default":
        with pytest.raises(RecipeError, match=f"model.thinking is {thinking}, and the model's chat template has no"):
            load_source(options, str(folder))
