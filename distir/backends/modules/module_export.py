"""A `torch.nn.Module` as an ONNX graph, by torch's exporter, in memory: `export_module`.

The graph has the module's parameters and buffers by name only; their values stay in the module. It is exported as it is
called, in training or eval mode, and not optimized: so each parameter is one tensor, and a tied one is one, too.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import io
import logging
import math
import operator
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from distir.backends.modules.module_weights import Counter
from distir.ir.errors import ModelError, ModelWarning, UsageError

BATCH = "batch"
"""The name of the batch dim, unless names are given."""
_SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
_CONSTANTS = (math.pi, math.log(2), math.log(10), 1 / 6, *_SELU, *[1 / p for p in (3, 5, 7)])
"""Numbers in what torch's exporter and the standard define functions by: logarithms, norms, activations (that of Selu:
Klambauer et al., "Self-Normalizing Neural Networks", 2017)."""
_RECURRENT = tuple([getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")])
_WITH_STATISTICS = torch.ops.aten._native_batch_norm_legit_functional, torch.ops.aten._batch_norm_with_update_functional
"""Batch norms that return new running statistics."""
_CONVERSIONS = torch.ops.aten.to, torch.ops.aten.type_as
_TORCH = Path(torch.__file__).parent
_OWN = "write what it does by torch's ops: h + (f(h) - h).detach() has the value of f(h) and the gradient of h"
_HINT = "a forward pass may not depend on the values of tensors: torch.where chooses between results"


class ExportedModule(NamedTuple):
    """`graph`: an onnx.ModelProto without the stored tensors, whose inputs have names for dims; `dims`: their sizes.

    `stored`: by name in the graph parameters and buffers, of which those in `trained` are trained; they are the
    module's own, not copies. `numbers`: by the float32 nearest to them, in which the graph has them, the numbers that
    the module multiplies, adds, ... in float64. `counters`: its buffers that count steps. `example`: computes in torch
    the example's inputs, by name, and outputs, in order; None where these are random, change buffers or have no data.
    """

    name: str
    graph: Any
    stored: dict[str, torch.Tensor]
    trained: list[str]
    dims: dict[str, int]
    numbers: dict[float, float]
    counters: list[Counter]
    example: Callable[[], tuple[dict[str, torch.Tensor], list[torch.Tensor]]] | None = None


class _Input(NamedTuple):
    """An example tensor, by the name of the parameter of `forward`; `dims`: names of some of its dims."""

    name: str
    tensor: torch.Tensor
    dims: dict[int, str]


def export_module(
    module: torch.nn.Module,
    example_inputs: Any,
    dims: Mapping[str, int] | None = None,
    dim_names: Mapping[str, Mapping[int, str]] | None = None,
) -> ExportedModule:
    """The module for example inputs, whose named dims have the sizes in `dims`, or else those of the example.

    `example_inputs`: a tensor, a tuple of positional arguments, or a mapping of keyword arguments, which may be nested.
    `dim_names`: by input, named dims; without them dim 0 of the first tensor, and of all of that size, is "batch".

    Outputs that are not tensors are left out. Their names: the keys and fields by which they are returned, joined by
    dots; a tensor alone is "loss" if it is one number of floating type, else "output".

    Raises UsageError if onnxscript is not installed, or inputs, dims or names do not fit; ModelError if torch cannot
    export the module, with what its exporter says and the line at fault.
    """
    name = type(module).__name__
    if importlib.util.find_spec("onnxscript") is None:
        message = f"{name} is a torch.nn.Module, which torch exports with onnxscript: it is not installed"
        raise UsageError(message, "pip install 'distir[modules]'")
    trainable = {k: x for k, x in module.named_parameters() if x.requires_grad}
    _check_apart(name, trainable)
    _check_hooks(module, trainable)
    arguments, inputs = _arguments(module, example_inputs, dim_names)
    sizes = _sizes(name, inputs, dims or {})
    resized = iter([_resized(x, sizes) for x in inputs])
    args, kwargs = pytree.tree_map(lambda x: next(resized) if isinstance(x, torch.Tensor) else x, arguments)
    with _quiet():
        with _flat_outputs(module) as outputs, _no_gradients_of_its_own(name):
            try:
                with redirect_stderr(io.StringIO()) as said, torch.enable_grad():  # on an error it prints the graph
                    program = torch.export.export(module, args, kwargs, strict=False)
            except ModelError:
                raise
            except Exception as e:  # whatever forward and the exporter raise
                raise _not_exported(name, e) from e
            sys.stderr.write(said.getvalue())
        _detach_without_grad(program)
        try:
            exported = _translated(program)
        except Exception as e:  # of many kinds
            raise _not_translated(name, e) from e
    if exported is None:
        raise RuntimeError("torch.onnx.export gave no program")
    stored = _named(exported.model.graph, [x.name for x in inputs], outputs, module)
    graph = exported.model_proto
    for info, x in zip(graph.graph.input, inputs, strict=True):
        for d, text in x.dims.items():
            info.type.tensor_type.shape.dim[d].dim_param = text
    trained = [k for k, x in stored.items() if isinstance(x, torch.nn.Parameter) and x.requires_grad]
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    given = {info.name: x for info, x in zip(graph.graph.input, tensors, strict=True)}
    decomposed: Any = exported.exported_program
    counters = _counters(module, decomposed)
    _check_state(module, decomposed, counters)
    changes = bool(decomposed.graph_signature.buffers_to_mutate)
    example = None if changes else _example(program, args, kwargs, given)
    return ExportedModule(name, graph, stored, trained, sizes, _numbers(decomposed), counters, example)


def _translated(program: Any) -> Any:
    """The program as an ONNX program. Attention with a trained bias has other strides where gradients are taken, or
    not, so that torch may not find the views of its result that it has made: where it fails, results are copied."""
    with torch.no_grad():
        try:
            return torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
        except Exception:  # of many kinds
            attention = torch.ops.aten.scaled_dot_product_attention.default
            found = [node for m in _graph_modules(program) for node in m.graph.nodes if node.target is attention]
            if not found:
                raise
        for node in found:
            _followed(node, torch.ops.aten.clone.default, memory_format=torch.contiguous_format)
        for m in _graph_modules(program):
            m.recompile()
        return torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)


def _graph_modules(program: Any) -> list[torch.fx.GraphModule]:
    """The graph of a program, and those inside its nodes."""
    return [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]


def _followed(node: torch.fx.Node, target: Any, **settings: Any) -> None:
    """Put an op that gives the same value after a node, in place."""
    with node.graph.inserting_after(node):
        new = node.graph.call_function(target, (node,), settings)
    new.meta = {**node.meta}
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def _example(
    program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, torch.Tensor]
) -> Callable[[], tuple[dict[str, torch.Tensor], list[torch.Tensor]]] | None:
    """See `ExportedModule`."""
    if any(_is_random(node) for m in _graph_modules(program) for node in m.graph.nodes):
        return None
    if any(x.is_meta for x in (*program.state_dict.values(), *given.values())):
        return None

    def compute() -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        with torch.no_grad():
            return given, program.module()(*args, **kwargs)

    return compute


def _is_random(node: torch.fx.Node) -> bool:
    """Whether a node draws numbers: dropout does not outside of training, nor attention without dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if node.target is torch.ops.aten.dropout.default:
        return bool(node.args[1]) and node.args[2] is True
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p"))
    if node.target in _RECURRENT:
        return bool(node.args[5]) and node.args[6] is True
    return True


def _arguments(
    module: torch.nn.Module, example: Any, dim_names: Mapping[str, Mapping[int, str]] | None
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[_Input]]:
    """Positional and keyword arguments of `forward`, and the tensors in them, in order."""
    signature, name = inspect.signature(module.forward), type(module).__name__
    single = isinstance(example, torch.Tensor) or not isinstance(example, tuple | list | Mapping)
    given = () if isinstance(example, Mapping) else (example,) if single else tuple(example)
    try:
        bound = signature.bind(*given, **(example if isinstance(example, Mapping) else {}))
    except TypeError as e:
        message = f"the example inputs do not fit {name}'s forward{signature}: {e}"
        raise UsageError(message, "a tuple has positional arguments, a dict those by name") from e
    named: dict[str, Any] = {}
    for key, parameter in signature.parameters.items():
        if key in bound.arguments:
            x = bound.arguments[key]
            named |= x if parameter.kind is parameter.VAR_KEYWORD else {key: x}
    leaves = [("_".join(map(_key, path)), x) for path, x in pytree.tree_flatten_with_path(named)[0]]
    found = [(key, x) for key, x in leaves if isinstance(x, torch.Tensor)]
    if not found:
        raise UsageError(f"the example inputs of {name} have no tensor")
    if dim_names is None:
        size = next((x.shape[0] for _, x in found if x.ndim), None)
        each = [{0: BATCH} if x.ndim and x.shape[0] == size else {} for _, x in found]
    else:
        known = dict(found)
        for key, row in dim_names.items():
            if key not in known:
                raise UsageError(f"dim_names: {name} has no input {key!r}", f"it has {', '.join(known)}")
            if bad := [d for d in row if not 0 <= d < known[key].ndim]:
                raise UsageError(f"dim_names: {key} of {name} has no dim {bad[0]}", f"it has {known[key].ndim} dims")
        each = [dict(dim_names.get(key, {})) for key, _ in found]
    inputs = [_Input(key, x, row) for (key, x), row in zip(found, each, strict=True)]
    return (bound.args, bound.kwargs), inputs


def _key(entry: Any) -> str:
    """A step of a path into nested arguments."""
    return str(next(getattr(entry, k) for k in ("key", "idx", "name") if hasattr(entry, k)))


def _sizes(name: str, inputs: list[_Input], given: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the named dims. Raises UsageError for names that are not there, or sizes that differ."""
    sizes: dict[str, int] = {}
    for x in inputs:
        for d, text in x.dims.items():
            if sizes.setdefault(text, x.tensor.shape[d]) != x.tensor.shape[d] and text not in given:
                raise UsageError(f"dim {text} of {name} is {sizes[text]} and, in {x.name}, {x.tensor.shape[d]}")
    for text, size in given.items():
        if text not in sizes:
            known = f"it has {', '.join(sizes) or 'none'}; dim_names={{{inputs[0].name!r}: {{0: {text!r}}}}} names one"
            raise UsageError(f"{name} has no symbolic dimension {text!r}", known)
        if size < 1:
            raise UsageError(f"dimension {text} must be at least 1, got {size}")
    return sizes | dict(given)


def _resized(x: _Input, sizes: Mapping[str, int]) -> torch.Tensor:
    """The tensor with its named dims repeated or cut to their sizes: only shapes matter, values must be valid."""
    result = x.tensor.detach()
    for d, text in x.dims.items():
        have, want = result.shape[d], sizes[text]
        if have == 0:
            raise UsageError(f"dim {d} of the example input {x.name} is empty")
        if have != want:
            result = result.index_select(d, torch.arange(want, device=result.device) % have)
    return result


@contextmanager
def _flat_outputs(module: torch.nn.Module) -> Iterator[list[str]]:
    """A context in which the module returns the tensors in its output as a list; gives their names, once called."""
    names: list[str] = []
    forward, own = module.forward, module.__dict__.get("forward")

    @functools.wraps(forward)  # with its signature, by which the exporter names inputs
    def flat(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for key, x in _tensors(forward(*args, **kwargs), ""):
            found.setdefault(id(x), (key, x))  # the same tensor twice is one output
        if not found:
            raise TypeError("forward returns no tensor")
        names[:] = [key for key, _ in found.values()]
        return [x for _, x in found.values()]

    module.forward = flat  # type: ignore[method-assign]
    try:
        yield names
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _tensors(x: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in an output, with their names."""
    if isinstance(x, torch.Tensor):
        yield name or ("loss" if x.ndim == 0 and x.dtype.is_floating_point else "output"), x
        return
    if isinstance(x, Mapping):
        parts = [(str(k), y) for k, y in x.items()]
    elif is_dataclass(x):
        parts = [(f.name, getattr(x, f.name)) for f in fields(x)]
    elif isinstance(x, tuple | list):
        parts = [*zip(getattr(x, "_fields", map(str, range(len(x)))), x, strict=True)]
        name = name if name or hasattr(x, "_fields") else "output"
    else:
        return
    for key, y in parts:
        yield from _tensors(y, f"{name}.{key}" if name else key)


def _named(graph: Any, inputs: list[str], outputs: list[str], module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name a graph's inputs, outputs and stored tensors, and take the latter out of it: they are returned.

    A parameter has its first name in the module, unless an input has it.
    """
    first: dict[int, str] = {id(p): k for k, p in module.named_parameters()}
    by_name: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    if len(graph.inputs) != len(inputs) or len(graph.outputs) < len(outputs):
        raise RuntimeError(f"the exported graph has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs")
    stored = [(value, key, value.const_value.raw) for key, value in graph.initializers.items()]
    graph.initializers.clear()  # they are serialized no more
    taken = {v.name for node in graph for v in node.outputs}
    own = {id(v) for v in (*graph.inputs, *[value for value, *_ in stored])}
    for value, name in zip(graph.inputs, inputs, strict=True):
        value.name = _unused(name, taken)
    found: dict[str, torch.Tensor] = {}
    for value, key, raw in stored:
        x: Any = by_name.get(key, raw)
        value.name = name = _unused(str(first.get(id(x), key)), taken)
        found[name] = x
    place = {key: k for k, key in enumerate(by_name)}
    found = dict(sorted(found.items(), key=lambda item: place.get(item[0], len(place))))
    del graph.outputs[: len(graph.outputs) - len(outputs)]  # new values of buffers, where torch returns them
    for value, name in zip(graph.outputs, outputs, strict=True):
        if id(value) not in own:
            own.add(id(value))
            value.name = _unused(name, taken)
    return found


def _counters(module: torch.nn.Module, program: Any) -> list[Counter]:
    """The buffers that the forward pass adds an integer to, such as the batches that a batch norm has seen."""
    nodes, signature = {node.name: node for node in program.graph.nodes}, program.graph_signature
    found = []
    for output, name in signature.buffers_to_mutate.items():
        node, each = nodes[output], 0
        while node.target is torch.ops.aten.add.Tensor and isinstance(node.args[1], int):
            node, each = node.args[0], each + node.args[1]
        if each and signature.inputs_to_buffers.get(node.name) == name:
            buffer = module.get_buffer(name)
            found.append(Counter(buffer, each, buffer.clone()))
    return found


def _check_state(module: torch.nn.Module, program: Any, counters: list[Counter]) -> None:
    """Raises ModelError for a parameter that forward changes. Warns (ModelWarning) of buffers other than batch norms'
    and `counters`: they stay as they are."""
    name, signature = type(module).__name__, program.graph_signature
    if changed := list(getattr(signature, "parameters_to_mutate", {}).values()):
        hint = "change it between steps, or compute with a changed copy"
        raise ModelError(f"{name}: forward changes the parameter {changed[0]}, which is not supported", hint)
    nodes, counted = {node.name: node for node in program.graph.nodes}, {id(counter.buffer) for counter in counters}
    left = [
        buffer
        for output, buffer in signature.buffers_to_mutate.items()
        if not _is_statistic(nodes[output]) and id(module.get_buffer(buffer)) not in counted
    ]
    if left:
        text = f"{name}: forward changes the buffer {', '.join(left)}: in training it stays as it is"
        warnings.warn(ModelWarning(text), stacklevel=3)


def _is_statistic(node: torch.fx.Node) -> bool:
    """Whether a batch norm returns it."""
    source = node.args[0] if node.target is operator.getitem else None
    return getattr(getattr(source, "target", None), "overloadpacket", None) in _WITH_STATISTICS


def _numbers(program: Any) -> dict[float, float]:
    """By the nearest float32 the numbers in the code of float64 results; those that share one are left out."""
    numbers: set[float] = set()
    wide = False
    for node in program.graph.nodes:
        if any(getattr(x, "dtype", None) is torch.float64 for x in pytree.tree_leaves(node.meta.get("val"))):
            numbers.update(x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, float))
            wide = True
    if not wide:
        return {}
    found: dict[float, set[float]] = {}
    for x in numbers.union(_CONSTANTS):
        found.setdefault(torch.tensor(x, dtype=torch.float32).item(), set()).add(x)
    return {near: min(several) for near, several in found.items() if len(several) == 1}


def _unused(name: str, taken: set[str]) -> str:
    """The name, with a number if it is taken; it is taken from now on."""
    k, found = 1, name
    while found in taken:
        found, k = f"{name}.{k}", k + 1
    taken.add(found)
    return found


def _check_apart(name: str, trained: Mapping[str, torch.Tensor]) -> None:
    """Raises ModelError for trained parameters that are different ones in the same memory: each would be updated."""
    seen: dict[tuple[Any, int], str] = {}
    for key, x in trained.items():
        if x.numel() and (other := seen.setdefault((x.device, x.data_ptr()), key)) != key:
            hint = "tie them as one Parameter: module.a.weight = module.b.weight"
            raise ModelError(f"{name}: parameters {other} and {key} are different but share memory", hint)


def _check_hooks(module: torch.nn.Module, trained: Mapping[str, torch.Tensor]) -> None:
    """Raises ModelError for hooks on gradients, which no exporter takes over."""
    hooked = [k for k, x in trained.items() if x._backward_hooks or getattr(x, "_post_accumulate_grad_hooks", None)]
    hooked += [k or "the module" for k, m in module.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    if hooked:
        raise ModelError(f"{type(module).__name__}: {hooked[0]} has a hook on gradients, which is not exported", _OWN)


@contextmanager
def _no_gradients_of_its_own(name: str) -> Iterator[None]:
    """A context in which a torch.autograd.Function is refused, and so is a hook: of both only the forward pass would be
    exported. What torch recomputes by such a Function is computed without it."""
    function, hook = torch.autograd.Function, torch.Tensor.register_hook
    apply = function.__dict__["apply"]

    def refused(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return args[0](*args[2:])
        if cls.__module__.startswith("torch."):
            return apply.__func__(cls, *args, **kwargs)
        raise ModelError(f"{name}: the gradient that {cls.__qualname__} defines is not exported", _OWN)

    def no_hook(*_: Any, **__: Any) -> Any:
        raise ModelError(f"{name}: a hook on a gradient is not exported", _OWN)

    function.apply = classmethod(refused)  # type: ignore[assignment]
    torch.Tensor.register_hook = no_hook  # type: ignore[assignment]
    try:
        yield
    finally:
        function.apply = apply
        torch.Tensor.register_hook = hook


def _detach_without_grad(program: Any) -> None:
    """Detach what is computed under torch.no_grad, in place: the exporter forgets that it was."""
    for m in _graph_modules(program):
        for node in list(m.graph.nodes):
            if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0]:
                continue
            inside: Any = getattr(m, str(node.args[1].target)).graph
            places = [x for x in inside.nodes if x.op == "placeholder"]
            returned = next(x for x in inside.nodes if x.op == "output").args[0]
            for result in [x for x in node.users if x.target is operator.getitem]:
                value = _itself(returned[result.args[1]])
                if value in places:  # the tensor that went in, to which gradients pass
                    result.replace_all_uses_with(node.args[2 + places.index(value)])
                    continue
                _followed(result, torch.ops.aten.detach.default)
        m.recompile()


def _itself(node: torch.fx.Node) -> torch.fx.Node:
    """The node without conversions to the type that it has already: in torch their result is the tensor itself."""
    while getattr(node.target, "overloadpacket", None) in _CONVERSIONS:
        source: Any = node.args[0]
        a, b = node.meta["val"], source.meta["val"]
        if (a.dtype, a.device, a.layout) != (b.dtype, b.device, b.layout):
            break
        node = source
    return node


def _not_exported(name: str, e: Exception) -> ModelError:
    """What `torch.export` says, and the line of the module's code that it says it of."""
    frames = traceback.extract_tb(e.__traceback__)
    here = [f for f in frames if not Path(f.filename).is_relative_to(_TORCH) and f.filename != __file__]
    where = f" ({Path(here[-1].filename).name}:{here[-1].lineno}: {here[-1].line})" if here else ""
    depends = "data-dependent" in str(e) or "DataDependent" in type(e).__name__
    hint = _HINT if depends else "do the example inputs fit its forward?"
    return ModelError(f"{name}: torch.export cannot export it: {_line(e)}{where}", hint)


def _not_translated(name: str, e: Exception) -> ModelError:
    """What torch's ONNX exporter says: the node, and the first cause."""
    texts, cause = [], e
    while cause is not None:
        texts.append(_line(cause))
        cause = cause.__cause__
    node = next((t.partition("node ")[2].partition(" ")[0] for t in texts if "translating node" in t), "")
    at = f" node {node}" if node else " it"
    return ModelError(f"{name}: torch.onnx.export cannot translate{at}: {texts[-1]}")


def _line(e: BaseException) -> str:
    """The first line of a message."""
    lines = str(e).strip().splitlines()
    return lines[0].strip() if lines else type(e).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without the exporter's notes on optional packages, deprecations, and what it has tried."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
