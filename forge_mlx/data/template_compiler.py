"""Compiles templates to Python that reports to its environment what it repeats and what it makes."""

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame


class ReportingGenerator(CodeGenerator):
    """Compiles templates in which loops, macros, and texts put together report to the environment."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """Count the rounds of everything that can repeat."""
        parts: list[nodes.For | nodes.Macro | nodes.CallBlock]
        parts = [*node.find_all(nodes.For), *node.find_all(nodes.Macro), *node.find_all(nodes.CallBlock)]
        for part in parts:
            count = nodes.Call(nodes.EnvironmentAttribute("count_round"), [], [], None, None)
            part.body.insert(0, nodes.ExprStmt(count, lineno=part.lineno))
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`."""
        volatile = "(markup_join if context.eval_ctx.volatile else str_join)"
        joined = volatile if frame.eval_ctx.volatile else "markup_join" if frame.eval_ctx.autoescape else "str_join"
        self.write(f"environment.joined({joined}, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """`[a, b]`."""
        self._bounded(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """`{a: b}`."""
        self._bounded(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """`(a, b)`, unless it is what values are assigned to."""
        (self._bounded if node.ctx == "load" else self._plain)(super().visit_Tuple, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """`a[b:c]`, and what makes nothing: `a[b]`."""
        (self._bounded if isinstance(node.arg, nodes.Slice) else self._plain)(super().visit_Getitem, node, frame)

    def _bounded(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.bounded(")
        visit(node, frame)
        self.write(")")

    def _plain(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        visit(node, frame)
