"""Load model and tokenizer under a recipe: from any model source, or from a run folder with its trained weights.

Every use of a recipe loads by `load_for`, or by `abstract_for` where no weights are read. So a setting of the recipe
that concerns the model or the tokenizer acts in all of them.
"""

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from covey.config.algorithms import algorithm_of
from covey.config.recipe import AnyRecipe, Recipe, RecipeT, SFTRecipe, chain_of_runs, is_run
from covey.config.recipe import load_any as load_recipe
from covey.config.schema import LoRAConfig, MeshConfig, ModelOptions
from covey.errors import RecipeError, WeightsError
from covey.files import folder_below, has_file, require_entry
from covey.models import scratch
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder, abstract_decoder
from covey.models.dtypes import resolve_compute_dtype
from covey.models.loading import sources, weights
from covey.models.loading.cache import cache_folder
from covey.models.lora import merge_as_base, split_trainable, with_lora
from covey.models.stored_kernel import find_format
from covey.monitor.run_files import CHECKPOINTS, RECIPE
from covey.parallel import mesh_from_config, processes
from covey.parallel.arrays import place_model
from covey.parallel.mesh import default_mesh, local_mesh, spans_processes
from covey.registry import offered
from covey.run.folder import RunFolder, model_folder
from covey.run.settings import check_same_weights
from covey.text.tokenizer import Tokenizer
from covey.train.checkpoint import Checkpointer

log = logging.getLogger(__name__)
SWITCH = "enable_thinking"
"""Variable of chat templates that says whether the model reasons before it answers."""


def open_model(
    source: str,
    options: ModelOptions | None = None,
    mesh: Mesh | None = None,
) -> tuple[Decoder, Tokenizer]:
    """Load the model at `source`: a run folder (its recipe's model with its last checkpoint) or any model source.

    Args:
        source: see `ModelOptions.source`, which it replaces.
        options: storage and compute options of a model that is not a run; a run has its own.
        mesh: the devices to shard it over; the default device when not given.

    Raises:
        WeightsError: the source is not available, is incomplete, or is not a supported model.
    """
    return load_for(AnyRecipe(model=options or ModelOptions()), mesh, source)[:2]


def load_for(recipe: AnyRecipe, mesh: Mesh | None = None, source: str | None = None) -> tuple[Decoder, Tokenizer, str]:
    """Load the model that a run of `recipe` begins with, or the one at `source`; return it with the tokenizer and the
    origin of its weights.

    Args:
        recipe: names the model, its adapters, and its storage and compute options.
        mesh: the devices to shard it over; the default device when not given.
        source: a model in place of the recipe's. A run is loaded as its own recipe says, with its last checkpoint.

    Raises:
        WeightsError: the source is not available, is incomplete, or is not a supported model.
        RecipeError: another process has loaded other weights.
    """
    loaded = (
        _load_run(Path(source), load_recipe(source).model, mesh)
        if source is not None and chain_of_runs(source)[0]
        else load_source(recipe.model, source or recipe.model.source, recipe.seed, mesh)
    )
    processes.here().check_same("model", lambda: loaded[2], "the same weights for all of them")
    return loaded


def abstract_for(recipe: AnyRecipe, platform: str) -> tuple[Decoder, Tokenizer]:
    """Return the model that `load_for` loads, with shapes in place of arrays and not yet on its devices.

    Args:
        recipe: names the model, whose weights are not read, and its adapter, whose matrices are read for their shapes.
        platform: that of the devices, on which the compute type `auto` depends.

    Raises:
        WeightsError: the source is not available, is incomplete, or is not a supported model.
    """
    options, seed, (runs, source) = recipe.model, recipe.seed, chain_of_runs(recipe.model.source)
    config, tokenizer = (runs and settings_of_run(runs[0])) or _settings_of(scratch.with_seed(source, seed))
    switches = decoder_options(options) | {"compute_dtype": resolve_compute_dtype(options.compute_dtype, platform)}
    model = abstract_decoder(config, find_format(options.quantize, options.quantize_block), **switches)
    if options.adapter:
        read = offered("covey.adapters", "peft").load_adapter
        adapted = partial(read, folder=options.adapter, dropout=options.lora.dropout, seed=seed)
        model = nnx.eval_shape(adapted, model)
    if options.lora.rank:
        model = nnx.eval_shape(partial(with_lora, config=options.lora, seed=seed), model)
    return model, _with_thinking(tokenizer, options)


def _with_thinking(tokenizer: Tokenizer, options: ModelOptions) -> Tokenizer:
    """Return the tokenizer, whose chat template gets the switch of `options`.

    Raises:
        RecipeError: the template has no such switch.
    """
    if options.thinking != "default" and SWITCH not in (tokenizer.chat_template or ""):
        raise RecipeError(
            f"model.thinking is {options.thinking}, and the model's chat template has no variable {SWITCH}",
            want="default",
            where="model.thinking",
        )
    tokenizer.variables = {} if options.thinking == "default" else {SWITCH: options.thinking == "on"}
    return tokenizer


def _settings_of(source: str) -> tuple[ModelConfig, Tokenizer]:
    checkpoint = weights.open_source(sources.adapter_base(source) or source)[1]
    return checkpoint.config, checkpoint.tokenizer


def settings_of_run(run: Path) -> tuple[ModelConfig, Tokenizer] | None:
    """Return config and tokenizer of a run's model, as its folder has them; None for an older run, which lacks them."""
    folder = model_folder(run)
    return weights.read_settings(folder) if has_file(folder, "config.json") else None


def load_to_train(recipe: Recipe | SFTRecipe, mesh: Mesh | None, folder: RunFolder) -> tuple[Decoder, Tokenizer, str]:
    """Load the model that the run in `folder` begins with, as `load_for` does. Where it is not available any more, a
    resumed run that trains every weight is loaded from its checkpoint, unless it also needs the first weights.
    """
    try:
        return load_for(recipe, mesh)
    except WeightsError:
        needs_first = isinstance(recipe, Recipe) and algorithm_of(recipe.grpo).needs_reference
        if folder.last is None or needs_first or not _is_whole(recipe.model) or settings_of_run(folder.path) is None:
            raise
    model, tokenizer, _ = _load_run(folder.path, recipe.model, mesh)
    _, extra = folder.saves.restore(folder.last, target={}, subset=True)
    return model, tokenizer, require_entry(extra, "model", str)


def _is_whole(options: ModelOptions) -> bool:
    """Return whether the checkpoints of a run have every weight of its model."""
    return not (options.adapter or options.lora.rank or options.quantize != "none")


def with_absolute_paths(recipe: RecipeT) -> RecipeT:
    """Return `recipe` with the absolute paths of the files and folders that it names, so that its run is opened from
    anywhere. Several processes may have them in different places, and keep what was given.
    """
    if jax.process_count() > 1:
        return recipe

    def absolute(section: Any, *names: str) -> Any:
        paths = {name: absolute_path(path) for name in names if (path := getattr(section, name, None))}
        return replace(section, **paths)

    model, data = absolute(recipe.model, "source", "adapter"), absolute(recipe.data, "path", "test_path")
    return absolute(replace(recipe, model=model, data=data), "reward_model", "critic")  # type: ignore[no-any-return]


def absolute_path(source: str) -> str:
    """Return the absolute path of a source that is a path; the name of a model stays."""
    path = Path(source).expanduser()
    named = source in sources.NAMED_MODELS and not is_run(source)
    return os.path.abspath(path) if not named and os.path.exists(path) else source


def available_mesh(config: MeshConfig) -> Mesh | None:
    """Return the mesh of a recipe over the devices of all processes. If devices are missing, log it and return one
    device of each process, which is enough for inference.
    """
    wanted, there, processes = config.data * config.fsdp * config.tp, len(jax.devices()), jax.process_count()
    if wanted == 1 or (wanted <= there and not wanted % processes):
        return mesh_from_config(config)
    of, which = ("", "one of them") if processes == 1 else (f" of {processes} processes", "one of each")
    log.warning(f"model.mesh asks for {wanted} devices, and there are {there}{of}: the model is on {which}")
    return default_mesh()


def available_own_mesh(config: MeshConfig) -> Mesh | None:
    """Return the part of this process of the mesh that `available_mesh` finds."""
    mesh = available_mesh(config)
    return local_mesh(mesh) if mesh is not None and spans_processes(mesh) else mesh


def load_source(
    options: ModelOptions, source: str, seed: int = 0, mesh: Mesh | None = None, announce: bool = True
) -> tuple[Decoder, Tokenizer, str]:
    """Load the model at `source`, with the adapter or the new adapters of `options`; return it with the origin of its
    weights.

    A run folder gives its trained model with adapters merged into the base. Weights are read directly into their shards
    on `mesh`. A model from scratch without a seed of its own is drawn from `seed`.

    Args:
        announce: log the source.
    """
    use_compilation_cache()
    if chain_of_runs(source)[0]:
        model, tokenizer, origin = _load_trained(options, source, mesh)
    elif base := sources.adapter_base(source):
        adapted = replace(options, quantize="none", lora=LoRAConfig(), adapter=source)
        model, tokenizer, origin = load_source(adapted, base, seed, mesh, announce)
        model = _merged(model, options)
    else:
        if announce:
            log.info(f"loading {source}")
        model, tokenizer, origin = _load_pretrained(options, scratch.with_seed(source, seed), mesh)
    if options.adapter:
        reader = offered("covey.adapters", "peft")
        model = reader.load_adapter(model, options.adapter, dropout=options.lora.dropout, seed=seed)
        origin = f"{origin} with the adapter sha256 {reader.adapter_digest(options.adapter)[:16]}"
    model = with_lora(model, options.lora, seed=seed) if options.lora.rank else model
    # Arrays made after the weights, such as adapters, come onto the mesh too.
    return model if mesh is None else place_model(model, mesh), _with_thinking(tokenizer, options), origin


def decoder_options(options: ModelOptions) -> dict[str, Any]:
    """Return the storage and compute options of a decoder, as arguments of the loaders (`weights.DecoderOptions`)."""
    return {"param_dtype": options.dtype, **_compute_options(options)}


def _compute_options(options: ModelOptions) -> dict[str, Any]:
    """Return the compute options of a model, which do not depend on its weights."""
    return {name: getattr(options, name) for name in ("compute_dtype", "remat", "remat_keeps")}


def use_compilation_cache() -> None:
    """Keep compiled programs on disk, so that the next run starts faster; JAX_COMPILATION_CACHE_DIR sets the folder, an
    empty value disables the cache. Several processes on CPUs have none, whatever is set (`parallel.processes.start`).
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # the many small ones take seconds too


def _load_pretrained(options: ModelOptions, source: str, mesh: Mesh | None) -> tuple[Decoder, Tokenizer, str]:
    loaded = weights.load(
        source,
        **decoder_options(options),
        quantize=options.quantize,
        quantize_block=options.quantize_block,
        mesh=mesh,
    )
    return loaded.model, loaded.tokenizer, weights.with_digest(loaded.origin)


def _load_trained(options: ModelOptions, folder: str, mesh: Mesh | None) -> tuple[Decoder, Tokenizer, str]:
    """Load a run as a model source: with the compute options of `options`, and with its own adapters merged."""
    options_of_run = replace(load_recipe(folder).model, **_compute_options(options))
    model, tokenizer, origin = _load_run(Path(folder), options_of_run, mesh)
    return _merged(model, options), tokenizer, origin


def _merged(model: Decoder, options: ModelOptions) -> Decoder:
    return merge_as_base(model, options.dtype, find_format(options.quantize, options.quantize_block))


def _load_run(folder: Path, options: ModelOptions, mesh: Mesh | None) -> tuple[Decoder, Tokenizer, str]:
    """Load the run's model at its last checkpoint. The origin names the checkpoint by digest, not by the run's path."""
    log.info(f"loading {folder}, a run that began with {options.source}")
    settings, whole = settings_of_run(folder), _is_whole(options)
    if not whole and os.path.isabs(options.source) and not os.path.exists(options.source):
        raise WeightsError(
            f"the checkpoints of this run are adapters, and their base {options.source} is gone",
            want="the model that the run began with",
            fix=f"put it back, or write its new place as model.source into {folder / RECIPE}",
            where=str(folder),
        )
    if settings is not None and whole:
        model, tokenizer, base = weights.load_blank(settings[0], mesh, **decoder_options(options)), settings[1], ""
    else:
        model, tokenizer, base = load_source(options, options.source, load_recipe(folder).seed, mesh, announce=False)
    tokenizer = tokenizer if settings is None else settings[1]
    with Checkpointer(folder_below(folder, CHECKPOINTS), read_only=True) as saves:
        graph, trained, rest = split_trainable(model)
        step = processes.here().broadcast(saves.latest(), "checkpoint")
        held, extra = saves.restore(step, target={"params": nnx.to_pure_dict(trained)}, subset=True)
        origin = f"checkpoint {step} of a run, sha256 {saves.digest(step or 0)[:16]}"
    if base:
        check_same_weights(extra.get("base") or require_entry(extra, "model", str), base, folder)
    nnx.replace_by_pure_dict(trained, held["params"])
    return nnx.merge(graph, trained, rest), _with_thinking(tokenizer, options), origin
