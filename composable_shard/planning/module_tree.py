"""`ModuleTree`: the modules of a model, from the inside out."""

from __future__ import annotations

from torch import nn

from composable_shard.torch_private import modules_of


class ModuleTree:
    """The modules of a model, each once, in an order in which they can be made units."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        # Maps every module to its FQNs, several where it is shared; the root's is "". A module
        # comes after all modules inside it, the root last.
        self.fqns: dict[nn.Module, list[str]] = {}
        self._visit(root, "", [], {})

    def _visit(
        self, module: nn.Module, fqn: str, path: list[nn.Module], found: dict[nn.Module, list[str]]
    ) -> None:
        if any(module is outer for outer in path):
            return  # a cycle; `named_modules_in` follows it once, too
        found.setdefault(module, []).append(fqn)
        for name, child in modules_of(module).items():
            if child is not None:
                self._visit(child, f"{fqn}.{name}".lstrip("."), [*path, module], found)
        # Share the list with `found`, so that names found later are in it.
        self.fqns.setdefault(module, found[module])

    def fqn(self, module: nn.Module) -> str:
        """Return the first FQN of `module`, the one in `named_modules_in`."""
        return self.fqns[module][0]

    def describe(self, module: nn.Module) -> str:
        """Return the FQN and class of `module`, for messages."""
        kind = type(module).__name__
        return (
            f"'{self.fqn(module)}' ({kind})" if module is not self.root else f"the model ({kind})"
        )
