"""Records the signatures of a line of TensorRT-LLM, as facts without code.

``python -m tests.contract_host.record --texts DIR --line 1.2 --output lines/1.2.json``

``DIR/LINE/`` holds source files at their paths in the repository (``tensorrt_llm/...``), or
skeletons of them, and ``sources.json``: path to ``{"commit", "id", "note"}``. Without that file
``--commit`` names the commit of a checkout. ``line.json``, where there is one, holds
``transcribed`` (true: copied by hand from the texts that ``sources.json`` names), ``pins``
(distribution to version specifier) and ``note``.

Only facts are written: names, parameters, defaults, annotations, fields, enum members, bases,
imports by value, calls of our pieces. Bodies, docstrings and descriptions of fields never reach
the result.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.contract_host.signatures import (
    Call,
    Class,
    Field,
    Function,
    Import,
    KeyList,
    Line,
    Module,
    Parameter,
    to_json,
)

PACKAGE = "tensorrt_llm"

# calls that are recorded: the function's last name, and what the text before it has to contain
CALLS = {
    "get_spec_metadata": "",
    "get_spec_resource_manager": "",
    "get_spec_decoder": "",
    "get_spec_worker": "",
    "get_spec_drafter": "",
    "get_draft_model": "",
    "update_spec_config_from_model_config": "",
    "sample_async": "sampler",
    "update_requests": "sampler",
    "setup_sampler_step": "sampler",
    "get_cache_indirection": "sampler",
    "beam_width": "sampler",
    "is_generation_model": "sampler",
    "should_provide_draft_probs": "sampler",
    "validate_request": "sampler",
    "SampleState": "sampler",
    "spec_worker": "",
    "_forward_impl": "self",
    "skip_forward": "",
    "skip_drafting": "",
    "set_guided_decoder": "worker",
    "set_draft_model": "worker",
    "prepare_resources": "resource_manager",
    "update_resources": "resource_manager",
    "free_resources": "resource_manager",
    "add_dummy_requests": "spec_resource_manager",
    "get_max_resource_count": "resource_manager",
    "get_needed_resource_to_completion": "resource_manager",
    "prepare": "spec_metadata",
    "dp_num_tokens": "spec_metadata",
    "create_cuda_graph_metadata": "metadata",
    "is_layer_capture": "spec_metadata",
    "maybe_capture_hidden_states": "spec_metadata",
    "populate_sampling_params_for_one_model": "spec_metadata",
    "update_is_all_greedy_sample": "spec_metadata",
    "MTPWorker": "",
    "MTPEagleWorker": "",
    "MTPEagleDynamicTreeWorker": "",
    "Eagle3OneModelWorker": "",
    "MTPHiddenStatesManager": "",
    "Eagle3ResourceManager": "",
    "MTPSpecMetadata": "",
    "Eagle3OneModelSpecMetadata": "",
    "MTPSampler": "",
    "Eagle3OneModelSampler": "",
    "SpecSampler": "",
    "SampleStateMTP": "",
    "SampleStateSpec": "",
    "MTPForCausalLM": "",
}

ROLES = {
    "staticmethod": "static",
    "classmethod": "class",
    "property": "property",
    "abstractproperty": "property",
    "cached_property": "cached_property",
}
# decorators kept by their text, without documentation
KEPT_DECORATORS = {
    "register_auto_model",
    "register_draft_model",
    "field_validator",
    "model_validator",
    "runtime_checkable",
}
FIELD_CALLS = {"Field", "PydanticField", "field", "PrivateAttr"}
# keywords of a field that say what it is; its description is the package's own text
FIELD_OPTIONS = {"alias", "validation_alias", "status", "init", "repr", "kw_only", "exclude"}
ENUMS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}


def record_line(texts: Path, line: str, commit: str | None = None) -> Line:
    """All that ``texts/LINE`` contains.

    Raises ValueError for a file of which ``sources.json`` says nothing.
    """
    folder = texts / line
    listed = folder / "sources.json"
    sources: dict[str, dict[str, str | None]] = (
        json.loads(listed.read_text()) if listed.exists() else {}
    )
    about = folder / "line.json"
    result = Line(line, **(json.loads(about.read_text()) if about.exists() else {}))
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder).as_posix()
        if file.suffix not in (".py", ".yaml"):
            continue
        if path not in sources and commit is None:
            raise ValueError(f"{listed} says nothing of {path}")
        source = sources.get(path, {"commit": commit, "id": None})
        where = (path, source["commit"], source["id"])
        note = source.get("note") or ""
        if file.suffix == ".yaml":
            result.key_lists[path] = KeyList(*where, keys=_keys(file.read_text()), note=note)
        else:
            result.modules[module_name(path)] = record_module(file.read_text(), *where, note=note)
    if not result.modules:
        raise ValueError(f"no source files under {folder}")
    return result


def module_name(path: str) -> str:
    """``tensorrt_llm/a/b.py`` is ``tensorrt_llm.a.b``; a package is its ``__init__.py``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def record_module(
    text: str, path: str, commit: str | None = None, id: str | None = None, note: str = ""
) -> Module:
    """The facts of one source text."""
    tree = ast.parse(text)
    module = Module(path, commit, id, note)
    package = module_name(path)
    if not path.endswith("__init__.py"):
        package = package.rpartition(".")[0]
    module.imports = list(_imports(tree, package))
    names = {i.asname: f"{i.module}.{i.name}" for i in module.imports if not i.within}
    for statement in _statements(tree.body):
        if isinstance(statement, ast.ClassDef):
            module.classes[statement.name] = _class(statement)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            module.functions[statement.name] = _function(statement)
        elif (assigned := _assigned(statement)) is not None:
            name, value = assigned
            try:
                module.constants[name] = repr(_constant(value))
            except ValueError:
                if (dotted := _dotted(value)) is not None:
                    head, _, rest = dotted.partition(".")
                    known = names.get(head, head if head == PACKAGE else None)
                    if known is not None:
                        module.aliases[name] = f"{known}.{rest}" if rest else known
    module.calls = list(_calls(tree))
    return module


def dump(line: Line) -> str:
    """The line as JSON; short values are on one line."""
    return _pretty(to_json(line), 0) + "\n"


def _pretty(value: Any, depth: int) -> str:
    flat = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, list | dict) or len(flat) + depth <= 116:
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, list):
        inner = (f"{pad}{_pretty(item, depth + 1)}" for item in value)
        return "[\n" + ",\n".join(inner) + "\n" + " " * depth + "]"
    inner = (f"{pad}{json.dumps(key)}: {_pretty(item, depth + 1)}" for key, item in value.items())
    return "{\n" + ",\n".join(inner) + "\n" + " " * depth + "}"


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the body runs, through ``if`` and ``try``."""
    for statement in body:
        if isinstance(statement, ast.If):
            if not _type_checking(statement):
                yield from _statements(statement.body)
            yield from _statements(statement.orelse)
        elif isinstance(statement, ast.Try):
            yield from _statements(statement.body)
        else:
            yield statement


def _type_checking(statement: ast.If) -> bool:
    return (_dotted(statement.test) or "").rpartition(".")[2] == "TYPE_CHECKING"


def _imports(tree: ast.Module, package: str) -> Iterator[Import]:
    def visit(node: ast.AST, within: str, checking: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom):
                module = child.module or ""
                if child.level:
                    parts = package.split(".")
                    above = parts[: len(parts) - child.level + 1]
                    module = ".".join([*above, *filter(None, [module])])
                if module.split(".")[0] == PACKAGE:
                    for alias in child.names:
                        yield Import(
                            module, alias.name, alias.asname or alias.name, within, checking
                        )
            elif isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = child.name if not within else f"{within}.{child.name}"
                yield from visit(child, inner, checking)
            elif isinstance(child, ast.If) and _type_checking(child):
                yield from visit(child, within, True)
            else:
                yield from visit(child, within, checking)

    yield from visit(tree, "", False)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    function = Function(_parameters(node.args), is_async=isinstance(node, ast.AsyncFunctionDef))
    if node.returns is not None:
        function.returns = ast.unparse(node.returns)
    for decorator in node.decorator_list:
        name = (_dotted(decorator) or "").rpartition(".")[2]
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        function.role = ROLES.get(name, function.role)
        function.abstract |= name.startswith("abstract")
        if (_dotted(called) or "").rpartition(".")[2] in KEPT_DECORATORS:
            function.decorators.append(ast.unparse(decorator))
    return function


def _parameters(arguments: ast.arguments) -> list[Parameter]:
    def one(argument: ast.arg, kind: str, default: ast.expr | None = None) -> Parameter:
        return Parameter(
            argument.arg,
            kind,
            None if argument.annotation is None else ast.unparse(argument.annotation),
            None if default is None else _default(default),
        )

    plain = [(a, "positional") for a in arguments.posonlyargs] + [
        (a, "any") for a in arguments.args
    ]
    missing = len(plain) - len(arguments.defaults)
    result = [
        one(argument, kind, arguments.defaults[i - missing] if i >= missing else None)
        for i, (argument, kind) in enumerate(plain)
    ]
    if arguments.vararg is not None:
        result.append(one(arguments.vararg, "*"))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        result.append(one(argument, "keyword", default))
    if arguments.kwarg is not None:
        result.append(one(arguments.kwarg, "**"))
    return result


def _default(node: ast.expr) -> str:
    """A default's text; of what computes something only that it does."""
    if any(isinstance(n, ast.Lambda | ast.Await | ast.comprehension) for n in ast.walk(node)):
        return "<computed>"
    return ast.unparse(node)


def _class(node: ast.ClassDef) -> Class:
    result = Class(
        [ast.unparse(base) for base in node.bases],
        {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg is not None},
    )
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = (_dotted(called) or "").rpartition(".")[2]
        if name == "dataclass":
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            result.dataclass = {k.arg: bool(_constant(k.value)) for k in keywords if k.arg}
        elif name in KEPT_DECORATORS:
            result.decorators.append(ast.unparse(decorator))
    enum = any(base.rpartition(".")[2] in ENUMS for base in result.bases)
    for statement in _statements(node.body):
        if isinstance(statement, ast.ClassDef):
            result.classes[statement.name] = _class(statement)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            _method(statement, result)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if not ast.unparse(statement.annotation).startswith("ClassVar"):
                result.fields.append(_field(statement.target.id, statement))
            elif statement.value is not None:
                _attribute(statement.target.id, statement.value, result)
        elif (assigned := _assigned(statement)) is not None:
            name, value = assigned
            if enum:
                result.members[name] = (
                    "auto()" if isinstance(value, ast.Call) else ast.unparse(value)
                )
            else:
                _attribute(name, value, result)
    result.instance = sorted(_instance(node))
    return result


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: Class) -> None:
    texts = [_dotted(decorator) or "" for decorator in node.decorator_list]
    if f"{node.name}.setter" in texts:
        owner.methods[node.name].setter = True
    elif not any(text.rpartition(".")[2] in ("overload", "deleter") for text in texts):
        owner.methods[node.name] = _function(node)


def _field(name: str, node: ast.AnnAssign) -> Field:
    result = Field(name, ast.unparse(node.annotation))
    value = node.value
    if isinstance(value, ast.Call) and (_dotted(value.func) or "") in FIELD_CALLS:
        result.call = _dotted(value.func)
        keywords = {k.arg: k.value for k in value.keywords if k.arg is not None}
        default = value.args[0] if value.args else keywords.get("default")
        if default is not None and not _ellipsis(default):
            result.default = _default(default)
        if "default_factory" in keywords:
            result.default_factory = _default(keywords["default_factory"])
        result.options = {
            key: ast.unparse(option) for key, option in keywords.items() if key in FIELD_OPTIONS
        }
    elif value is not None:
        result.default = _default(value)
    return result


def _attribute(name: str, value: ast.expr, owner: Class) -> None:
    if name == "model_config" and isinstance(value, ast.Call):
        owner.config = {k.arg: ast.unparse(k.value) for k in value.keywords if k.arg is not None}
    elif name != "__doc__" and (_dotted(value) is not None or _literal(value)):
        owner.attributes[name] = ast.unparse(value)


def _instance(node: ast.ClassDef) -> set[str]:
    """Names assigned to ``self`` in the class's own methods."""
    found: set[str] = set()
    for method in _statements(node.body):
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in ast.walk(method):
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.ctx, ast.Store)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == "self"
                ):
                    found.add(part.attr)
    return found


def _calls(tree: ast.Module) -> Iterator[Call]:
    seen: list[Call] = []

    def visit(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = within
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = child.name if not within else f"{within}.{child.name}"
            if isinstance(child, ast.Call) and (call := _call(child, within)) and call not in seen:
                seen.append(call)
            visit(child, inner)

    visit(tree, "")
    yield from seen


def _call(node: ast.Call, within: str) -> Call | None:
    before, _, name = (_dotted(node.func) or "").rpartition(".")
    if name not in CALLS or CALLS[name] not in before or before.startswith("super"):
        return None
    return Call(
        f"{before}.{name}" if before else name,
        sum(not isinstance(argument, ast.Starred) for argument in node.args),
        [k.arg for k in node.keywords if k.arg is not None],
        any(isinstance(argument, ast.Starred) for argument in node.args),
        any(k.arg is None for k in node.keywords),
        within,
    )


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
    else:
        return None
    return (target.id, value) if isinstance(target, ast.Name) else None


def _dotted(node: ast.AST) -> str | None:
    """``a.b.c`` of names and attributes, and None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def _literal(node: ast.expr) -> bool:
    try:
        _constant(node)
    except ValueError:
        return False
    return True


def _constant(node: ast.expr) -> Any:
    """The value of a literal, also of sums and shifts of integers; ValueError for anything else."""
    if isinstance(node, ast.BinOp):
        left, right = _constant(node.left), _constant(node.right)
        if isinstance(left, int) and isinstance(right, int):
            match node.op:
                case ast.Add():
                    return left + right
                case ast.Sub():
                    return left - right
                case ast.LShift():
                    return left << right
                case ast.Mult():
                    return left * right
                case ast.Pow():
                    return left**right
    if _ellipsis(node):
        raise ValueError("a skeleton's value")
    return ast.literal_eval(node)


def _ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _keys(text: str) -> dict[str, str]:
    """Keys of a published list, with annotations: parameters of ``__init__``, else fields."""
    tree: dict[str, Any] = yaml.safe_load(text) or {}
    initializer = tree.get("methods", {}).get("__init__", {})
    entries: dict[str, Any] = initializer.get("parameters") or tree.get("fields", tree)
    return {
        key: str(entry.get("annotation", "")) if isinstance(entry, dict) else ""
        for key, entry in entries.items()
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--texts", type=Path, required=True, help="folder with a folder per line")
    parser.add_argument("--line", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="of a checkout that has no sources.json")
    options = parser.parse_args(arguments)
    try:
        line = record_line(options.texts, options.line, options.commit)
    except ValueError as error:
        sys.exit(str(error))
    options.output.write_text(dump(line))


if __name__ == "__main__":
    main()
