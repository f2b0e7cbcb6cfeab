"""What FSDP2's `dp_mesh_dims` and `shard_placement_fn` say about meshes of several axes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard.construct import PlainPart
from composable_shard.options import Granularity
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import mesh_of_axes


def split_mesh(
    mesh: DeviceMesh | None,
    dims: Any,
    modules: Sequence[nn.Module],
    left_out: Container[nn.Parameter],
) -> tuple[DeviceMesh, dict[nn.Parameter, PlainPart]]:
    """Return the axes that `dp_mesh_dims` names, and how parameters lie on the others.

    Several axes of a kind become one. What plain tensors are on the other axes is said by
    annotations of the library spmd_types; DTensors say it themselves.

    Raises:
        ValueError: Without a mesh; for incomplete annotations.
        NotImplementedError: For a DTensor on axes of data parallelism, and for a plain tensor that
            no annotation says to be a part or the same on the other axes.
    """
    if mesh is None:
        raise ValueError(f"{dims!r} names axes of a mesh. Pass mesh= too.")
    given = [each for each in (dims.replicate, dims.shard) if each is not None]
    axes = [(each,) if isinstance(each, str) else tuple(each) for each in given]
    chosen = {name for names in axes for name in names}
    others = [name for name in mesh.mesh_dim_names or () if name not in chosen]
    others = [name for name in others if mesh[name].size() > 1]
    parts = {}
    for name, param in (item for module in modules for item in module.named_parameters()):
        if param in left_out:  # ignored, or on a mesh of its own
            continue
        own = getattr(param, "device_mesh", None)
        if own is not None and chosen & set(own.mesh_dim_names or ()):
            raise NotImplementedError(
                f"parameter '{name}' is a DTensor on {own}, axes of data parallelism included. "
                'Distribute it over the others alone, as parallelize_module does with mesh["tp"].'
            )
        if own is None and others and not isinstance(param, FlatShard):
            parts[param] = _part(name, param, mesh, others)
    return mesh_of_axes(mesh, axes), parts


def _part(name: str, param: nn.Parameter, mesh: DeviceMesh, others: list[str]) -> PlainPart:
    """Return how an annotated parameter lies on the other axes."""
    library = sys.modules.get("spmd_types")  # else nothing is annotated
    types: dict[Any, Any] = {} if library is None else _annotations(library, param)
    if library is None or not types:
        raise NotImplementedError(
            f"parameter '{name}' is a plain tensor, and the mesh has the axes {others}, on "
            "which it may be a part: state dicts and norms would take it for the whole. "
            "Distribute it over them as a DTensor, as parallelize_module does; or pass the "
            "axes of data parallelism alone as mesh=, if it is the same on all of them."
        )
    along = {library.MeshAxis.of(mesh.get_group(axis)): axis for axis in others}
    placed = {along[axis]: kind for axis, kind in types.items() if axis in along}
    averaged = {axis: kind for axis, kind in types.items() if axis not in along}
    if missing := [axis for axis in others if axis not in placed]:
        raise ValueError(
            f"parameter '{name}' is annotated on {sorted(placed)} and not on {missing}. Annotate "
            "it on every axis that is not in dp_mesh_dims, by spmd_types.assert_type."
        )
    if wrong := {axis: kind for axis, kind in averaged.items() if kind is not library.R}:
        raise ValueError(
            f"parameter '{name}' is annotated with {wrong}, on axes of data parallelism. Annotate "
            "it with spmd_types.R there: fully_shard reduces its gradients."
        )
    kinds = [placed[axis] for axis in others]
    placement = library.spmd_type_to_dtensor_placement
    return PlainPart(
        mesh[tuple(others)],
        tuple(placement(kind) for kind in kinds),
        tuple(placement(kind.backward_type()) for kind in kinds),
    )


def _annotations(library: Any, param: nn.Parameter) -> dict[Any, Any]:
    """Return the annotation of a parameter on each axis; of a partition, as shards."""
    types = dict(library.get_local_type(param))
    partition = library.runtime.get_partition_spec(param)
    if partition is not None:
        types.update(library.types.partition_spec_to_shard_types(partition))
    return types


class PlacedParams:
    """What a `shard_placement_fn` says of parameters that are not sharded yet.

    Args:
        place: The function. What it returns is a placement, or one with a mesh.
        mesh: The mesh that `fully_shard` was called with.
    """

    def __init__(self, place: Callable[[nn.Parameter], Any], mesh: DeviceMesh | None) -> None:
        self._place, self._mesh = place, mesh

    def placement(self, param: nn.Parameter) -> Any:
        """Return a parameter's placement, without a mesh."""
        placement = self._place(param)
        return getattr(placement, "placement", placement)

    def granularity(self, param: nn.Parameter) -> Granularity:
        """Return the granularity nearest to a parameter's placement."""
        placement = self.placement(param)
        if placement is None:
            return "element"
        if not -param.ndim <= placement.dim < param.ndim:
            raise ValueError(
                f"shard_placement_fn returned {placement!r} for a parameter of shape "
                f"{tuple(param.shape)}. Return a dim that it has, or None."
            )
        return "row" if placement.dim % param.ndim == 0 else "element"

    def modules_on_other_meshes(
        self, modules: Iterable[nn.Module]
    ) -> list[tuple[Any, list[nn.Module]]]:
        """Return torch's `mesh_info` of each other mesh, and the modules all of which is on it.

        Raises:
            NotImplementedError: If a module has parameters of its own on several meshes.
        """
        found: dict[DeviceMesh, tuple[Any, list[nn.Module]]] = {}
        for info, module in self._outermost(modules):
            found.setdefault(mesh_of(info), (info, []))[1].append(module)
        return [*found.values()]

    def _outermost(self, modules: Iterable[nn.Module]) -> Iterator[tuple[Any, nn.Module]]:
        for module in modules:
            infos = [self._other_mesh(param) for param in module.parameters()]
            if not any(infos):
                continue
            if all(infos) and all(mesh_of(info) == mesh_of(infos[0]) for info in infos):
                yield infos[0], module
                continue
            for name, param in module.named_parameters(recurse=False):
                if self._other_mesh(param):
                    raise NotImplementedError(
                        f"shard_placement_fn returned a mesh for parameter '{name}' of a "
                        f"{type(module).__name__} that others of its parameters are not on. Put "
                        "it into a module of its own, whose forward uses it, as experts are."
                    )
            yield from self._outermost(module.children())

    def _other_mesh(self, param: nn.Parameter) -> Any | None:
        if isinstance(param, FlatShard):
            return None
        info = getattr(self._place(param), "mesh_info", None)
        return None if info is None or mesh_of(info) == self._mesh else info


def mesh_of(info: Any) -> DeviceMesh:
    """Return the mesh that torch made a `mesh_info` of."""
    mesh: DeviceMesh = getattr(info, "spmd_mesh", None) or info.mesh
    return mesh
