"""Code objects of a model's functions, read once in a process, and the functions behind members.

No name, module or file of a function counts, but its code and what that names.
"""

import dis
import functools
import hashlib
import types
import weakref
from collections.abc import Iterator
from typing import Any


class ReadCode:
    """A code object, read once in a process: it never changes.

    Attributes
    ----------
    digest : str
        SHA-256 of the code, equal in every process. Names of files, functions and lines do not
        count.
    """

    def __init__(self, code: types.CodeType) -> None:
        # Compared with the object itself: the id of a freed one may come again.
        self.of = weakref.ref(code)
        self.inner = [item for item in code.co_consts if isinstance(item, types.CodeType)]
        content = (
            code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
            code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount,
            code.co_exceptiontable, [_constant(item) for item in code.co_consts],
        )  # fmt: skip
        self.digest = hashlib.sha256(repr(content).encode()).hexdigest()

    @functools.cached_property
    def looks_up(self) -> tuple[list[tuple[str, ...]], frozenset[str]]:
        """Chains of names on module level, and names that are looked up on anything else.

        `a.b.c` is the chain `("a", "b", "c")`. Names of inner code are included.
        """
        chains, attributes, current_chain = set[tuple[str, ...]](), set[str](), list[str]()
        code = self.of()
        for step in dis.get_instructions(code) if code is not None else ():
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                chains.add(tuple(current_chain))
                current_chain = [step.argval]
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                if current_chain:
                    current_chain.append(step.argval)
                else:
                    # An attribute of anything: only a run could tell of what.
                    attributes.add(step.argval)
            elif step.opname != "PUSH_NULL":
                chains.add(tuple(current_chain))
                current_chain = []

        for item in self.inner:
            nested = read_code(item).looks_up
            chains.update(nested[0])
            attributes |= nested[1]

        return sorted(chains - {()}), frozenset(attributes)


_codes: dict[int, ReadCode] = {}


def read_code(code: types.CodeType) -> ReadCode:
    """Read a code object and those inside it."""
    cached_code = _codes.get(id(code))
    if cached_code is None or cached_code.of() is not code:
        cached_code = _codes[id(code)] = ReadCode(code)
    return cached_code


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return read_code(value).digest
    # A set has another order in every process.
    if isinstance(value, frozenset):
        return "set", sorted(map(repr, value))
    return (
        [_constant(item) for item in value]
        if isinstance(value, tuple)
        else (type(value).__name__, repr(value))
    )


def codes_of(namespace: dict[str, Any]) -> frozenset[int]:
    """Return the `id()` of each code object of a module's functions and methods, nested ones too.

    Functions that the module imports are left out.
    """
    members = [
        item
        for kind in namespace.values()
        if isinstance(kind, type)
        for item in vars(kind).values()
    ]
    functions = [
        function for item in (*namespace.values(), *members) for function in functions_of(item)
    ]
    functions += [
        item
        for function in functions
        if (item := getattr(function, "__wrapped__", None)) is not None
    ]
    # Functions that the module imported belong to another one.
    waiting = [
        item.__code__ for item in functions if getattr(item, "__globals__", None) is namespace
    ]

    met = dict[int, types.CodeType]()
    while waiting:
        code = waiting.pop()
        if id(code) not in met:
            met[id(code)] = code
            waiting += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    return frozenset(met)


def functions_of(value: Any) -> list[types.FunctionType]:
    """Return the functions behind a class's member."""
    if type(value) is types.FunctionType:
        return [value]
    if type(value) is property:
        return [
            item for part in (value.fget, value.fset, value.fdel) for item in functions_of(part)
        ]
    if type(value) in (staticmethod, classmethod, types.MethodType):
        return functions_of(value.__func__)
    if isinstance(value, functools._lru_cache_wrapper):
        return functions_of(value.__wrapped__)
    return (
        functions_of(value.func)
        if isinstance(value, functools.partial | functools.cached_property)
        else []
    )


def closure_cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield a function's closure, by name; a cell that is not set yet is left out."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def is_native(kind: type) -> bool:
    """Tell whether native code made a class."""
    # The flag of types that a class statement made (Py_TPFLAGS_HEAPTYPE).
    return not kind.__flags__ & 1 << 9


def type_name(kind: type) -> str:
    """Return the full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
