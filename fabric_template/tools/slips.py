"""Slips: what is commonly wrong in a training loop's own lines: gradients, modes, losses; each only where that is sure."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from .sources import FUNCTIONS, LOOPS, Mistake, Source, Training, called, calls, receiver, text, within

# ---- gradients


def _never_cleared(source: Source) -> Iterator[Mistake]:
    """No zero_grad, nor anything that could be one."""
    for training in source.trainings:
        scope = source.scope(training.loop)
        if any(
            one.lineno in _lines(training.loop) for call in source.made.values() for one in call if one in _made(source)
        ):
            continue  # an optimizer of its own for each batch
        if "zero_grad" in source.code or re.search(
            r"\.grad\s*=|\.grad\.(zero_|data|detach)|autograd\.grad", source.code
        ):
            where = ast.unparse(scope)
            names = {*training.steps.values()}
            given = {text(one) for call in ast.walk(scope) if isinstance(call, ast.Call) for one in call.args}
            if "zero_grad" in where or ".grad" in where or names & given or any("." in name for name in names):
                continue
            if _helpers(source, training.loop, "zero_grad"):
                continue
        if not source.is_led and not any(calls(training.loop, "zero_", "zero_gradients", nested=False)):
            yield Mistake(
                training.backwards[0].lineno, "the gradients are never cleared: each step uses the sum of all before it",
                f"{next(iter(training.steps.values()))}.zero_grad() before backward",
            )  # fmt: skip


def _made(source: Source) -> set[ast.Call]:
    return {*source.optimizers.values()}


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _helpers(source: Source, node: ast.AST, name: str) -> bool:
    """Whether a function that is called there does it."""
    return any(isinstance(one, ast.Call) and called(one) == name for one in source.inlined(node))


def _cleared_too_early(source: Source) -> Iterator[Mistake]:
    """Cleared between backward and step, clipped after the step, or clipped as they are scaled."""
    for training in source.trainings:
        for block in _blocks(training.loop):
            place: dict[str, int] = {}
            for i, statement in enumerate(block):
                if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
                    continue
                call = statement.value
                name = called(call)
                if name == "backward":
                    place = {"backward": i}
                elif name == "zero_grad" and "backward" in place and "step" not in place:
                    place.setdefault(f"zero {receiver(call)}", i)
                elif stepped := source.step_of(call):
                    place["step"] = i
                    if f"zero {stepped}" in place:
                        line = block[place[f"zero {stepped}"]].lineno
                        yield Mistake(line, "the gradients are cleared before the optimizer has used them", (
                            f"{stepped}.zero_grad() before backward, or after {stepped}.step()"
                        ))  # fmt: skip
                elif name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm") and "step" in place:
                    yield Mistake(statement.lineno, "the gradients are clipped after the step that used them", (
                        f"{name} between backward and the optimizer's step"
                    ))  # fmt: skip


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for one in within(node):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(one, name, None)
            if isinstance(block, list) and block:
                yield block


def _clipped_scaled(source: Source) -> Iterator[Mistake]:
    if "unscale_" in source.code:
        return
    for training in source.trainings:
        scaled = [one for one in training.steps if "scaler" in receiver(one).lower()]
        for back in training.backwards if scaled else ():
            if not isinstance(back.func, ast.Attribute) or not calls(back.func.value, "scale"):
                continue
            statement = source.parents[back]
            block: list[ast.AST] = next(([*one] for one in _blocks(training.loop) if statement in one), [])
            for later in block[block.index(statement) + 1 :] if block else ():
                for clip in calls(later, "clip_grad_norm_", "clip_grad_value_", nested=False):
                    yield Mistake(clip.lineno, "the gradients are clipped while the GradScaler's factor is still in them", (
                        f"{receiver(scaled[0])}.unscale_({training.steps[scaled[0]]}) before it"
                    ))  # fmt: skip


def _not_divided(source: Source) -> Iterator[Mistake]:
    """Several batches for one step, and the loss is that of one."""
    for training in source.trainings:
        if source.frameworks or re.search(r"reduction\s*=\s*['\"]sum|size_average", source.code):
            continue
        for step, optimizer in training.steps.items():
            test = _every_so_many(source, step, training)
            if test is None:
                continue
            every = ast.unparse(test.right)
            branch = next(up for up in source.above(step) if isinstance(up, ast.If) and test in ast.walk(up.test))
            inside = {*within(branch)}
            others = [one for one, name in training.steps.items() if name == optimizer and one not in inside]
            clears = [one for one in calls(training.loop, "zero_grad", nested=False) if one not in inside]
            outside = [one for one in training.backwards if one not in inside and one.lineno < branch.lineno]
            if others or clears or not outside or len(outside) < len(training.backwards) or _divides(source, every):
                continue
            yield Mistake(outside[0].lineno, f"the gradients of {every} batches are added up and the loss is not divided", (
                f"({receiver(outside[0]) or 'loss'} / {every}).backward()"
            ))  # fmt: skip


def _every_so_many(source: Source, step: ast.Call, training: Training) -> ast.BinOp | None:
    """The remainder on which a step depends."""
    for up in source.above(step):
        if up is training.loop:
            break
        if isinstance(up, ast.If) and any(step is one for body in up.body for one in ast.walk(body)):
            found = [one for one in ast.walk(up.test) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)]
            if found:
                return found[0]
    return None


def _divides(source: Source, every: str) -> bool:
    """Whether anything is divided by that, or by something that sounds like it, or a mean is taken over it."""
    name = every.rpartition(".")[2]
    for node in ast.walk(source.tree):
        by = node.right if isinstance(node, ast.BinOp) else node.value if isinstance(node, ast.AugAssign) else None
        if by is not None and isinstance(getattr(node, "op", None), ast.Div | ast.Mult | ast.FloorDiv):
            said = ast.unparse(node)
            if name in said or re.search(r"accum|grad_?acc|micro", said, re.IGNORECASE):
                return True
    return False


# ---- modes


def _stays_in_eval(source: Source) -> Iterator[Mistake]:
    """eval() in the loop of epochs, and no train() anywhere."""
    if re.search(r"\.train\(", source.code) or not _has_modes(source):
        return
    loops = [node for node in ast.walk(source.tree) if isinstance(node, LOOPS)]
    for loop in loops:
        runs = source.inlined(loop)
        trained = [one for one in source.trainings if one.loop in runs and one.loop is not loop]
        evals = [
            one for one in runs if isinstance(one, ast.Call) and called(one) == "eval" and receiver(one) in source.nets
        ]
        net = receiver(evals[0]) if evals else ""
        is_new = any(call in runs for call in source.made.get(net, []))  # for each fold, say
        if trained and net and not is_new and not source.is_led and not _runs_only_at_the_end(source, evals[0], loop):
            what = "from the second epoch on it trains without dropout, and BatchNorm learns nothing"
            yield Mistake(evals[0].lineno, f"{net} is put into eval mode and never back: {what}", (
                f"{net}.train() at the beginning of each epoch"
            ))  # fmt: skip


def _has_modes(source: Source) -> bool:
    return bool(
        re.search(r"[dD]rop_?[oO]ut|[bB]atch_?[nN]orm|torchvision\.models|models\.\w+\(|from_pretrained", source.code)
    )


def _runs_only_at_the_end(source: Source, call: ast.Call, loop: ast.AST) -> bool:
    """Behind a condition, a break or a return: it may run once."""
    for up in source.above(call):
        if up is loop or isinstance(up, FUNCTIONS):
            return False
        if isinstance(up, ast.If):
            return True
    return False


def _graph_in_validation(source: Source) -> Iterator[Mistake]:
    """A validation that keeps the graph of each batch."""
    if source.frameworks or not source.trainings:
        return
    if re.search(r"no_grad|inference_mode|set_grad_enabled|enable_grad|autograd\.grad|requires_grad", source.code):
        return
    for call in calls(source.tree, "eval"):
        net, scope = receiver(call), source.scope(call)
        if net not in source.nets:
            continue
        for loop in within(scope):
            if not isinstance(loop, LOOPS) or loop.lineno < call.lineno or calls(loop, "backward"):
                continue
            forwards = [one for one in within(loop) if isinstance(one, ast.Call) and text(one.func) == net]
            again = [one.lineno for one in calls(scope, "train") if call.lineno < one.lineno < loop.lineno]
            if forwards and not again:
                yield Mistake(forwards[0].lineno, "the loop in eval mode keeps what backward would need, in memory and time", (
                    f"with torch.no_grad(): around the loop of line {loop.lineno}"
                ), is_advice=True)  # fmt: skip


# ---- losses


def _kept_graphs(source: Source) -> Iterator[Mistake]:
    """A sum or list of losses that holds each batch's graph."""
    for training in source.trainings:
        given = {name for name in training.losses if name.isidentifier()}
        for name in list(given):
            values = [node.value for node in within(training.loop) if isinstance(node, ast.Assign)
                      and name in map(text, node.targets)]  # fmt: skip
            if not values or any(
                re.search(r"\.(item|detach|data|cpu|numpy)\b|float\(", ast.unparse(one)) for one in values
            ):
                given.discard(name)
        for node in within(training.loop):
            where: ast.AST | None = None
            if (
                isinstance(node, ast.AugAssign)
                and isinstance(node.op, ast.Add)
                and text(node.target) not in training.losses
            ):
                where = node.value
            elif isinstance(node, ast.Call) and called(node) == "append" and len(node.args) == 1:
                where = node.args[0]
            name = _bare(where, given)
            target = (
                text(node.target)
                if isinstance(node, ast.AugAssign)
                else receiver(node)
                if isinstance(node, ast.Call)
                else ""
            )
            if name and target and not _goes_on(source, target, training):
                yield Mistake(node.lineno, f"{target} holds the graph of every batch: memory grows from step to step", (  # type: ignore[attr-defined]
                    f"{name}.detach() there, and .item() where it is printed"
                ))  # fmt: skip


def _bare(node: ast.AST | None, names: set[str]) -> str:
    """A loss as it is, or with a factor."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        return _bare(node.left, names) or _bare(node.right, names)
    return text(node) if text(node) in names else ""


def _goes_on(source: Source, name: str, training: Training) -> bool:
    """Whether something may be done with it that needs the graph, or that ends it in the same step."""
    for node in ast.walk(source.scope(training.loop)):
        if isinstance(node, ast.Call) and receiver(node) == name and called(node) in ("backward", "clear", "detach_"):
            return True
    inside = [
        node for node in within(training.loop) if isinstance(node, ast.Assign) and name in map(text, node.targets)
    ]
    return bool(inside)  # begun anew with each batch


def _softmax_twice(source: Source) -> Iterator[Mistake]:
    """What the loss does itself is done before it."""
    losses = {"cross_entropy": "softmax", "CrossEntropyLoss": "softmax", "binary_cross_entropy_with_logits": "sigmoid",
              "BCEWithLogitsLoss": "sigmoid"}  # fmt: skip
    criteria = {name: losses[kind] for kind in ("CrossEntropyLoss", "BCEWithLogitsLoss")
                for name in source.made_by(rf"(^|\.){kind}$")}  # fmt: skip
    for call in ast.walk(source.tree):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        does = criteria.get(text(call.func)) or (losses.get(called(call)) if called(call).islower() else None)
        if does is None:
            continue
        given = call.args[0]
        if isinstance(given, ast.Name):
            found = [node.value for node in within(source.scope(call)) if isinstance(node, ast.Assign)
                     and text(node.targets[0]) == given.id and node.lineno < call.lineno]  # fmt: skip
            given = found[-1] if len(found) == 1 else given
        if isinstance(given, ast.Call) and (_is_done(given, does) or _ends_in(source, given, does)):
            yield Mistake(call.lineno, f"{does} is done twice: {called(call)} does it itself", "give it the logits")


def _is_done(call: ast.Call, does: str) -> bool:
    if called(call) == does:
        return True
    return isinstance(call.func, ast.Call) and called(call.func) == does.capitalize()  # nn.Softmax(1)(x)


def _ends_in(source: Source, call: ast.Call, does: str) -> bool:
    """Whether it calls a net of the script whose last layer does it."""
    found = source.made.get(text(call.func), [])
    if len(found) != 1 or receiver(call):
        return False
    while len(found) == 1 and called(found[0]) in ("to", "cuda", "train") and isinstance(found[0].func, ast.Attribute):
        found = [found[0].func.value] if isinstance(found[0].func.value, ast.Call) else []
    if len(found) != 1:
        return False
    if called(found[0]) == "Sequential" and found[0].args:
        last = found[0].args[-1]
        return isinstance(last, ast.Call) and called(last) == does.capitalize()
    kinds = [one for one in ast.walk(source.tree) if isinstance(one, ast.ClassDef) and one.name == called(found[0])]
    forwards = [
        one for kind in kinds for one in kind.body if isinstance(one, ast.FunctionDef) and one.name == "forward"
    ]
    returns = [one.value for forward in forwards for one in within(forward) if isinstance(one, ast.Return)]
    return (
        len(kinds) == 1 and bool(returns) and all(isinstance(one, ast.Call) and _is_done(one, does) for one in returns)
    )


RULES: tuple[Callable[[Source], Iterator[Mistake]], ...] = (
    _never_cleared, _cleared_too_early, _clipped_scaled, _not_divided, _stays_in_eval, _graph_in_validation, _kept_graphs,
    _softmax_twice,
)  # fmt: skip
