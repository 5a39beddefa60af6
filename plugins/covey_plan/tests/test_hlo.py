"""The reader of optimised HLO: what it says of a text, and of a program that XLA compiled."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from covey.parallel import make_mesh
from covey_plan.hlo import Program

TEXT = """
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} copy(%p)
}

%inner (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[]{:T(128)}, f32[8]{0:T(256)}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %all-gather-start.1 = (f32[8]{0}, f32[32]{0:T(256)S(1)}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %all-gather-done.1 = f32[32]{0} all-gather-done(%all-gather-start.1)
  ROOT %r = (s32[], f32[8]) tuple(%i, %x)
}

%condition (t.1: (s32[], f32[8])) -> pred[] {
  %t.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%below_five (t.3: (s32[], f32[8])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(5), metadata={op_name="jit(f)"}
  %i.3 = s32[]{:T(128)} get-tuple-element(%t.3), index=0
  ROOT %lt.3 = pred[]{:T(512)} compare(%i.3, %constant.1), direction=LT, backend_config={"flag_configs":[]}
}

%outer (t.2: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t.2 = (s32[], f32[8]{0}) parameter(0)
  ROOT %while.2 = (s32[], /*index=1*/f32[8]{0}) while(%t.2), condition=%condition, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

%yes (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  ROOT %copy.2 = f32[8]{0} copy(%y), metadata={op_name="jit(f)/copy" source_file="f.py"}
}

%no (n: f32[8]) -> f32[8] {
  ROOT %n = f32[8]{0} parameter(0)
}

%short (t.4: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t.4 = (s32[], f32[8]{0}) parameter(0)
  %all-reduce.4 = (f32[8]{0}, f32[8]{0}) all-reduce(%x.4, %x.4), replica_groups={{0,1},{2,3}}, to_apply=%add
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %fusion = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused
  %while.1 = (s32[], f32[8]{0}) while(%tuple), condition=%condition, body=%outer
  %while.3 = (s32[], f32[8]{0}) while(%tuple), condition=%below_five, body=%short
  %reduce-scatter.1 = bf16[2]{0} reduce-scatter(%fusion), dimensions={0}, to_apply=%add
  ROOT %cond = f32[8]{0} conditional(%i, %a, %a), branch_computations={%yes, %no}
}
"""  # noqa: E501


def test_collectives_have_their_loops_and_bytes() -> None:
    gather, reduced, scatter = Program(TEXT).collectives()
    assert (gather.opcode, gather.shapes, gather.bytes) == ("all-gather", ("f32[32]",), 128)
    assert gather.loops == (None, 3)
    assert gather.executions == 3
    assert (reduced.bytes, reduced.loops) == (64, (5,))
    assert (scatter.opcode, scatter.bytes, scatter.loops) == ("reduce-scatter", 32, ())


def test_a_ring_of_n_devices_sends_all_parts_but_one_and_twice_for_a_sum() -> None:
    gather, reduced, scatter = Program(TEXT).collectives()
    assert [(x.group, x.sent) for x in (gather, reduced, scatter)] == [(4, 128 * 3 // 4), (2, 64), (None, 32)]


def test_branches_are_walked_and_fusions_are_left_out() -> None:
    (copy,) = Program(TEXT).of("copy")
    assert copy.bytes == 32
    assert len(Program(TEXT).of("conditional")) == 1


def test_a_compiled_program_is_read() -> None:
    mesh = make_mesh((4,), ("tp",))
    weight = jax.ShapeDtypeStruct((3, 8, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, None, "tp")))
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "tp")))

    def layers(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.T) @ w, None), x, weights)[0]

    program = Program(jax.jit(layers).lower(weight, x).compile().as_text())
    (reduced,) = program.collectives()
    assert (reduced.opcode, reduced.bytes, reduced.executions) == ("all-reduce", 16 * 8 * 4, 3)
    assert (reduced.group, reduced.sent) == (4, 2 * 16 * 8 * 4 * 3 // 4)


def test_a_collective_in_a_chain_of_fusions_counts_once_and_runs_beside_work() -> None:
    text = """\
%begin (p: f32[8]) -> f32[32] {
  %p = f32[8]{0} parameter(0)
  ROOT %all-gather.1 = f32[32]{0} all-gather(%p), channel_id=7, dimensions={0}, frontend_attributes={chain_id="1"}
}

%end (q: f32[8]) -> f32[32] {
  %q = f32[8]{0} parameter(0)
  ROOT %all-gather.2 = f32[32]{0} all-gather(%q), channel_id=7, dimensions={0}, frontend_attributes={chain_id="1"}
}

%outer (r: f32[8]) -> f32[32] {
  %r = f32[8]{0} parameter(0)
  ROOT %inner = f32[32]{0} fusion(%r), kind=kCustom, calls=%end
}

ENTRY %main (x: f32[8]) -> f32[32] {
  %x = f32[8]{0} parameter(0)
  %y = f32[32]{0} fusion(%x), kind=kCustom, calls=%begin
  %z = f32[32]{0} fusion(%x), kind=kCustom, calls=%outer
  %sent = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), channel_id=8
  %w = f32[8]{0} collective-permute-done(%sent)
  ROOT %all-reduce = f32[32]{0} all-reduce(%z), channel_id=9
}
"""
    found = [(x.opcode, x.bytes, x.asynchronous) for x in Program(text).collectives()]
    assert found == [("all-gather", 128, True), ("collective-permute", 32, True), ("all-reduce", 128, False)]


def test_a_reduce_scatter_of_tpus_is_waited_for() -> None:
    """It is a fusion of its own: a device sends half of what its all-reduce would."""
    text = """\
%all-reduce-scatter.4 (p: f32[32]) -> f32[8] {
  %p = f32[32]{0} parameter(0)
  %all-reduce.1 = f32[32]{0} all-reduce(%p), channel_id=7, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice = f32[8]{0} dynamic-slice(%all-reduce.1, %first), dynamic_slice_sizes={8}
}

ENTRY %main (x: f32[32]) -> f32[8] {
  %x = f32[32]{0} parameter(0)
  ROOT %y = f32[8]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.4
}
"""
    found = [(x.opcode, x.sent, x.asynchronous) for x in Program(text).collectives()]
    assert found == [("reduce-scatter", 96, False)]


def test_estimates_and_kernels_are_found() -> None:
    text = """\
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"120","flag":true}
  ROOT %z = f32[8]{0} custom-call(%y), custom_call_target="tpu_custom_call"
}
"""
    x, y, z = Program(text).instructions
    assert (x.cycles, y.cycles, z.cycles) == (0, 120, 0)
    assert (x.kernel, y.kernel, z.kernel) == (False, False, True)
