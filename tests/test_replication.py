"""The replication proof: at least one test for every rule."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from replicax.strategies.replication import ASSERT_MIRRORED, prove

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def proof_of(fn, *, u=None, v=None):
    """The proof of ``fn(u, v)``, where ``u`` is uniform and ``v`` varies."""
    u = jnp.arange(1.0, 5.0) if u is None else u
    v = jnp.arange(1.0, 5.0) if v is None else v
    flags = [False] * len(jax.tree.leaves(u)) + [True] * len(jax.tree.leaves(v))
    return prove(jax.make_jaxpr(fn, axis_env=[("replica", 4)])(u, v), flags)


def varies(fn, **inputs):
    """For each output of ``fn(u, v)``, whether it varies; nothing may be wrong."""
    proof = proof_of(fn, **inputs)
    assert proof.problems == ()
    return list(proof.varies)


def problems(fn, **inputs):
    return [problem.kind for problem in proof_of(fn, **inputs).problems]


# -- rules: functions of their operands ----------------------------------------------


def test_a_value_varies_if_it_depends_on_one_that_does():
    assert varies(lambda u, v: (u * 2, u + v, v, jnp.zeros(3), 1.0)) == [
        *(False, True, True, False, False)
    ]


def test_constants_captured_by_the_step_are_uniform():
    captured = jnp.arange(4.0)
    assert varies(lambda u, v: captured * u) == [False]


def test_the_number_of_flags_must_fit():
    jaxpr = jax.make_jaxpr(lambda x, y: x)(1.0, 2.0)
    with pytest.raises(ValueError, match=r"one flag per input of the jaxpr, 2\. Got 1"):
        prove(jaxpr, [True])


def test_a_reduction_with_a_function_of_ones_own_mixes_all_operands():
    assert varies(
        lambda u, v: (
            lax.reduce(v, u[0], lambda _, y: y, (0,)),
            lax.reduce(u, u[0], lambda _, y: y, (0,)),
        )
    ) == [True, False]


def test_a_scatter_varies_with_its_updates_or_indices():
    assert varies(
        lambda u, v: (
            u.at[jnp.array([0, 0])].add(u[:2]),
            u.at[v.astype(int)].add(u),
            u.at[0].add(v[0]),
        )
    ) == [False, True, True]


def test_a_barrier_keeps_its_operands_apart():
    assert varies(lambda u, v: lax.optimization_barrier((u, v))) == [False, True]


def test_a_linear_solve_varies_with_its_operand_or_its_functions():
    def solve(factor, b):
        return lax.custom_linear_solve(
            lambda x: factor * x, b, lambda _, y: y / factor, symmetric=True
        )

    assert varies(
        lambda u, v: (
            solve(2.0, u),
            solve(2.0, v),
            solve(v[0], u),
            solve(1.0 + lax.axis_index("replica"), u),
        )
    ) == [False, True, True, True]


def test_a_kernel_varies_if_an_operand_does_or_it_hides_something():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def call(body, x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(body, out_shape=out, interpret=True)(x)

    def double(x, o):
        o[...] = 2 * x[...]

    def add_id(x, o):
        o[...] = x[...] + lax.axis_index("replica")

    assert varies(lambda u, v: (call(double, u), call(double, v), call(add_id, u))) == [
        *(False, True, True)
    ]


# -- rules: what varies by itself, and what makes equal ------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda u: lax.axis_index("replica"),
        lambda u: lax.ppermute(u, "replica", [(0, 1)]),
        lambda u: lax.all_to_all(u, "replica", 0, 0, tiled=True),
        lambda u: lax.psum_scatter(u, "replica", tiled=True),
        lambda u: lax.pshuffle(u, "replica", [1, 0, 3, 2]),
        lambda u: lax.rng_uniform(0.0, 1.0, (2,)),
        lambda u: io_callback(lambda: np.float32(0), SCALAR),
        lambda u: jax.pure_callback(lambda: np.float32(0), SCALAR),
        lambda u: jax.ffi.ffi_call("a_function_of_the_users", SCALAR)(u),
        lambda u: lax.empty((2,), jnp.float32),
        lambda u: jax.ref.freeze(jax.ref.empty_ref(SCALAR)),
        lambda u: lax.psum(u, "replica", axis_index_groups=[[0], [1, 2, 3]]),
        lambda u: lax.all_gather(u, "replica", axis_index_groups=[[0, 1], [2, 3]]),
        lambda u: jax.random.normal(
            jax.random.fold_in(jax.random.key(0), lax.axis_index("replica"))
        ),
    ],
)
def test_varies_without_a_varying_operand(make):
    assert varies(lambda u, v: make(u)) == [True]


@pytest.mark.parametrize(
    "combine",
    [
        *(lax.psum, lax.pmean, lax.pmax, lax.pmin, lax.all_gather),
        functools.partial(lax.all_gather, tiled=True),
        lambda v, axis: lax.psum((v, v), axis)[1],
        lambda v, axis: lax.all_gather(
            lax.psum_scatter(v, axis, tiled=True), axis, tiled=True
        ),
    ],
)
def test_makes_equal(combine):
    assert varies(lambda u, v: combine(v, "replica")) == [False]


def test_a_collective_over_another_axis_makes_nothing_equal():
    def over_rows(x):
        return jax.vmap(lambda y: lax.psum(y, "v"), axis_name="v")(x)

    def over_both(x):
        return jax.vmap(lambda y: lax.psum(y, ("replica", "v")), axis_name="v")(x)

    def shadowing(x):
        return jax.vmap(lambda y: lax.psum(y, "replica"), axis_name="replica")(x)

    assert varies(
        lambda u, v: (over_rows(u), over_rows(v), over_both(v), shadowing(v))
    ) == [False, True, False, True]


def test_a_collective_under_vmap_makes_equal():
    assert varies(lambda u, v: jax.vmap(lambda y: lax.psum(y, "replica"))(v)) == [False]


def test_the_axis_may_have_another_name():
    jaxpr = jax.make_jaxpr(lambda x: lax.psum(x, "d"), axis_env=[("d", 2)])(1.0)
    assert prove(jaxpr, [True], "d").varies == (False,)
    assert prove(jaxpr, [True]).varies == (True,)


def test_random_numbers_vary_with_their_key():
    def draw(x):
        return jax.random.normal(jax.random.key(x[0].astype(int)), (2,))

    assert varies(lambda u, v: (draw(u), draw(v))) == [False, True]


def test_a_primitive_that_is_not_jaxs_own_varies_whatever_its_name():
    imposter = Primitive("psum")
    imposter.def_abstract_eval(lambda x: x)
    assert varies(lambda u, v: imposter.bind(u)) == [True]


def test_a_primitive_that_jax_may_add_varies_if_it_names_the_axis(monkeypatch):
    from replicax import _compat

    future = Primitive("a_future_collective")
    future.def_abstract_eval(lambda x, **_: x)
    monkeypatch.setattr(_compat, "_jax_primitives", {*_compat._jax_primitives, future})
    assert varies(
        lambda u, v: (
            future.bind(u, axis_name=("replica",)),
            future.bind(u, axes="replica"),
            future.bind(u, axes=("other",)),
            future.bind(v, axes=("other",)),
        )
    ) == [True, True, False, True]


def test_a_nested_shard_map_is_looked_into():
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("replica",))
    found = []

    def inner(x):
        return x * 2, lax.psum(x, "replica")

    def body(x):
        nested = jax.shard_map(
            inner, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
        )
        found.append(jax.make_jaxpr(nested)(x))
        return x

    jax.eval_shape(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=jax.P("replica"),
            out_specs=jax.P("replica"),
            check_vma=False,
        ),
        jnp.ones(4),
    )
    assert prove(found[0], [True]).varies == (True, False)


# -- rules: inner jaxprs -------------------------------------------------------------


@jax.custom_vjp
def second_doubled(x, y):
    return x, 2 * y


second_doubled.defvjp(
    lambda x, y: (second_doubled(x, y), None), lambda _, g: (g[0], g[1])
)


@jax.custom_jvp
def second_tripled(x, y):
    return x, 3 * y


second_tripled.defjvp(lambda p, t: (second_tripled(*p), (t[0], 3 * t[1])))


@pytest.mark.parametrize(
    "call", [jax.jit, jax.checkpoint, lambda f: f, lambda f: jax.jit(jax.jit(f))]
)
@pytest.mark.parametrize(
    "function", [lambda x, y: (x * 2, y * 2), second_doubled, second_tripled]
)
def test_calls_keep_their_outputs_apart(call, function):
    assert varies(lambda u, v: call(function)(u, v)) == [False, True]


def test_a_scan_varies_from_the_iteration_on_that_something_varies_in():
    def shift(carry, _):
        a, b, c = carry
        return (b, c, c), (a, c * 0)

    assert varies(
        lambda u, v: lax.scan(shift, (u, u, v), None, length=3),
    ) == [True, True, True, True, True]
    assert varies(lambda u, v: lax.scan(shift, (u, u, u), v, length=4)) == [False] * 5


def test_a_scan_may_all_reduce_its_carry():
    def body(carry, x):
        return lax.pmean(carry + x, "replica"), carry

    assert varies(lambda u, v: lax.scan(body, u[0], v)) == [False, False]


def test_a_while_loop_with_a_varying_predicate_varies():
    def loop(bound, u):
        return lax.while_loop(
            lambda c: c[0] < bound, lambda c: (c[0] + 1, u, -c[2]), (0.0, u, u)
        )

    assert varies(lambda u, v: loop(u[0], u)) == [False, False, False]
    assert varies(lambda u, v: loop(v[0], u)) == [True, True, True]


def test_a_while_loop_whose_carry_comes_to_vary_has_a_varying_predicate():
    def loop(u, v):
        return lax.while_loop(
            lambda c: c[0] < 5, lambda c: (c[1], c[1] + v[0], c[2] + 1), (u[0], u[1], 0)
        )

    assert varies(loop) == [True, True, True]


def test_a_cond_varies_with_its_index_or_a_branch():
    def branch(index, x, y):
        return lax.switch(index, [lambda: x, lambda: y, lambda: x + 1])

    assert varies(
        lambda u, v: (
            branch(u[0].astype(int), u, u),
            branch(u[0].astype(int), u, v),
            branch(v[0].astype(int), u, u),
            lax.cond(lax.pmax(v[0], "replica") > 0, lambda: u, lambda: u * 2),
        )
    ) == [False, True, True, False]


def test_the_platform_is_the_same_everywhere():
    assert varies(
        lambda u, v: lax.platform_dependent(u, cpu=jnp.sin, default=jnp.cos)
    ) == [False]


def test_what_jax_expands_later_is_looked_into():
    def root(x):
        return lax.custom_root(
            lambda y: y * y - x, 1.0, lambda f, y: y - f(y) / 2, lambda g, y: y / g(1.0)
        )

    assert varies(lambda u, v: (root(u[0]), root(v[0]))) == [False, True]
    assert varies(
        lambda u, v: (jnp.searchsorted(u, 2 * u), jnp.searchsorted(u, v))
    ) == [False, True]


def test_what_cannot_be_expanded_apart_varies():
    def root(x):
        return lax.custom_root(
            lambda y: y - lax.axis_index("replica") * x,
            1.0,
            lambda f, y: y - f(y) / 2,
            lambda g, y: y / g(1.0),
        )

    assert varies(lambda u, v: root(u[0])) == [True]


# -- rules: refs ---------------------------------------------------------------------


def contents(use):
    """Whether a ref of zeros varies after ``use(ref, u, v)``."""

    def program(u, v):
        ref = jax.new_ref(jnp.zeros(4))
        use(ref, u, v)
        return jax.ref.freeze(ref)

    return varies(program)[0]


def test_a_ref_varies_once_something_varying_was_written():
    assert not contents(lambda r, u, v: r.__setitem__(..., u))
    assert contents(lambda r, u, v: r.__setitem__(..., v))
    assert contents(lambda r, u, v: r.__setitem__(0, v[0]))
    assert contents(lambda r, u, v: r.__setitem__(v[0].astype(int), u[0]))
    assert contents(lambda r, u, v: jax.ref.addupdate(r, (), v))
    assert not contents(lambda r, u, v: r.__setitem__(..., lax.pmean(v, "replica")))


def test_a_swap_returns_what_the_ref_held():
    def program(u, v):
        ref = jax.new_ref(u)
        return jax.ref.swap(ref, (), v), jax.ref.swap(ref, (), u)

    assert varies(program) == [False, True]


def in_jit(write):
    jax.jit(lambda: write(0))()


def in_scan(write):
    lax.scan(lambda c, _: (write(0), (c, None))[1], 0, None, length=2)


def in_fori(write):
    lax.fori_loop(0, 3, lambda i, c: (write(i), c)[1], 0)


def in_while(write):
    lax.while_loop(lambda i: i < 3, lambda i: (write(i), i + 1)[1], 0)


def in_cond(write):
    lax.cond(True, lambda: write(0), lambda: None)


def in_nested(write):
    in_scan(lambda i: in_cond(lambda j: in_jit(write)))


@pytest.mark.parametrize(
    "place", [in_jit, in_scan, in_fori, in_while, in_cond, in_nested]
)
def test_a_write_is_seen_wherever_it_stands(place):
    assert contents(lambda r, u, v: place(lambda i: r.__setitem__(..., v)))
    assert not contents(lambda r, u, v: place(lambda i: r.__setitem__(..., u + i)))


def test_a_write_that_only_some_replicas_reach_makes_the_ref_vary():
    def write(r):
        r[...] = jnp.ones(4)

    assert contents(lambda r, u, v: lax.cond(v[0] > 0, lambda: write(r), lambda: None))
    assert contents(
        lambda r, u, v: lax.while_loop(
            lambda i: i < v[0], lambda i: (write(r), i + 1)[1], 0.0
        )
    )
    assert not contents(
        lambda r, u, v: lax.cond(u[0] > 0, lambda: write(r), lambda: None)
    )


def test_what_a_loop_reads_before_it_writes_varies():
    def program(u, v):
        ref = jax.new_ref(jnp.zeros(()))

        def body(_, x):
            read = ref[...]
            ref[...] = x
            return 0, read

        return lax.scan(body, 0, v)[1]

    assert varies(program) == [True]


def test_a_ref_made_in_a_loop_belongs_to_its_iteration():
    def program(u, v):
        def body(carry, x):
            ref = jax.new_ref(carry)
            ref[...] = ref[...] + x
            return lax.pmean(jax.ref.freeze(ref), "replica"), None

        return lax.scan(body, u[0], v)[0]

    assert varies(program) == [False]


def test_an_input_may_be_a_ref():
    def program(ref, x):
        ref[...] = x
        return ref[...]

    ref = jax.new_ref(jnp.zeros(4))
    jaxpr = jax.make_jaxpr(program)(ref, jnp.ones(4))
    assert prove(jaxpr, [False, True]).varies == (True,)
    assert prove(jaxpr, [False, False]).varies == (False,)
    assert prove(jaxpr, [True, False]).varies == (True,)


# -- problems ------------------------------------------------------------------------

COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "replica"),
    "all_gather": lambda x: lax.all_gather(x, "replica").sum(0),
    "ppermute": lambda x: lax.ppermute(x, "replica", [(0, 1)]),
    "all_to_all": lambda x: lax.all_to_all(x, "replica", 0, 0, tiled=True),
    "reduce_scatter": lambda x: lax.psum_scatter(jnp.tile(x, 4), "replica", tiled=True),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_that_only_some_replicas_reach(name):
    collective = COLLECTIVES[name]

    def branch(predicate, x):
        return lax.cond(predicate, lambda: collective(x), lambda: x)

    assert problems(lambda u, v: branch(v[0] > 0, u)) == ["divergent_collective"]
    assert problems(lambda u, v: branch(u[0] > 0, v)) == []


def test_a_collective_in_a_loop_that_ends_at_different_times():
    def loop(bound, x):
        return lax.while_loop(
            lambda c: c[0] < bound,
            lambda c: (c[0] + 1, lax.psum(c[1], "replica")),
            (0.0, x),
        )

    assert problems(lambda u, v: loop(v[0], u)) == ["divergent_collective"]
    assert problems(lambda u, v: loop(u[0], v)) == []


def test_a_collective_in_the_predicate_of_such_a_loop():
    def loop(u, v):
        return lax.while_loop(
            lambda x: (lax.psum(x, "replica") < 9) & (x < v[0]), lambda x: x + 1, u[0]
        )

    assert problems(loop) == ["divergent_collective"]


def test_a_collective_in_the_predicate_keeps_a_loop_together():
    def loop(u, v):
        return lax.while_loop(
            lambda x: lax.psum(x, "replica").sum() < 9, lambda x: x + 1, v
        )

    assert problems(loop) == []


def test_a_divergent_collective_is_found_at_any_depth_and_reported_once():
    def program(u, v):
        def body(c, _):
            inner = jax.jit(lambda x: lax.psum(x, "replica"))
            return lax.cond(c[0] > 0, lambda: inner(c), lambda: c), None

        return lax.scan(body, v, None, length=3)

    assert problems(program) == ["divergent_collective"]


def test_a_collective_inside_a_solver_that_only_some_replicas_call():
    def solve(b):
        return lax.custom_linear_solve(
            lambda x: lax.pmean(2 * x, "replica"), b, lambda _, y: y / 2, symmetric=True
        )

    program = lambda u, v: lax.cond(v[0] > 0, lambda: solve(u), lambda: u)  # noqa: E731
    assert set(problems(program)) == {"divergent_collective"}


def test_the_replica_id_may_be_read_by_some_replicas_only():
    assert (
        problems(
            lambda u, v: lax.cond(
                v[0] > 0, lambda: lax.axis_index("replica"), lambda: jnp.int32(0)
            )
        )
        == []
    )


def test_a_write_under_checkpoint_would_happen_twice():
    def program(u, v):
        count = jax.new_ref(jnp.zeros(()))

        def loss(w):
            count[...] = count[...] + 1
            return jnp.sin(w).sum()

        return jax.grad(jax.checkpoint(loss))(u), jax.ref.freeze(count)

    assert problems(program) == ["effect_under_checkpoint"]


def test_a_checkpointed_function_may_use_refs_of_its_own_and_read_others():
    def program(u, v):
        scale = jax.new_ref(jnp.ones(()))

        def loss(w):
            total = jax.new_ref(jnp.zeros(()))
            total[...] = total[...] + scale[...]
            return jnp.sin(w).sum() * jax.ref.freeze(total)

        return jax.checkpoint(loss)(u)

    assert problems(program) == []


def test_a_loops_predicate_must_not_use_what_the_loop_writes():
    def program(u, v):
        total = jax.new_ref(jnp.zeros(()))
        lax.while_loop(
            lambda i: total[...] < 3,
            lambda i: (jax.ref.addupdate(total, (), 1.0), i + 1)[1],
            0,
        )
        return jax.ref.freeze(total)

    assert problems(program) == ["ref_in_loop_predicate"]


def asserted(x, path="params['w']"):
    return jax.ad_checkpoint.checkpoint_name(x, ASSERT_MIRRORED + path)


@pytest.mark.parametrize(
    "around",
    [
        lambda f, x: f(x),
        lambda f, x: jax.jit(f)(x),
        lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        lambda f, x: lax.cond(True, f, lambda y: y, x),
        lambda f, x: jax.grad(lambda y: jnp.sin(f(y)).sum())(x),
        lambda f, x: jax.grad(jax.checkpoint(lambda y: jnp.sin(f(y)).sum()))(x),
        lambda f, x: jax.vmap(f)(x),
    ],
    ids=["plain", "jit", "scan", "cond", "grad", "remat", "vmap"],
)
def test_what_is_asserted_to_be_mirrored_must_not_vary(around):
    assert proof_of(lambda u, v: around(asserted, u)).problems == ()
    found = proof_of(lambda u, v: around(asserted, v)).problems
    assert {problem.kind for problem in found} == {"assert_mirrored"}
    message = found[0].message
    assert message.startswith(
        "params['w'] would differ between replicas: it depends on"
    )


def test_other_names_assert_nothing():
    name = jax.ad_checkpoint.checkpoint_name
    assert problems(lambda u, v: (name(v, "activations"), name(v, "replica"))) == []


def test_a_large_program_is_proved_quickly():
    def program(u, v):
        for _ in range(750):
            u = jnp.tanh(u) + v
        return u

    jaxpr = jax.make_jaxpr(program)(1.0, 2.0)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        prove(jaxpr, [False, True])
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05  # 1,500 equations; a few milliseconds at rest
