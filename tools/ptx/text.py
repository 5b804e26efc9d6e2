"""Read PTX as LLVM and inline assembly write it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# A label, a brace of a scope, or a statement. Braces of a vector are part of their statement.
_TOKEN = re.compile(r"\s*(?:([$\w]+):(?!:)|([{}])|((?:[^;{}]|\{[^{}]*\})+);)")
_STATEMENT = re.compile(r"(@!?[%\w]+ )?([a-z][\w.:]*)\s*(.*)")
_OPERAND = re.compile(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,\[\]{}])+")


def groups(pattern: str | re.Pattern[str], text: str, at: int = 0) -> re.Match[str]:
    """Match `pattern` at `at`; NotImplementedError with the text if PTX says something new here."""
    found = re.compile(pattern).match(text, at)
    if found is None:
        raise NotImplementedError(text[at : at + 200])
    return found


@dataclass
class Instruction:
    """Hold one instruction.

    opcode   its parts
    guard    the register that decides which threads execute it, and the value it must have
    """

    opcode: list[str]
    operands: list[str]
    guard: tuple[str, bool] | None
    text: str


@dataclass
class Code:
    """Hold a kernel. Labels and jump tables point into `instructions`; `threads` is per program."""

    parameters: list[str]
    threads: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)


def parse(text: str) -> Code:
    """Read the one kernel of `text`."""
    text = re.sub(r"//[^\n]*|^\s*\.loc\s[^\n]*", "", text, flags=re.MULTILINE)
    header, body = text[text.index(".entry") :].split("\n{", 1)
    threads = groups(r"(?s).*?\.reqntid\s+(\d+)", header)
    code = Code(re.findall(r"\.param [^,\n]*?(\w+_param_\d+)", header), int(threads.group(1)))
    scopes: list[dict[str, str]] = [{}]
    at = 0
    while scopes:
        found = groups(_TOKEN, body, at)
        at = found.end()
        label, brace, statement = found.groups()
        if brace == "{":
            scopes.append({})
        elif brace == "}":
            scopes.pop()
        elif label and body[at:].lstrip().startswith(".branchtargets"):
            code.tables[label] = []
        elif label:
            code.labels[_label(code, scopes, label)] = len(code.instructions)
        else:
            _read_statement(code, scopes, " ".join(statement.split()))
    return code


def _read_statement(code: Code, scopes: list[dict[str, str]], text: str) -> None:
    if text.startswith(".branchtargets"):
        code.tables[list(code.tables)[-1]] = [name.strip() for name in text.split(" ", 1)[1].split(",")]
    elif text.startswith(".reg") and "<" not in text:
        # Registers of inline assembly get names like those of the others.
        _, kind, names = text.split(" ", 2)
        prefix = "p" if kind == ".pred" else {"16": "rs", "64": "rd"}.get(kind[2:], "r")
        for name in names.split(","):
            scopes[-1][name.strip()] = f"%{prefix}@{len(code.instructions)}{name.strip()}"
    elif not text.startswith("."):
        guard, opcode, operands = groups(_STATEMENT, text).groups()

        def own(match: re.Match[str]) -> str:
            return next((s[match.group()] for s in reversed(scopes) if match.group() in s), match.group())

        def resolved(part: str) -> str:
            return re.sub(r"(?<![\w.$%@:])[A-Za-z_]\w*", own, part)

        jumps = opcode.split(".")[0] == "bra"
        operands = _label(code, scopes, operands) if jumps else resolved(operands)
        parts = [part.strip() for part in _OPERAND.findall(operands)]
        condition = (resolved(guard.strip("@! ")), "!" not in guard) if guard else None
        code.instructions.append(Instruction(opcode.split("."), [p for p in parts if p], condition, text))


def _label(code: Code, scopes: list[dict[str, str]], name: str) -> str:
    """Return a label's unique name. Inline assembly may repeat the names of its labels."""
    if name.startswith("$"):
        return name
    return scopes[-1].setdefault(name, f"{name}@{len(code.instructions)}")


def names_of(operand: str) -> list[str]:
    """Return the registers of a vector, or the single one."""
    return [name.strip() for name in operand.strip("{} ").split(",")]
