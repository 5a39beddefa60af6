"""The first setting to change is the one that fits when it is planned again."""

from collections.abc import Sequence

from covey.config import recipe
from covey_plan.search import search

SETTINGS = ["training.max_tokens_per_micro_batch=4096", "training.row_length=1024", "rollout.slots=64"]


def test_the_knob_of_the_worst_program_comes_first_with_its_mildest_value_that_fits() -> None:
    ready = recipe.load("quickstart", SETTINGS)
    asked: list[Sequence[str]] = []

    def peak_with(settings: Sequence[str]) -> int:
        asked.append(list(settings))
        recipe.load("quickstart", [*SETTINGS, *settings])
        return 100 if settings == ["--training.max-tokens-per-micro-batch", "2048"] else 60

    trials = search(ready, ["gradients"], 80, peak_with)
    assert [trial.fits for trial in trials] == [False, True]
    assert asked[-1] == ["--training.max-tokens-per-micro-batch", "1024"]
    assert search(ready, ["decode"], 80, peak_with)[0].settings == ("--rollout.slots", "32")


def test_knobs_that_do_not_suffice_alone_are_turned_together() -> None:
    ready = recipe.load("quickstart", SETTINGS)

    def peak_with(settings: Sequence[str]) -> int:
        changed = recipe.load("quickstart", [*SETTINGS, *settings])
        return (
            changed.training.max_tokens_per_micro_batch
            + changed.rollout.slots
            + (0 if changed.model.lora.rank else 999)
        )

    trials = search(ready, ["gradients"], 1024 + 64, peak_with)
    assert trials[-1].fits
    assert {"--training.row-length", "--rollout.slots", "--model.lora.rank"} & set(trials[-1].settings)


def test_what_never_fits_is_told_with_all_that_was_tried() -> None:
    ready = recipe.load("quickstart", SETTINGS)
    trials = search(ready, ["gradients"], 1, lambda settings: 10)
    assert not any(trial.fits for trial in trials)
    assert trials[-1].settings[-2:] == ("--model.quantize", "nf4")
    for trial in trials:
        recipe.load("quickstart", [*SETTINGS, *trial.settings])


def test_rows_and_slots_are_not_tried_for_a_transfer_of_weights_alone() -> None:
    ready = recipe.load("quickstart", SETTINGS)
    alone = search(ready, ["sync"], 1, lambda settings: 10)
    assert alone
    assert {trial.settings[0] for trial in alone} == {"--model.lora.rank"}
    beside = search(ready, ["sync", "decode"], 1, lambda settings: 10)
    assert beside[: len(alone)] == alone
    assert "--rollout.slots" in beside[len(alone)].settings
