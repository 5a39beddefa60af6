"""Round trips against transformers and PEFT, live: what we export they load, and what they save we load.

Run by `make parity`, in an environment with the extra `[parity]`; it needs Covey and torch together and writes nothing
into the repository. For each family of `make_golden.FAMILIES` and of `covey_families`, with its tiny random model:

    hf         transformers → ours → export hf → transformers; with the source's config.json, with one of our own, and
               with no window in any layer
    peft       three steps of LoRA → export peft → PEFT on transformers; and merged → export hf → transformers
    from peft  an adapter that PEFT made (rank-stabilised, on some projections) → ours
    gguf       ours → export gguf → transformers, where it knows the family
    tokens     a tokenizer that came from a GGUF file → export hf → AutoTokenizer: the same ids

Logits agree to 1e-4 in float32, or the script ends with an error. Words on its command line are the families to try.
"""

import json
import runpy
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import peft
import tokenizers
import torch
from flax import nnx
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import make_golden  # noqa: E402

from covey.config.schema import LoRAConfig  # noqa: E402
from covey.models import families  # noqa: E402
from covey.models.decoder import Decoder  # noqa: E402
from covey.models.loading import weights  # noqa: E402
from covey.models.loading.hf_config import MODULE  # noqa: E402
from covey.models.lora import merge_lora, with_lora  # noqa: E402
from covey.packing.rows import pack  # noqa: E402
from covey.train.trainer import MicroBatch, Trainer  # noqa: E402
from covey.types import Completion, FinishReason, Group  # noqa: E402
from covey_formats.files import causal_logits  # noqa: E402
from covey_formats.gguf_tokenizer import PRE_TOKENIZERS  # noqa: E402
from covey_formats.gguf_writer import write_gguf  # noqa: E402
from covey_formats.hf import write_hf  # noqa: E402
from covey_formats.peft import write_peft  # noqa: E402
from covey_formats.peft_reader import load_adapter  # noqa: E402
from covey_sft.batch import supervised_loss  # noqa: E402

LIMIT = 1e-4
GGUF = ("llama", "qwen2", "qwen3")
PACKAGE = HERE.parents[1] / "plugins" / "covey_families" / "tests"
QWEN3_5 = SimpleNamespace(**runpy.run_path(str(PACKAGE / "make_golden.py")))
QWEN3_5_CONFIGS = json.loads((PACKAGE / "golden.json").read_text())
GEMMA4 = json.loads((PACKAGE / "golden" / "gemma4.json").read_text())
OF_PACKAGES = [f"qwen3_5-{number}" for number in range(len(QWEN3_5_CONFIGS))] + [f"gemma4-{name}" for name in GEMMA4]
Result = tuple[str, float]


def theirs(model: Any) -> np.ndarray:
    return make_golden.forward(model.eval(), tokens())


def tokens() -> np.ndarray:
    return np.random.RandomState(7).randint(0, make_golden.SMALL["vocab_size"], (2, 40))


def apart(ours: np.ndarray, others: np.ndarray) -> float:
    assert others.std() > 0.3, "a model that says nothing agrees with everything"
    return float(np.abs(ours - others).max())


def source(name: str, folder: Path) -> Path:
    """The family's tiny model as transformers saves it, with a tokenizer of 64 words."""
    config = make_golden.config_of(name) if name in make_golden.FAMILIES else of_package(name)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state = {key: value for key, value in model.state_dict().items() if value is not None}
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    drawn = QWEN3_5.weights_of(shapes) if name.startswith("qwen3_5") else {}
    for key, value in state.items():
        # Scales of layers are near 1.
        own = make_golden.weight(key, shapes[key]) + key.endswith("layer_scalar")
        value.copy_(torch.from_numpy(drawn.get(key, own)))
    model.save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(make_golden.SMALL["vocab_size"])}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), eos_token="w1").save_pretrained(folder)
    return folder


def of_package(name: str) -> Any:
    """Return the config of a tiny model of `covey_families`, `qwen3_5-0` or `gemma4-e2b`."""
    family, _, number = name.partition("-")
    described = QWEN3_5_CONFIGS[int(number)] if family == "qwen3_5" else GEMMA4[number]
    fields = described["config"] | {"vocab_size": make_golden.SMALL["vocab_size"]}
    return AutoConfig.for_model(**fields)


def load_theirs(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **options)


def round_trips(name: str, room: Path) -> Iterator[Result]:
    folder = source(name, room / "source")
    loaded = weights.load(folder)
    ours = causal_logits(loaded.model, tokens())
    yield "load", apart(ours, theirs(load_theirs(folder)))
    write_hf(loaded.model, loaded.tokenizer, room / "hf", source=folder, shard_size=20_000)
    yield "hf", apart(ours, theirs(load_theirs(room / "hf")))
    write_hf(loaded.model, loaded.tokenizer, room / "anew")
    yield "hf, config anew", apart(ours, theirs(load_theirs(room / "anew")))
    if loaded.config.windows is not None and loaded.config.mixers is None:
        wide = without_windows(loaded.model)
        write_hf(wide, loaded.tokenizer, room / "wide")
        yield "hf, no windows", apart(causal_logits(wide, tokens()), theirs(load_theirs(room / "wide")))
    yield from adapters(name, loaded, folder, room)
    yield "from peft", from_peft(name, loaded.model, folder, room)


def adapters(name: str, loaded: Any, folder: Path, room: Path) -> Iterator[Result]:
    model = trained(loaded.model)
    ours = causal_logits(model, tokens())
    assert np.abs(ours - causal_logits(loaded.model, tokens())).max() > 0.1, "three steps that change nothing"
    yield "merged, ours", apart(causal_logits(merge_lora(model), tokens()), ours)
    inside = MODULE if name == "gemma3" else "model"
    write_peft(model, 64, room / "peft", base=str(folder), inside=inside)
    yield "peft", apart(ours, theirs(peft.PeftModel.from_pretrained(load_theirs(folder), room / "peft")))
    write_hf(model, loaded.tokenizer, room / "merged", source=folder)
    yield "merged, hf", apart(ours, theirs(load_theirs(room / "merged")))


def trained(base: Decoder) -> Decoder:
    """Three steps of LoRA on random texts, large enough to matter."""
    draw, none = np.random.RandomState(5), np.zeros(0, np.float32)
    texts = [
        (draw.randint(0, 64, 6), Completion(draw.randint(0, 64, 12), none, none, FinishReason.STOP)) for _ in "abc"
    ]
    rows = pack([Group("", prompt, (completion,)) for prompt, completion in texts], 64)
    trainer = Trainer(with_lora(base, LoRAConfig(rank=4, alpha=8.0)), optax.adam(2e-2), supervised_loss)
    for _ in range(3):
        trainer.update([MicroBatch(rows, float(rows.scored.sum()))])
    return nnx.merge(trainer.graph, trainer.params)


def from_peft(name: str, base: Decoder, folder: Path, room: Path) -> float:
    """Rank-stabilised adapters, all their numbers random, on two projections."""
    targets = TARGETS.get(name.partition("-")[0], ["q_proj", "down_proj"])
    config = peft.LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules=targets)
    adapted = peft.get_peft_model(load_theirs(folder), config)
    torch.manual_seed(0)
    for key, value in adapted.state_dict().items():
        if "lora_" in key:
            value.copy_(0.2 * torch.randn(value.shape))
    adapted.save_pretrained(room / "theirs")
    return apart(causal_logits(load_adapter(base, room / "theirs"), tokens()), theirs(adapted))


def as_gguf(name: str, room: Path) -> Iterator[Result]:
    """The family's model with the vocabulary of the tiny Llama, through GGUF to transformers and back to a folder."""
    tokenizer = weights.load(HERE / "golden" / "tiny-llama").tokenizer
    if name != "llama":  # transformers takes Qwen's words for granted
        tokenizer.inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(PRE_TOKENIZERS["qwen2"].steps())
        tokenizer.inner.normalizer = tokenizers.normalizers.NFC()
    loaded = weights.load(source(name, room / "source"))
    config = replace(loaded.config, vocab_size=300, tie_embeddings=False)
    model = grown(loaded.model, config)
    ours = causal_logits(model, tokens())
    write_gguf(model, tokenizer, room / "gguf")
    described = families.write_config(config)
    known = AutoConfig.for_model(described.pop("model_type"), **described)  # of Qwen3 it does not read the head's width
    yield "gguf", apart(ours, theirs(load_theirs(room / "gguf", gguf_file="model.gguf", config=known)))
    for bos in (False, True):
        again = weights.load(room / "gguf" / "model.gguf")  # a tokenizer remembers prompts
        again.tokenizer.add_bos = bos
        write_hf(again.model, again.tokenizer, room / f"back-{bos}")
        same_tokens(again.tokenizer, room / f"back-{bos}")
    yield "gguf, hf", apart(ours, theirs(load_theirs(room / "back-True")))


def without_windows(model: Decoder) -> Decoder:
    """`model` with the same weights, and layers that all see everything."""
    config = replace(model.config, windows=None)
    return nnx.merge(nnx.graphdef(Decoder(config, rngs=nnx.Rngs(0))), nnx.state(model))


def grown(model: Decoder, config: Any) -> Decoder:
    """`model` with more rows in its embedding, and a head of its own."""
    out = nnx.merge(*nnx.split(model))
    table = jnp.pad(model.embed.embedding[...], ((0, config.vocab_size - 64), (0, 0)), constant_values=0.1)
    head = jnp.pad(model.head_weight, ((0, config.vocab_size - 64), (0, 0)), constant_values=0.1)
    fresh = Decoder(config, rngs=nnx.Rngs(0))
    fresh.layers, fresh.norm = out.layers, out.norm
    fresh.embed.embedding[...], fresh.head.embedding[...] = table, head  # type: ignore[union-attr]
    return fresh


def same_tokens(ours: Any, folder: Path) -> None:
    other = AutoTokenizer.from_pretrained(folder)
    for text in make_golden.TRICKY:
        assert other(text)["input_ids"] == ours.encode_prompt(text).tolist(), text
        assert other.encode(text, add_special_tokens=False) == ours.encode(text).tolist(), text
    for chat in make_golden.CHATS:
        assert other.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == ours.render(chat)
    assert (other.eos_token_id, other.bos_token_id) == (ours.eos_id, ours.bos_id)


TARGETS: dict[str, Any] = {
    "nanochat": ["q_proj", "fc2"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "qwen3_5": ["in_proj_qkv", "out_proj", "q_proj", "down_proj"],
    "gemma3": r".*language_model.*\.(q_proj|down_proj)",
}
"""Modules that an adapter of PEFT is on, where they are not q_proj and down_proj."""


def main() -> int:
    worst = 0.0
    for name in sys.argv[1:] or [*make_golden.FAMILIES, *OF_PACKAGES]:
        with tempfile.TemporaryDirectory() as room:
            results = list(round_trips(name, Path(room)))
        if name in GGUF:
            with tempfile.TemporaryDirectory() as room:
                results += as_gguf(name, Path(room))
        print(json.dumps({"family": name} | {step: round(value, 7) for step, value in results}), flush=True)
        worst = max(worst, *(value for _, value in results))
    print(f"largest difference of logits {worst:.2g}; {LIMIT:g} is allowed")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
