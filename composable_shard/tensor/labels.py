"""The names of units and parameters in messages."""

from __future__ import annotations

from typing import Any, NoReturn


class UnitLabel:
    """The name of a unit in messages, and its number.

    Attributes:
        name: Name of the unit, as seen from the outermost sharded module so far.
        number: Position among the units over the same ranks, in the order of `fully_shard` calls.
            It distinguishes units of one name; a copy of a unit has the same number.
        text: Name and number.
        first_call: Number of the collective that compared the unit, equal on all ranks; 0 if not
            known, as for a copy.
    """

    __slots__ = ("first_call", "name", "number", "text")

    def __init__(self, name: str, number: int = 0) -> None:
        self.number, self.first_call = number, 0
        self.rename(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitLabel, (self.name, self.number)

    def __str__(self) -> str:
        return self.text

    def rename(self, name: str) -> None:
        """Take another name."""
        self.name = name
        self.text = f"unit '{name}', number {self.number}"

    def set_number(self, number: int) -> None:
        """Take a number, which stays."""
        self.number = number
        self.rename(self.name)

    def set_first_call(self, number: int) -> None:
        """Note the number of the collective in which the ranks have compared the unit."""
        self.first_call = self.first_call or number


class ParamLabel:
    """The name of a parameter in messages.

    Mutable on purpose: an inner unit learns its full name only when an outer one is sharded. A
    parameter, its gradients and its optimizer state share one label.
    """

    __slots__ = ("fqn", "is_among_owned", "late_output", "refuses_gathers")

    def __init__(self, fqn: str, is_among_owned: bool = False) -> None:
        self.fqn = fqn
        self.is_among_owned = is_among_owned
        self.refuses_gathers = False
        self.late_output = ""  # what its unit's last forward returned that may read it later

    def rename(self, fqn: str) -> None:
        """Take another name."""
        self.fqn = fqn

    def set_among_owned(self, flag: bool = True) -> None:
        """Note whether one rank owns some parameters of its tree."""
        self.is_among_owned = flag

    def refuse_gathers(self, flag: bool) -> None:
        """Choose whether operations at rest that would gather raise."""
        self.refuses_gathers = flag

    def set_late_output(self, what: str) -> None:
        """Note what the last forward of its unit returned that may read it afterwards."""
        self.late_output = what

    @property
    def late_remedy(self) -> str:
        """What to do if that is what reads the parameter; empty if there is nothing."""
        what = self.late_output
        if not what:
            return ""
        return (
            f" The last forward of its unit returned {what}: if that reads the parameter, which it "
            "does after the forward, return results instead, as in list(...), or call unshard "
            "before that forward."
        )

    def refuse_gradient_node(self) -> NoReturn:
        """Raise: no graph reaches a node that accumulates the gradient."""
        raise RuntimeError(
            f"the node that accumulates the gradient of the sharded parameter '{self.fqn}' was "
            "asked for (torch.autograd.graph.get_gradient_edge, register_multi_grad_hook, or a "
            "backward that is split into inputs and weights), but forwards compute with its full "
            "values. Call unshard(module, recurse=True) before the forward, and reshard after the "
            "backward: the module's parameters are those of the graph in between."
        )

    def __repr__(self) -> str:
        return self.fqn
