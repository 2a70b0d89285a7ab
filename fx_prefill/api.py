"""The helper around the backend: compile in place, explain, report, warm up."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from .backend import breakable_prefill, build_plan, registry
from .errors import NotCompiledError, OptionError
from .execution.dispatch import PrefillRuntime, whole_ladder
from .graph.normalize import value_of
from .graph.symbols import evaluate_scalar, evaluate_sizes, expr_of, size_exprs
from .graph.trace import trace
from .integrations.transformers import LIVE_ATTENTION
from .opaque.calls import opaque_calls
from .opaque.install import OpaqueModules, installed
from .options import Options, parse_options
from .reporting.explain import (
    GraphReport,
    Report,
    describe_plan,
    describe_refused,
    describe_runtime,
    hints_of,
)
from .reporting.registry import Graph
from .reporting.traps import LengthWatch
from .tracing import fresh_frame, mark_tokens, parameter_names, tracing_config

log = logging.getLogger(__name__)

OPTION_NAMES = frozenset({"options", *(field.name for field in fields(Options))})
NOT_REACHED = "PyTorch called no graph of this backend"


class CompiledPrefill:
    """A model compiled by :func:`compile`; call it, or the module itself.

    A module is compiled in place: ``module(...)`` runs compiled, ``module.forward(...)`` does not.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        options: Mapping[str, Any],
        token_dims: Mapping[str | int, int] | None,
        module_guards: bool = True,
        break_modules: Any = (),
    ) -> None:
        self.module = target
        self.options: Options = parse_options(options)
        self._opaque = OpaqueModules.install(target, break_modules)
        self._token_dims = token_dims
        self._call = target._call_impl if isinstance(target, torch.nn.Module) else target
        self._names = parameter_names(_signature_of(target))
        self._frame = fresh_frame(self._call)
        self._graphs: list[weakref.ref[Graph]] = []
        self._watch = LengthWatch()
        self._reached = threading.local()
        self._num_unreached = 0
        self._undone = False
        given = dict(options)
        if not module_guards:
            given["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
        self._compiled = torch.compile(self._frame, backend=self._backend(), options=given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._undone:
            raise NotCompiledError("undo() gave this model back; call fx_prefill.compile again")
        mark_tokens(args, kwargs, self._token_dims, self._names)
        self._reached.graph = False
        with tracing_config(), opaque_calls():
            result = self._compiled(*args, **kwargs)
        if not self._reached.graph:
            self._note_unreached()
        return result

    def _backend(self) -> Callable[..., Any]:
        """The backend, noting each graph it makes and whether a call reaches one."""

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Any:
            graph = breakable_prefill(gm, example_inputs, **given)
            self._graphs.append(weakref.ref(graph))
            self._watch.see(graph, self.options)
            reached = self._reached

            def run(*args: Any) -> Any:
                reached.graph = True
                return graph(*args)

            return run

        backend.__name__ = breakable_prefill.__name__  # what PyTorch calls it in its errors
        backend.reset = breakable_prefill.reset  # type: ignore[attr-defined]
        return backend

    def _note_unreached(self) -> None:
        """Count a call that PyTorch ran without any graph of ours, and say so the first time."""
        self._num_unreached += 1
        if self._num_unreached > 1:
            return
        limit = torch._dynamo.config.recompile_limit
        if len(self._graphs) >= limit:
            log.warning(
                "%d graphs of this model were traced, PyTorch's limit: calls that fit none of them "
                "run eagerly from now on. TORCH_LOGS=recompiles shows what differs between calls; "
                "keep it fixed, or raise torch._dynamo.config.recompile_limit",
                len(self._graphs),
            )
        else:
            log.warning("a call ran eagerly: %s", NOT_REACHED)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs traced so far that are alive, oldest first; what Dynamo calls."""
        graphs = [ref() for ref in self._graphs]
        return tuple(graph for graph in graphs if graph is not None)

    def report(self) -> Report:
        """What was planned and what ran so far."""
        report = _describe(self.graphs)
        if not self._num_unreached:
            return report
        unreached = GraphReport(refused=NOT_REACHED, fallbacks={NOT_REACHED: self._num_unreached})
        return Report((*report.graphs, unreached))

    def warmup(self, *args: Any, **kwargs: Any) -> Report:
        """Run one forward with these arguments and capture every bucket of its graph.

        Without arguments, capture what earlier calls queued (``capture="queued"``).
        """
        _refuse_stray_options("warmup", self, kwargs)
        if not args and not kwargs:
            for graph in self.graphs:
                if isinstance(graph, PrefillRuntime):
                    graph.capture_queued()
            return self.report()
        with whole_ladder(), torch.no_grad():
            self(*args, **kwargs)
        return self.report()

    def undo(self) -> None:
        """Give the module back as it was; its compiled graphs are dropped, this handle is done."""
        self._undone = True
        self._opaque.restore()
        if isinstance(self.module, torch.nn.Module):
            self.module._compiled_call_impl = None
        torch._dynamo.reset_code(self._frame.__code__)


def compile(
    model: Callable[..., Any],
    *,
    token_dims: Mapping[str | int, int] | None = None,
    module_guards: bool = True,
    break_modules: Any = (),
    **options: Any,
) -> CompiledPrefill:
    """Compile a model the recommended way: one trace for all lengths, in place for a module.

    ``options`` are those of the backend (see the README). ``token_dims`` names the token dimension
    of inputs by argument name or position where the default rule of
    :func:`fx_prefill.tracing.mark_tokens` does not find it. ``module_guards=False`` takes your word
    that no attribute of the module changes between calls (its weights are checked all the same):
    PyTorch then looks at the inputs alone. ``break_modules`` names modules that run eagerly as a
    whole, untraced: classes, qualified class names, predicates on a module, or
    :class:`BreakModule`, besides those of a built-in table; None for none at all. Raises
    OptionError for bad options.
    """
    if isinstance(model, CompiledPrefill):
        raise TypeError("this model is compiled already; call undo() on it first")
    _check_callable(model)
    if isinstance(model, torch.nn.Module) and model._compiled_call_impl is not None:
        raise TypeError(
            f"{type(model).__name__} is compiled already, by fx_prefill.compile or module.compile; "
            "undo that first"
        )
    _check_own_attention(model)
    if not isinstance(module_guards, bool):
        raise OptionError(f"module_guards is {module_guards!r}; accepted: True or False")
    _check_token_dims(model, token_dims)
    compiled = CompiledPrefill(model, options, token_dims, module_guards, break_modules)
    if isinstance(model, torch.nn.Module):
        model._compiled_call_impl = compiled
    return compiled


def _check_own_attention(model: Any) -> None:
    config = getattr(model, "config", None)
    now = getattr(config, "_attn_implementation", None)
    if now == LIVE_ATTENTION and hasattr(model, "set_attn_implementation"):
        raise TypeError(
            f"a PrefillGraph has switched the attention of {type(model).__name__} to that of its "
            "contexts, and a call without one cannot attend; call that graph, or close() it first"
        )


def _check_token_dims(model: Any, token_dims: Mapping[str | int, int] | None) -> None:
    if token_dims is None:
        return
    accepted = "a mapping of argument names or positions to the dimension that counts tokens"
    if not isinstance(token_dims, Mapping):
        raise OptionError(f"token_dims is {token_dims!r}; accepted: {accepted}")
    for name, dim in token_dims.items():
        if not isinstance(name, (str, int)) or not isinstance(dim, int) or isinstance(dim, bool):
            raise OptionError(f"token_dims maps {name!r} to {dim!r}; accepted: {accepted}")
    try:
        parameters = inspect.signature(_signature_of(model)).parameters
    except (TypeError, ValueError):  # a callable that hides what it takes
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = [name for name in token_dims if isinstance(name, str) and name not in parameters]
    if unknown:
        raise OptionError(
            f"token_dims names {', '.join(map(repr, unknown))}; {type(model).__name__} takes "
            f"{', '.join(parameters)}"
        )


def report(compiled: Any) -> Report:
    """What was planned and what ran, for anything compiled with this backend.

    Takes what :func:`compile` or ``torch.compile`` returned, the module itself, or a PrefillGraph.
    Raises NotCompiledError when no graph of it is known.
    """
    if not isinstance(compiled, torch.nn.Module) and hasattr(compiled, "report"):
        return compiled.report()
    module = getattr(compiled, "_orig_mod", compiled)
    if isinstance(getattr(module, "_compiled_call_impl", None), CompiledPrefill):
        return module._compiled_call_impl.report()
    if not isinstance(module, torch.nn.Module):
        raise NotCompiledError(
            f"a report needs the module that was compiled, not a {type(module).__name__}: only "
            "its weights tell which graphs are its own"
        )
    tensors = [*module.parameters(), *module.buffers()]
    graphs = registry.find(tensors)
    if not graphs:
        raise NotCompiledError(
            f"no graph of this {type(module).__name__} was compiled by breakable_prefill yet: "
            "compile it and call it once. (torch.compile(model).generate(...) calls the original "
            "module; compile in place, with fx_prefill.compile(model) or model.compile(...))"
        )
    return _describe(graphs)


def _describe(graphs: Sequence[Graph]) -> Report:
    return Report(
        tuple(
            describe_runtime(graph, hints_of(graph.compiled.plan))
            if isinstance(graph, PrefillRuntime)
            else describe_refused(graph)
            for graph in graphs
        )
    )


def warmup(compiled: Any, *args: Any, **kwargs: Any) -> Report:
    """Capture every bucket ahead of traffic; the arguments are those of one forward.

    Takes what :func:`compile` returned, or the module it compiled. Raises NotCompiledError for
    anything else.
    """
    if not isinstance(compiled, CompiledPrefill):
        inside = getattr(compiled, "_compiled_call_impl", None)
        if not isinstance(inside, CompiledPrefill):
            if hasattr(compiled, "warmup"):
                raise NotCompiledError(
                    f"a {type(compiled).__name__} has a warmup() of its own: call that"
                )
            raise NotCompiledError(
                f"a {type(compiled).__name__} that fx_prefill.compile did not compile cannot be "
                "warmed up; with torch.compile, use the option capture='all' and call it once"
            )
        compiled = inside
    return compiled.warmup(*args, **kwargs)


def explain(
    model: Any,
    *args: Any,
    prefill_options: Mapping[str, Any] | None = None,
    token_dims: Mapping[str | int, int] | None = None,
    break_modules: Any = (),
    **kwargs: Any,
) -> Report:
    """Trace and partition a model for these inputs without running it.

    Works on the meta device: no weight is read. ``prefill_options`` are those of the backend;
    ``break_modules`` as in :func:`compile`, a few of which may be run on a few rows of zeros. What
    :func:`compile` returned has both already. Containers among the arguments (a KV cache) are
    copied, so that tracing leaves them alone. Raises OptionError for bad options.
    """
    _check_callable(model)
    _refuse_stray_options("explain", model, kwargs)
    if isinstance(model, CompiledPrefill):
        _refuse_new_options(prefill_options, break_modules)
        options, call = model.options, model._call
    else:
        options = parse_options(prefill_options)
        call = model._call_impl if isinstance(model, torch.nn.Module) else model
    graphs: list[GraphReport] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        plan = build_plan(gm, example_inputs, options)
        graphs.append(describe_plan(plan, options, hints_of(plan)))
        return without_running(gm, example_inputs)

    args, kwargs = _copy_containers(args), _copy_containers(kwargs)
    names = parameter_names(_signature_of(_module_of(model)))
    mark_tokens(args, kwargs, token_dims, names)
    frame = fresh_frame(call)
    opaque = () if isinstance(model, CompiledPrefill) else break_modules
    with installed(_module_of(model), opaque), tracing_config(), opaque_calls(), torch.no_grad():
        torch.compile(frame, backend=backend)(*args, **kwargs)
    torch._dynamo.reset_code(frame.__code__)
    return Report(tuple(graphs))


def _check_callable(model: Any) -> None:
    if not callable(model):
        # A PrefillGraph among others, which is asked itself.
        own = "; its own report() says what it is made of" if hasattr(model, "report") else ""
        raise TypeError(f"expected a module or a function, got {type(model).__name__}{own}")


def _refuse_stray_options(door: str, model: Any, kwargs: Mapping[str, Any]) -> None:
    """Options among the arguments of a model, where one with ``**kwargs`` would swallow them."""
    target = _module_of(model)
    try:
        named = inspect.signature(_signature_of(target)).parameters
    except (TypeError, ValueError):  # a callable that hides what it takes
        return
    stray = [name for name in kwargs if name in OPTION_NAMES and name not in named]
    if stray:
        compiled = isinstance(model, CompiledPrefill)
        place = "give it to fx_prefill.compile" if compiled else "pass prefill_options={...}"
        raise OptionError(
            f"{door}() got {stray[0]}=, an option of the backend, among the arguments of "
            f"{_name_of(target)}; {place}. (An argument of the model that is called like that has "
            "to be named in its forward)"
        )


def _refuse_new_options(prefill_options: Any, break_modules: Any) -> None:
    if prefill_options is not None or break_modules != ():
        name = "break_modules" if prefill_options is None else "prefill_options"
        raise OptionError(
            f"explain() got {name}= for a model that is compiled already, with options of its own; "
            "leave it out, or explain the module itself"
        )


def _name_of(target: Any) -> str:
    return getattr(target, "__name__", type(target).__name__)


def _signature_of(model: Any) -> Callable[..., Any]:
    return model.forward if isinstance(model, torch.nn.Module) else model


def _module_of(model: Any) -> Any:
    return model.module if isinstance(model, CompiledPrefill) else model


def _copy_containers(value: Any) -> Any:
    """A deep copy in which every tensor is the same tensor."""
    memo: dict[int, Any] = {}
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            memo[id(leaf)] = leaf
    return copy.deepcopy(value, memo)


def without_running(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """What stands in for a graph while tracing: results of the right shapes, nothing computed."""
    traced = trace(gm, example_inputs)
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    positions = {node: index for index, node in enumerate(placeholders)}
    leaves, spec = tree_flatten(output.args[0])

    def results(*args: Any) -> Any:
        bindings = traced.symbol_values(args)

        def make(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            if leaf in positions:
                return args[positions[leaf]]
            value = value_of(leaf)
            if isinstance(value, torch.Tensor):
                sizes = evaluate_sizes(size_exprs(value), bindings)
                return torch.zeros(sizes, dtype=value.dtype, device=value.device)
            return evaluate_scalar(expr_of(value), bindings)

        return tree_unflatten([make(leaf) for leaf in leaves], spec)

    return results
