"""Accesses of vectors in memory, as Metal means them: changes to clang's intermediate code before it is optimised.

Clang stores one component of a vector by loading the whole vector, putting the component in and storing the whole: the
checks would see a read of components that have no value, and writes to components that other threads own. And it loads
a vector of three as 12 bytes, a size that ThreadSanitizer passes over.
"""

import re

_BYTES = {"i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8, "double": 8}
_VECTOR = rf"<(?P<count>\d+) x (?P<type>{'|'.join(_BYTES)})>"
_NAME = r"%[-\w.$]+"
_LOAD = re.compile(rf"  (?P<value>{_NAME}) = load {_VECTOR}, ptr (?P<from>{_NAME}), align (?P<align>\d+)(?P<rest>.*)")
_INSERT = re.compile(
    rf"  (?P<value>{_NAME}) = insertelement <\S+ x \S+> (?P<into>{_NAME}), \S+ (?P<new>\S+), (?P<index>i\d+ [^\s,]+)"
)
_WIDEN = re.compile(rf"  {_NAME} = shufflevector .*")
_MERGE = re.compile(
    rf"  (?P<value>{_NAME}) = shufflevector <\S+ x \S+> (?P<into>{_NAME}), <\S+ x \S+> (?P<new>{_NAME}), "
    r"<\d+ x i32> <(?P<mask>[^>]*)>"
)
_STORE = re.compile(rf"  store <\S+ x \S+> (?P<value>{_NAME}), ptr (?P<to>{_NAME}), align \d+(?P<rest>.*)")
_ALLOCA = re.compile(rf"  ({_NAME}) = alloca ")
_DEBUG = re.compile(r", !dbg !\d+")


def split_components(code: str) -> str:
    """Make stores of components stores of just these, and loads of vectors of three loads of four.

    Args:
        code: clang's intermediate code as text, not optimised: the instructions of a store follow each other.

    Returns:
        The changed code. Vectors that are variables of a function stay as they are, for the optimiser to keep them in
        registers.
    """
    lines = code.split("\n")
    made: list[str] = []
    variables: set[str] = set()
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("define "):
            variables = set()
        elif found := _ALLOCA.match(line):
            variables.add(found[1])
        load = _LOAD.fullmatch(line)
        if load is None or load["from"] in variables:
            made.append(line)
            at += 1
            continue
        used, new = _component(load, lines[at + 1 : at + 4])
        made += new or _whole(load)
        at += 1 + used
    return "\n".join(made)


def _component(load: re.Match[str], following: list[str]) -> tuple[int, list[str]]:
    """The number of lines after the load that a store of components takes, and what stands for all of them."""
    for count, pattern in ((1, _INSERT), (1, _MERGE), (2, _MERGE)):
        if len(following) <= count or (count == 2 and not _WIDEN.match(following[0])):
            continue
        put, store = pattern.match(following[count - 1]), _STORE.fullmatch(following[count])
        if put is None or store is None or put["into"] != load["value"]:
            continue
        if store["value"] == put["value"] and store["to"] == load["from"]:
            kept = following[: count - 1]
            stores = _insert(load, put, store) if pattern is _INSERT else _merge(load, put, store)
            return count + 1, [_same_name(load), *kept, _same_name(put, load["from"]), *stores]
    return 0, []


def _same_name(instruction: re.Match[str], pointer: str = "") -> str:
    """Something for the name of an instruction that is gone: names without letters must be in order."""
    return f"  {instruction['value']} = getelementptr i8, ptr {pointer or instruction['from']}, i64 0"


def _element(load: re.Match[str], index: str, value: str, store: re.Match[str], number: int = 0) -> list[str]:
    kind, name = load["type"], f"%emu.{load['value'][1:]}.{number}"
    debug = "".join(_DEBUG.findall(store["rest"]))
    align = min(_BYTES[kind], int(load["align"]))
    return [
        f"  {name} = getelementptr {kind}, ptr {load['from']}, {index}{debug}",
        f"  store {kind} {value}, ptr {name}, align {align}{debug}",
    ]


def _insert(load: re.Match[str], put: re.Match[str], store: re.Match[str]) -> list[str]:
    return _element(load, put["index"], put["new"], store)


def _merge(load: re.Match[str], put: re.Match[str], store: re.Match[str]) -> list[str]:
    made = []
    count, kind = int(load["count"]), load["type"]
    for place, chosen in enumerate(put["mask"].split(", ")):
        source = int(chosen.removeprefix("i32 ")) - count if "poison" not in chosen else -1
        if source < 0:
            continue
        value = f"%emu.{load['value'][1:]}.{place}.new"
        made.append(f"  {value} = extractelement <{count} x {kind}> {put['new']}, i64 {source}")
        made += _element(load, f"i64 {place}", value, store, place)
    return made


def _whole(load: re.Match[str]) -> list[str]:
    kind = load["type"]
    if load["count"] != "3" or int(load["align"]) < 4 * _BYTES[kind]:
        return [load[0]]
    four, debug = f"%emu.{load['value'][1:]}.four", "".join(_DEBUG.findall(load["rest"]))
    return [
        f"  {four} = load <4 x {kind}>, ptr {load['from']}, align {load['align']}{debug}",
        f"  {load['value']} = shufflevector <4 x {kind}> {four}, <4 x {kind}> poison, "
        f"<3 x i32> <i32 0, i32 1, i32 2>{debug}",
    ]
