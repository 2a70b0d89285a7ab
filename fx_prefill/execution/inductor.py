"""Inductor as a compiler of segments.

Note [Artifacts are shared with PyTorch's caches]

A standalone artifact keeps what it would put into a file to itself. It is handed on to the list of
the session, so that ``torch.compiler.save_cache_artifacts`` includes the segments, and another
process that loads them compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


def compile_standalone(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    dynamic_shapes: str,
    patches: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """An artifact for a module whose inputs look like ``inputs``.

    ``dynamic_shapes`` is ``"from_graph"`` for one that serves all sizes, ``"from_example_inputs"``
    for the sizes given. ``patches`` are settings of Inductor for this compile.
    """
    from torch._inductor import standalone_compile

    artifact = standalone_compile(
        module,
        list(inputs),
        dynamic_shapes=dynamic_shapes,  # type: ignore[arg-type]
        options={"config_patches": patches or {}},
    )
    _share(artifact)
    return artifact


def _share(artifact: Any) -> None:
    """Note [Artifacts are shared with PyTorch's caches]."""
    from torch.compiler._cache import CacheArtifactManager

    saved = getattr(artifact, "_artifacts", None)
    if saved is None:  # caches are off, or an operator has no cacheable form
        return
    for kind, items in (CacheArtifactManager.deserialize(saved[0]) or {}).items():
        for item in items:
            if item not in CacheArtifactManager._seen_artifacts:
                CacheArtifactManager._seen_artifacts.add(item)
                CacheArtifactManager._new_cache_artifacts[kind].append(item)
