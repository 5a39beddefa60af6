"""Make golden tokens and continuations of GGUF files with llama.cpp: plugins/covey_formats/tests/gemma.json.

It needs packages that Covey does not: pip install sentencepiece xllamacpp gguf numpy, in an environment of its own.

    python tests/parity/make_gguf_golden.py FILE.gguf      # gemma-3-270m-q4_k_m.gguf, of the source gemma3-270m

`tiny` is a model with drawn weights, whose vocabulary SentencePiece learns here from the texts: its pieces, and for
each text the ids of llama.cpp and its greedy continuation, with the smallest gap between the log-probs of the first
and the second token. Texts whose ids SentencePiece gives otherwise are printed. `real` has ids and continuations of the
real model. Its weights are dequantised to float32 first: llama.cpp rounds activations to 8 bits for quantised weights,
and the continuation then hangs on near ties.
"""

import argparse
import io
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import xllamacpp

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
OUT = ROOT / "plugins" / "covey_formats" / "tests" / "gemma.json"
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
WRITTEN = ["\n", "\n\n", "\n\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "\t", "<b>", "</b>"]
TURNS = ["<start_of_turn>", "<end_of_turn>"]
NEW, NEW_TINY = 16, 24

TEXTS = [
    "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins with four.",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
    "Question: What is 17 + 25?\nAnswer: 42\n\nQuestion: What is 6 × 7?\nAnswer:",
    'def fibonacci(n: int) -> int:\n    """Add."""\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b',
    '#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; ++i) {\n\t\tprintf("%d\\n", i);\n\t}\n',
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 AND city != 'Köln' GROUP BY name;",
    "Die Größe der Bäume überraschte die Schüler, denn",
    "Ein Übermaß an süßen Äpfeln führt häufig zu",
    "I love pizza 🍕 and my family 👨‍👩‍👧‍👦! 🇩🇪🙂",
    "日本の首都は東京です。中国的首都是北京。한국의 수도는",
    "   three leading spaces and  two   inside     ",
    "First paragraph.\n\n\nSecond paragraph.\n\n\n\n\nThird:",
    "\n" * 35 + "after many newlines",
    "Bytes: \u0001\u007f \U000e0041\U000e007f ꙮ 𒀀𓀀 \ufdd0 ᚠᛇᚻ᛫ z̷̢̛̜a̸",
    "<h1>Title</h1><p>Text with <b>bold</b></p>\n<table><tr><td>1</td></tr></table>",
    "==========\n-----\n......\n\t\t\ttabs▁and▁the▁mark itself",
    "1+1=2, 2+2=4, 12345678901234567890 and 3.14159; x² + y² = z²,",
    "<start_of_turn>user\nWhat is the capital of France?<end_of_turn>\n<start_of_turn>model\n",
    "\tindented by a tab\n \n  \n   lines of blanks\r\nand a carriage return",
    "x",
]


def learn_vocabulary() -> tuple[dict[str, Any], sentencepiece.SentencePieceProcessor]:
    """A vocabulary of byte pairs as Gemma has it: no prefix, bytes, digits alone, no normalisation."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, model_type="bpe", vocab_size=600, byte_fallback=True,
        normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False, split_digits=True,
        user_defined_symbols=TURNS + WRITTEN, pad_id=0, eos_id=1, bos_id=2, unk_id=3, character_coverage=0.98,
        allow_whitespace_only_pieces=True, minloglevel=2,
    )  # fmt: skip
    learnt = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [learnt.id_to_piece(token) for token in range(learnt.get_piece_size())]
    types = [kind_of(token, piece) for token, piece in enumerate(pieces)]
    # As llama.cpp's converter: user-defined tokens have their spaces, and only pieces have scores that matter.
    texts = [p.replace("\u2581", " ") if kind == USER_DEFINED else p for p, kind in zip(pieces, types, strict=True)]
    scores = [float(learnt.get_score(i)) if kind == NORMAL else -1000.0 for i, kind in enumerate(types)]
    return {"tokens": texts, "types": types, "scores": scores}, learnt


def kind_of(token: int, piece: str) -> int:
    if token < 4 or piece in TURNS:
        return CONTROL
    if piece in WRITTEN:
        return USER_DEFINED
    return BYTE if len(piece) == 6 and piece.startswith("<0x") else NORMAL


def serve(path: Path) -> xllamacpp.Server:
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.port = str(path), 512, 1, 0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.warmup, options.verbosity, options.swa_full = False, -1, True
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(options)


def ask(server: xllamacpp.Server, path: str, **body: Any) -> dict[str, Any]:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(server.listening_address + path, data, headers)) as answer:
        return dict(json.load(answer))


def continue_texts(path: Path, new: int) -> list[dict[str, Any]]:
    """Ids of each text without BOS, and the greedy continuation after BOS and text with the log-probs of its tokens."""
    server, cases = serve(path), []
    for text in TEXTS:
        ids = ask(server, "/tokenize", content=text, add_special=False, parse_special=True)["tokens"]
        answer = ask(
            server, "/completion", prompt=[2, *ids], n_predict=new, temperature=0.0, top_k=1, cache_prompt=False,
            return_tokens=True, n_probs=2, repeat_penalty=1.0,
        )  # fmt: skip
        steps = [step["top_logprobs"] for step in answer["completion_probabilities"]]
        gap = min(first["logprob"] - second["logprob"] for first, second in steps)
        cases.append({"text": text, "ids": ids, "greedy": answer["tokens"], "gap": round(gap, 4)})
        print(f"{len(ids):4} ids, {len(answer['tokens'])} tokens, smallest gap {gap:.4f}", flush=True)
    return cases


def make_tiny(folder: Path) -> dict[str, Any]:
    from plugins.covey_formats.tests import tiny_gemma

    vocabulary, learnt = learn_vocabulary()
    cases = continue_texts(tiny_gemma.write(folder / "tiny.gguf", vocabulary), NEW_TINY)
    for case in cases:
        if (ids := learnt.encode(case["text"])) != case["ids"]:
            print(f"SentencePiece differs on {case['text']!r}: {ids}, llama.cpp {case['ids']}")
    return vocabulary | {"cases": cases}


def dequantised(source: Path, out: Path) -> Path:
    """The same model with all weights in float32."""
    reader, kinds = gguf.GGUFReader(source), gguf.GGUFValueType
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == kinds.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path, help="gemma-3-270m-q4_k_m.gguf")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        golden = {"tiny": make_tiny(Path(folder))}
        golden["real"] = continue_texts(dequantised(asked.file, Path(folder) / "real.gguf"), NEW)
    OUT.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
