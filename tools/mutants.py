"""Mutation testing of the modules that a loss depends on: does a test fail when a line of them is wrong?

Every mutant changes one place of one module: an operator, a comparison, a number, a condition, an argument. `--count`
of them are drawn at random from all that can be generated; `--seed` says which. Each is put into a copy of the package,
and the module's own tests run on the copy until one fails. A mutant that none of them notices has survived, and is
printed as a diff. With `--wide` the other quick tests of reinforcement learning run on the survivors too.

    python tools/mutants.py --count 200 --seed 0 --out mutants.jsonl
    python tools/mutants.py --list | head
    python tools/mutants.py --only covey/models --count 50
    python tools/mutants.py --again mutants.jsonl --wide   # only those that survived there

The exit status is 1 when fewer than `--want` per cent were killed, survivors listed in `EQUIVALENT` left out.
"""

import argparse
import ast
import doctest
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TESTS = {
    "covey/losses/policy.py": (
        "tests/losses/test_policy.py",
        "tests/losses/test_policy_loss.py",
        "tests/losses/test_trl_parity.py",
        "tests/losses/test_algebra.py",
    ),
    "covey/losses/advantages.py": (
        "tests/losses/test_advantages.py",
        "tests/losses/test_value.py",
        "tests/losses/test_trl_parity.py",
        "tests/losses/test_algebra.py",
        "tests/rl/test_ppo.py",
    ),
    "covey/losses/value.py": (
        "tests/losses/test_value.py",
        "tests/rl/test_batches.py",
        "tests/rl/test_scorers.py",
    ),
    "covey/losses/shaping.py": (
        "tests/losses/test_shaping.py",
        "tests/losses/test_advantages.py",
        "tests/losses/test_algebra.py",
        "tests/rl/test_ppo.py",
    ),
    "covey/packing/rows.py": (
        "tests/packing/test_rows.py",
        "tests/rl/test_step_data.py",
        "tests/rl/test_scorers.py",
        "plugins/covey_report/tests/test_token_values.py",
    ),
    "covey/models/attention.py": (
        "tests/models/test_layers.py",
        "tests/models/test_layers.py::test_windows_and_padding_follow_positions",
    ),
    "covey/models/spans.py": (
        "tests/models/test_blockwise.py",
        "plugins/covey_kernels/tests/test_kernels.py",
        "tests/packing/test_rows.py",
    ),
    "covey/models/span_attention.py": (
        "tests/models/test_blockwise.py",
        "plugins/covey_kernels/tests/test_kernels.py",
        "tests/packing/test_rows.py",
    ),
    "plugins/covey_kernels/rows.py": (
        "plugins/covey_kernels/tests/test_kernels.py",
        "plugins/covey_kernels/tests/test_kernels.py::test_a_decoder_computes_on_a_mesh_what_it_does_on_one_device",
        "plugins/covey_kernels/tests/test_kernels.py::test_values_and_gradients_are_those_of_plain_attention",
    ),
    "covey/models/lora.py": (
        "tests/models/test_lora.py",
        "tests/models/test_layer_stack.py",
        "tests/models/test_lora.py::test_whether_adapters_change_the_base_needs_no_program",
    ),
    "covey/rl/grpo.py": ("tests/rl/test_ppo.py", "tests/rl/test_step_data.py"),
    "plugins/covey_envs/turn_credit.py": ("plugins/covey_envs/tests/test_turn_credit.py",),
    "covey/rl/ppo.py": ("tests/rl/test_ppo.py", "tests/rl/test_step_data.py"),
    "plugins/covey_envs/episodes.py": (
        "plugins/covey_envs/tests/test_episodes.py",
        "plugins/covey_envs/tests/test_dialogue.py",
        "plugins/covey_envs/tests/test_tools.py",
        "plugins/covey_envs/tests/test_templates.py",
    ),
}
"""Module → the tests that specify what it computes, the fastest first; the module's doctests run before them. A test
that is named runs also if it is marked slow.
"""

WIDE = ("tests/losses", "tests/packing", "tests/rl", "tests/faults/test_number_faults.py")
"""Tests that `--wide` runs on survivors."""

EQUIVALENT = {
    "plugins/covey_envs/episodes.py": {
        "if not samples > slots >= (self.max_num_seqs or «0 → 1»):": "a sampler has a slot at least",
    },
    "covey/models/lora.py": {
        "return bool(«jnp.any(x) → jnp.all(x)» if shared else np.asarray(x).any())": (
            "in one process every array is addressable; tests/parallel has several"
        ),
    },
    "plugins/covey_kernels/rows.py": {
        "k, v = (jnp.repeat(x, repeats, axis=2) if repeats > «1 → 0» else x for x in (k, v))": (
            "repeated once, heads are as they were"
        ),
    },
    "covey/models/spans.py": {
        "oldest = jnp.maximum(positions - (window - 1), «jnp.take_along_axis(positions, self.start, axis=1) → "
        "jnp.take_along_axis(positions, self.start)»)": "the last of two axes is the default",
        "ordered = «jnp.sort(positions.astype(jnp.uint32) * self.time + index, axis=1) → "
        "jnp.sort(positions.astype(jnp.uint32) * self.time + index)»": "the last of two axes is the default",
    },
    "covey/rl/grpo.py": {
        "per_token = [np.full(n, a) for n, a in zip(x.lengths, of_completions, strict=«True → False»)]": (
            "both have one entry for each completion of the groups"
        ),
    },
    "covey/rl/ppo.py": {
        "advantages = [np.where(is_scored, a, 0.0) for is_scored, a in zip(scored, advantages, "
        "strict=«True → False»)]": "`gae` returns one array per completion",
        "returns = [np.where(is_scored, r, v) for is_scored, r, v in zip(scored, returns, x.values, "
        "strict=«True → False»)]": "`gae` returns one array per completion",
    },
    "covey/losses/policy.py": {
        "return -jnp.where(«free * advantage <= bounded * advantage → free * advantage < bounded * advantage», "
        "free, bounded) * advantage": (
            "the products are equal where the ratio is within its bounds, where A is 0, or where they round alike"
        ),
        "return jnp.where((«advantage < 0 → advantage <= 0») & (loss > most), most, loss)": (
            "for A = 0 loss and bound are both 0, and 0 > 0 is false"
        ),
        "tau = jnp.where(«advantage > 0 → advantage >= 0», algorithm.sapo_positive, algorithm.sapo_negative)": (
            "for A = 0 the loss and its gradient are 0 with any τ"
        ),
        "return jnp.where(«x < low → x <= low», low, jnp.where(x > high, high, x))": (
            "only `clip` has a lower bound, and on it takes the ratio that is not bounded"
        ),
    },
    "covey/losses/advantages.py": {
        "std = scored.std(ddof=1) if scored.size > 1 else «0.0 → 1.0»": (
            "with one scored reward every difference from a mean is 0, whatever divides it"
        ),
        "samples = zip(zip_equal_lengths(rewards, values), token_masks(mask, values), strict=«True → False»)": (
            "`zip_equal_lengths` has refused other lengths of both already"
        ),
        "for row, group in zip(out, rewards, strict=«True → False»):": "`out` was made with the shape of `rewards`",
    },
    "plugins/covey_envs/turn_credit.py": {
        "out, later = «np.zeros(len(rewards)) → np.ones(len(rewards))», 0.0": "the loop sets every entry",
    },
    "covey/losses/value.py": {
        "v, r = (np.concatenate([*x, «np.zeros(0) → np.ones(0)»]).astype(np.float64) for x in (values, returns))": (
            "no zeros and no ones are the same empty array"
        ),
        "for number, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=«True → False»), 1):": (
            "a `DataError` has refused other lengths already"
        ),
        "pairs = [(tuple(map(int, p)), c) for p, c in zip(prompt_ids, completion_ids, strict=«True → False»)]": (
            "a `DataError` has refused other lengths already"
        ),
        "none = «np.zeros(0, np.float32) → np.ones(0, np.float32)»": "no zeros and no ones are the same empty array",
        "return Completion(np.append(np.asarray(tokens, np.int32), np.int32(«0 → 1»)), "
        "none, none, FinishReason.STOP)": "this token is never fed: any would do",
    },
    "covey/packing/rows.py": {
        "max_tokens: int = «1 → 2»,": "a row has 64 tokens or more, so that it is computed alone either way",
        "max_tokens: int = «1 → 0»,": "a row has 64 tokens or more, so that it is computed alone either way",
        "length, rows = row_length_bucket(max((p.row_length for p in dense), default=«1 → 2»)), [[p] for p in dense]": (
            "without completions there are no rows to stack, of whatever length"
        ),
        "length, rows = row_length_bucket(max((p.row_length for p in dense), default=«1 → 0»)), [[p] for p in dense]": (
            "without completions there are no rows to stack, of whatever length"
        ),
    },
}
"""Module → mutant, as `Mutant.diff` writes it → why no test of the module's contract can distinguish it."""

COMPARE = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}  # fmt: skip
BINARY = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
SWAPPED = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "any": "all", "all": "any",
           "zeros": "ones", "ones": "zeros", "sum": "max", "mean": "sum"}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed place: the text between two offsets of a module is replaced."""

    module: str
    start: int
    stop: int
    text: str
    line: int

    @property
    def source(self) -> str:
        """Source of the module with the change applied."""
        original = _text(self.module)
        return original[: self.start] + self.text + original[self.stop :]

    @property
    def diff(self) -> str:
        """The line with the change marked in it: `return («a + b → a - b») * c`."""
        original = _text(self.module)
        first, last = original.rfind("\n", 0, self.start) + 1, original.find("\n", self.stop)
        text = self.text[1:-1] if self.text.startswith("(") else self.text
        change = f"«{original[self.start : self.stop]} → {text}»"
        return " ".join((original[first : self.start] + change + original[self.stop : last]).split())

    @property
    def equivalent(self) -> str:
        """Reason why no test can distinguish it from the original, or "" when one can."""
        return EQUIVALENT.get(self.module, {}).get(self.diff, "")

    def __str__(self) -> str:
        return f"{self.module}:{self.line}  {self.diff}"


def main() -> int:
    options = _arguments()
    modules = [module for module in TESTS if module.startswith(options.only)]
    drawn = _again(options.again) if options.again else draw(modules, options.count, options.seed)
    if options.list:
        print(*drawn, sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = _copy(Path(folder))
        _prepare(copy)
        for module in sorted(
            {mutant.module for mutant in drawn}
        ):  # a test that fails on the code as it is would kill every mutant
            if failed := _failure(module, TESTS[module], copy, options.timeout):
                raise SystemExit(f"{failed} fails without any mutant: mend it first")
        survived = [mutant for mutant, killer in _tried(drawn, copy, options) if not killer]
    return _verdict(drawn, survived, options.want)


def draw(modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return `count` of all mutants of `modules`, drawn without replacement, in the order of the modules."""
    everything = [mutant for module in modules for mutant in mutants(module)]
    listed = {(module, diff) for module in modules for diff in EQUIVALENT.get(module, {})}
    if gone := listed - {(mutant.module, mutant.diff) for mutant in everything}:
        raise SystemExit(f"no mutant is what EQUIVALENT lists, so that it can be removed there: {sorted(gone)}")
    count = min(count, len(everything))
    print(f"{len(everything)} mutants can be generated of {', '.join(modules)}; {count} drawn with seed {seed}")
    return [everything[i] for i in sorted(random.Random(seed).sample(range(len(everything)), count))]


def mutants(module: str) -> Iterator[Mutant]:
    """Generate every mutant of a module, from top to bottom."""
    text = _text(module)
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    raw = text.encode()

    def offset(line: int, column: int) -> int:
        return len(raw[: starts[line - 1] + column].decode())

    for node in _code(ast.parse(text)):
        place = node.test if isinstance(node, ast.If | ast.While) else node
        for changed in _changes(node):
            start, stop = offset(place.lineno, place.col_offset), offset(place.end_lineno, place.end_col_offset)
            inner = ast.unparse(changed)
            yield Mutant(module, start, stop, f"({inner})" if isinstance(changed, ast.expr) else inner, node.lineno)


def killed_by(mutant: Mutant, copy: Path, timeout: float, wide: bool) -> str:
    """Return the test that fails on the mutant, "timeout", or "" when every test passes."""
    target = copy / mutant.module
    target.write_text(mutant.source, encoding="utf-8")
    try:
        killer = _failure(mutant.module, TESTS[mutant.module], copy, timeout)
        return killer or (_failure(mutant.module, WIDE, copy, timeout) if wide else "")
    finally:
        target.write_text(_text(mutant.module), encoding="utf-8")


def _tried(drawn: list[Mutant], copy: Path, options: argparse.Namespace) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant with the test that killed it, as soon as it is known."""
    for number, mutant in enumerate(drawn, start=1):
        began = time.monotonic()
        killer = killed_by(mutant, copy, options.timeout, options.wide)
        seconds = time.monotonic() - began
        print(f"{number}/{len(drawn)} {seconds:5.0f}s {killer or 'SURVIVED'}  {mutant}", flush=True)
        if options.out:
            with open(options.out, "a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(mutant) | {"killed_by": killer}) + "\n")
        yield mutant, killer


def _failure(module: str, tests: Sequence[str], copy: Path, timeout: float) -> str:
    """Run tests in a child that has JAX imported already; return the name of what failed."""
    log = copy / "log"
    if not (child := os.fork()):
        os._exit(_run(module, tests, copy, log))
    until = time.monotonic() + timeout
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timeout"
        time.sleep(0.05)
    if ended[1] == 0:
        return ""
    text = log.read_text(errors="replace")
    failed = [line.split(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED", "ERROR", "EXAMPLE"))]
    return failed[0] if failed else f"status {ended[1]}: {text[-200:]}"


def _run(module: str, tests: Sequence[str], copy: Path, log: Path) -> int:
    os.setpgid(0, 0)
    written = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.chdir(copy)
    try:
        if doctest.testmod(importlib.import_module(module.removesuffix(".py").replace("/", "."))).failed:
            print("EXAMPLE in the module", flush=True)
            return 1
        quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        named = [test for test in tests if "::" in test]
        status = int(pytest.main([*quiet, "-m", "not slow", *(test for test in tests if test not in named)]))
        return status or (int(pytest.main([*quiet, *named])) if named else 0)
    except BaseException:
        traceback.print_exc()
        print("ERROR while importing", flush=True)
        return 1


def _prepare(copy: Path) -> None:
    """Import the modules that every child needs, as the tests' conftest would, and let them share compiled programs."""
    sys.path[0] = str(copy)
    sys.dont_write_bytecode = True
    conftest = copy / "conftest.py"
    text = conftest.read_text(encoding="utf-8")
    conftest.write_text(text.replace('assert "jax" not in sys.modules', "assert True"), encoding="utf-8")
    os.environ |= {
        "CI": "1",
        "JAX_COMPILATION_CACHE_DIR": str(copy / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    runpy.run_path(str(conftest))
    for name in ("jax", "jax.numpy", "flax.nnx", "optax"):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "covey"]:
        del sys.modules[name]


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk statements and expressions that run: no annotations, docstrings, assertions or imports."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Assert | ast.Import | ast.ImportFrom):
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            if isinstance(node, ast.Assign) and _is_type(node):
                continue
            if isinstance(node, ast.expr | ast.stmt):
                yield node
            yield from _code(node)


def _is_type(node: ast.Assign) -> bool:
    """Tell whether the assignment only names a type (`PerToken = Float[Array, "R M"]`)."""
    return isinstance(node.value, ast.Subscript) and node.col_offset == 0


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right):
            for other in COMPARE[type(op)]:
                yield ast.Compare(left, [other()], right)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            yield ast.BinOp(left, BINARY[type(op)](), right)
        case ast.AugAssign(target=target, op=op, value=value):
            if type(op) in BINARY:
                yield ast.AugAssign(target, BINARY[type(op)](), value)
            yield ast.Pass()
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
            if value:
                yield ast.Constant(type(value)(0))
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Call():
            yield from _calls(node)
        case ast.If(test=test) | ast.While(test=test):
            yield ast.UnaryOp(ast.Not(), test)


def _calls(node: ast.Call) -> Iterator[ast.Call | ast.expr]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in SWAPPED:
        other = SWAPPED[name]
        func = ast.Attribute(node.func.value, other) if isinstance(node.func, ast.Attribute) else ast.Name(other)
        yield ast.Call(func, node.args, node.keywords)
    if name in ("stop_gradient", "fold_in"):
        yield node.args[0]
    if name == "where" and len(node.args) == 3:
        yield ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg in ("ddof", "axis", "where", "initial", "constant_values"):
            yield ast.Call(node.func, node.args, node.keywords[:i] + node.keywords[i + 1 :])


def _text(module: str) -> str:
    return (ROOT / module).read_text(encoding="utf-8")


def _copy(folder: Path) -> Path:
    for name in ("covey", "plugins", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "conftest.py", "README.md", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def _again(path: str) -> list[Mutant]:
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [Mutant(**row) for row in rows if not row.pop("killed_by")]


def _verdict(drawn: list[Mutant], survived: list[Mutant], want: float) -> int:
    killed, equivalent = len(drawn) - len(survived), sum(bool(mutant.equivalent) for mutant in survived)
    share = 100 * killed / max(len(drawn) - equivalent, 1)
    print(f"\n{len(drawn)} mutants, {killed} killed, {equivalent} equivalent: {share:.1f} % of the rest were killed")
    for mutant in survived:
        print(f"  {mutant}" + (f"  equivalent: {mutant.equivalent}" if mutant.equivalent else ""))
    return int(share < want)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="PATH", help="mutate only modules whose path begins so")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run of tests on one mutant")
    parser.add_argument("--wide", action="store_true", help="run more tests on what survives a module's own")
    parser.add_argument("--want", type=float, default=95, help="per cent that must be killed")
    parser.add_argument("--out", help="a JSONL file that each result is appended to")
    parser.add_argument(
        "--again", help="a file of --out: run only what survived there; the modules must be as they were"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants that would be run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
