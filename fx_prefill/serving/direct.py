"""A decoder traced once and called without Dynamo's guards in the way.

Note [What guards would have seen]

Dynamo's guards make sure that a call fits the graph. Here the caller is one class that always makes
the same call: the same arguments, whose only difference is the number of tokens. What is left to
watch is what the outside can change: weights are read off their modules at every call, and modules
have to be those that were traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..api import without_running
from ..backend import breakable_prefill
from ..errors import CaptureError, ServingError
from ..execution.dispatch import PrefillRuntime
from ..execution.reasons import Outdated
from ..graph.normalize import value_of
from ..graph.symbols import evaluate_scalar, expr_of
from ..graph.trace import Role
from ..opaque.calls import opaque_calls
from ..options import Options
from ..tracing import fresh_frame, mark_tokens, tracing_config


class DirectGraph:
    """One traced graph of a module, with where each of its arguments comes from."""

    def __init__(self, runtime: PrefillRuntime, args: Sequence[Any], module: nn.Module) -> None:
        self.runtime = runtime
        self._template = list(args)
        traced = runtime.compiled.plan.traced
        if traced.token_symbol is None:
            raise ServingError(
                f"{type(module).__name__} was traced for one token count only; "
                f"{runtime.refused or 'its forward depends on it'}"
            )
        places = _places(module)
        parts = [(m._modules, name) for m in module.modules() for name in m._modules]
        self._module_places = parts
        self._modules = [holder[name] for holder, name in parts]
        self._weights: list[tuple[int, dict[str, Any], str]] = []
        self._counts: list[tuple[int, Any]] = []
        self._token = traced.token_symbol
        for index, (node, role) in enumerate(zip(traced.placeholders, traced.roles, strict=True)):
            if role is Role.STATIC and id(args[index]) in places:
                self._weights.append((index, *places[id(args[index])]))
            elif role is Role.SCALAR and index not in traced.folded:
                self._counts.append((index, expr_of(value_of(node))))
        positions = [traced.position[node] for node in traced.live]
        self._live = {id(args[index]): index for index in positions}
        self._num_tokens = 0

    def indices(self, given: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Argument index of each tensor of the traced call, by the name it was given under.

        A tensor that the graph does not read has none.
        """
        live = self._live
        return {name: live[id(tensor)] for name, tensor in given.items() if id(tensor) in live}

    def arguments(self, num_tokens: int, live: Mapping[int, torch.Tensor]) -> list[Any]:
        """The graph's arguments for a number of tokens; ``live`` are tensors by index.

        Weights are those last seen; :meth:`refresh` reads them off their modules.
        """
        if num_tokens != self._num_tokens:
            for index, expr in self._counts:
                self._template[index] = evaluate_scalar(expr, {self._token: num_tokens})
            self._num_tokens = num_tokens
        args = self._template.copy()
        for index, tensor in live.items():
            args[index] = tensor
        return args

    def capture(self, bucket: int) -> None:
        """Capture one bucket. Raises CaptureError where it does not come about."""
        if not self.runtime.capture_bucket(self.refresh(self.arguments(bucket, {})), bucket):
            raise CaptureError(f"bucket {bucket} could not be captured")

    def refresh(self, args: list[Any]) -> list[Any]:
        """The arguments with the weights that the modules have now, kept for the next call.

        Raises Outdated where a module is not the one that was traced.
        """
        template = self._template
        try:
            now = [holder[name] for holder, name in self._module_places]
            if now != self._modules:  # modules are equal when they are the same
                raise Outdated
            for index, holder, name in self._weights:
                args[index] = template[index] = holder[name]
        except KeyError as error:
            raise Outdated from error
        return args


def trace_directly(
    call: Callable[..., Any],
    module: nn.Module,
    given: Mapping[str, Any],
    options: Options,
    rows: str,
) -> tuple[DirectGraph, tuple[int | str, ...]]:
    """Trace ``call(**given)``, which returns a tuple of tensors, into one graph, running nothing.

    ``given`` has rows of at least two tokens, under the name ``rows``. Also returns where the
    tuple's entries are among the results of the graph, by number, or among what is given, by name.
    Raises ServingError where tracing gives anything but one graph that makes them all.
    """
    made: list[tuple[Any, list[Any], Sequence[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = breakable_prefill(gm, example_inputs, options=options)
        pretend = without_running(gm, example_inputs)

        def note(*args: Any) -> Any:
            results = pretend(*args)
            made.append((graph, list(args), results))
            return results

        return note

    mark_tokens((), given, None)
    frame = fresh_frame(call)
    with tracing_config(), opaque_calls(), torch.no_grad():
        result = torch.compile(frame, backend=backend)(**given)
    torch._dynamo.reset_code(frame.__code__)
    if len(made) != 1:
        raise ServingError(
            f"{type(module).__name__} was traced into {len(made)} graphs; required: one. "
            "TORCH_LOGS=graph_breaks shows what cuts it"
        )
    graph, args, results = made.pop()  # PyTorch keeps the backend, and with it this list
    if not isinstance(graph, PrefillRuntime):
        raise ServingError(f"{type(module).__name__} cannot be replayed: {graph.reason}")
    wanted = given[rows].shape[:-1]
    if any(tensor.shape[:-1] != wanted for tensor in result):
        raise ServingError(
            f"{type(module).__name__} returns hidden states {[list(x.shape) for x in result]} for "
            f"rows {list(given[rows].shape)}; required: as many rows, in the same dimensions"
        )
    place: dict[int, int | str] = {id(tensor): name for name, tensor in given.items()}
    place.update({id(tensor): index for index, tensor in enumerate(results)})
    if not all(id(tensor) in place for tensor in result):
        raise ServingError(
            f"{type(module).__name__} returns something that its graph does not make; required: "
            "hidden states computed by the decoder"
        )
    return DirectGraph(graph, args, module), tuple(place[id(tensor)] for tensor in result)


def _places(module: nn.Module) -> dict[int, tuple[dict[str, Any], str]]:
    """Where each tensor that a module has is held, by its ``id``; registered or not."""
    found: dict[int, tuple[dict[str, Any], str]] = {}
    for inside in module.modules():
        for holder in (vars(inside), inside._parameters, inside._buffers):
            for name, tensor in holder.items():
                if isinstance(tensor, torch.Tensor):
                    found[id(tensor)] = (holder, name)
    return found
