"""Every public name has a Google-style docstring whose Args, Returns and Raises match its code."""

import ast
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap

import pytest
from flax import linen

import hetjax

HEADING = re.compile(r"^([A-Z]\w+):$", re.MULTILINE)
ENTRY = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:", re.MULTILINE)
LINEN = {"parent", "name"}  # fields of every linen.Module


def sections(text):
    """The sections of a docstring by heading, and under "" what precedes them."""
    summary, *rest = HEADING.split(inspect.cleandoc(text))
    return {"": summary} | dict(zip(rest[::2], rest[1::2], strict=True))


def described(parts, *headings):
    """Names with an entry in one of the sections; "a, b: ..." describes both."""
    found = ",".join(",".join(ENTRY.findall(parts.get(heading, ""))) for heading in headings)
    return {name.strip().lstrip("*") for name in found.split(",")} - {""}


def parameters(function):
    return [
        name
        for name in inspect.signature(function).parameters
        if name not in ("self", "cls", "_cls") and not name.startswith("_")
    ]


def own_nodes(function):
    """The syntax nodes of a function, without those of functions inside it; none where it was generated."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except OSError:
        return
    waiting = list(tree.body[0].body)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield node
            waiting.extend(ast.iter_child_nodes(node))


def raises(function):
    return any(isinstance(node, ast.Raise) and node.exc for node in own_nodes(function))


def result_heading(function):
    """The section that describes the result of a function, or None."""
    nodes = list(own_nodes(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes):
        return "Yields"
    values = [node.value for node in nodes if isinstance(node, ast.Return) and node.value]
    return "Returns" if any(not isinstance(v, ast.Constant) or v.value is not None for v in values) else None


def faults_of_entries(label, names, parts, *headings):
    given, args = described(parts, *headings), described(parts, "Args")
    missing = [f"{label}: no entry for {name} in {' or '.join(headings)}" for name in names if name not in given]
    return missing + [f"{label}: Args describes {name}, which is no parameter" for name in sorted(args - {*names})]


def faults_of_function(label, function, text, *, needs_result=True):
    if not text:
        return [f"{label}: no docstring"]
    parts, heading = sections(text), needs_result and result_heading(function)
    wrong = faults_of_entries(label, parameters(function), parts, "Args")
    if heading and heading not in parts:
        wrong.append(f"{label}: no section {heading}")
    if raises(function) and "Raises" not in parts:
        wrong.append(f"{label}: no section Raises")
    return wrong


def definitions(cls, name):
    """What the classes of the package define under a name, the most derived first."""
    return [vars(c)[name] for c in cls.__mro__ if c.__module__.startswith("hetjax.") and name in vars(c)]


def is_protocol(cls):
    return vars(cls).get("_is_protocol", False)  # its constructor is typing's


def faults_of_class(label, cls):
    text = vars(cls).get("__doc__")
    if not text or text.startswith(f"{cls.__name__}("):  # the latter is what dataclass and NamedTuple generate
        return [f"{label}: no docstring"]
    parts = sections(text)
    is_record = dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")
    headings = ("Args", "Attributes") if is_record else ("Args",)
    constructor = [*definitions(cls, "__init__"), *definitions(cls, "__new__")][:1] if not is_protocol(cls) else []
    names = [name for function in constructor for name in parameters(function)]
    if issubclass(cls, linen.Module):
        names = [name for name in names if name not in LINEN]
    wrong = faults_of_entries(label, names, parts, *headings)
    if any(map(raises, constructor + definitions(cls, "__post_init__")[:1])) and "Raises" not in parts:
        wrong.append(f"{label}: no section Raises, although its constructor raises")
    return wrong


def faults_of_method(label, cls, name):
    found = definitions(cls, name)
    text = next((member.__doc__ for member in found if member.__doc__), None)
    if isinstance(found[0], property | functools.cached_property):
        return [] if text else [f"{label}: no docstring"]
    function = getattr(found[0], "__func__", found[0])  # of a classmethod or staticmethod
    return faults_of_function(label, function, text, needs_result=bool(parameters(function)))


def is_public_method(cls, name):
    found = definitions(cls, name)
    kinds = classmethod | staticmethod | property | functools.cached_property
    is_method = found and (inspect.isfunction(found[0]) or isinstance(found[0], kinds))
    return is_method and (not name.startswith("_") or name == "__call__")


@pytest.mark.parametrize("name", hetjax.__all__)
def test_a_public_name_is_documented(name):
    thing = getattr(hetjax, name)
    if inspect.ismodule(thing):  # `hetjax.devices`, a package that can be called
        thing = thing.__call__
    if not inspect.isclass(thing):
        wrong = faults_of_function(name, thing, thing.__doc__)
    else:
        wrong = faults_of_class(name, thing)
        for method in filter(functools.partial(is_public_method, thing), dir(thing)):
            wrong += faults_of_method(f"{name}.{method}", thing, method)
    assert not wrong, "\n".join(["", *wrong])


def exported():
    """The functions and classes that subpackages export, beside `hetjax.__all__`: (package, name)."""
    names = []
    for package in (info.name for info in pkgutil.walk_packages(hetjax.__path__, "hetjax.") if info.ispkg):
        module = importlib.import_module(package)
        things = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
        names += [(package, name) for name, x in things.items() if inspect.isclass(x) or inspect.isroutine(x)]
    return names


@pytest.mark.parametrize(("package", "name"), exported())
def test_a_name_that_a_subpackage_exports_is_documented(package, name):
    thing = getattr(importlib.import_module(package), name)
    is_class = inspect.isclass(thing)
    wrong = faults_of_class(name, thing) if is_class else faults_of_function(name, thing, thing.__doc__)
    assert not wrong, "\n".join(["", *wrong])


def documented(first, *rest, last=None):
    """An example that satisfies the test.

    Args:
        first: One.
        *rest: Some.
        last: Another,
            on two lines: as it happens.

    Returns:
        A number.

    Raises:
        ValueError: Always, nearly.
    """
    if last:
        raise ValueError(last)
    return len(rest)


@pytest.mark.parametrize(
    ("removed", "fault"),
    [
        ("first: One.", "no entry for first"),
        ("*rest: Some.", "no entry for rest"),
        ("Returns:", "no section Returns"),
        ("Raises:", "no section Raises"),
        ("", None),
    ],
)
def test_what_is_missing_is_named(removed, fault):
    wrong = faults_of_function("f", documented, documented.__doc__.replace(removed, ""))
    assert [w for w in wrong if fault and fault in w] == wrong
    assert bool(wrong) == bool(fault)


def test_an_entry_for_no_parameter_is_named():
    text = documented.__doc__.replace("first:", "first, former:")
    assert faults_of_function("f", documented, text) == ["f: Args describes former, which is no parameter"]
