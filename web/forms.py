"""The form for a new job: from what was typed to a request, with an error beside each field.

Each field that can be wrong by itself is read here; what only the whole can tell (two ways of
placement, a variable that Unisono sets) is checked by the API's own model, whose errors are then
put beside the field that they are about.
"""

from __future__ import annotations

import json
import math
import secrets
import shlex
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from api.schemas import JobRequest

ENGINES = ("unisono", "gloo", "nccl")
FIELDS = (
    "name",
    "kind",
    "script",
    "entry",
    "args",
    "command",
    "bundle",
    "bundle_name",
    "place",
    "nodes",
    "ranks_per_node",
    "on",
    "engine",
    "strategy",
    "env_name",
    "python",
    "workdir",
    "set",
    "grace",
    "replace_backend",
    "idempotency_key",
)

Values = defaultdict[str, str]
Errors = dict[str, str]


def blank() -> Values:
    """The form before anything was typed."""
    values: Values = defaultdict(str)
    values.update(
        kind="path",
        place="count",
        nodes="1",
        ranks_per_node="1",
        engine="unisono",
        strategy="auto",
        args="[]",
        idempotency_key=secrets.token_hex(16),
    )
    return values


def of_spec(name: str, spec: Mapping[str, Any]) -> Values:
    """The form filled in as another job was started."""
    values = blank()
    values["name"] = name
    if spec.get("command"):
        values["kind"] = "command"
        values["command"] = _json(spec["command"])
    elif spec.get("bundle"):
        values.update(kind="upload", bundle=spec["bundle"], entry=spec["script"])
        values["bundle_name"] = spec["script"]
    else:
        values["script"] = spec.get("script") or ""
    values["args"] = _json(spec.get("args") or [])
    if spec.get("all_free"):
        values["place"] = "all"
    elif spec.get("on"):
        values["place"] = "on"
        values["on"] = ", ".join(f"{node}:{ranks}" for node, ranks in spec["on"].items())
    else:
        values["nodes"] = str(spec.get("nodes") or 1)
        values["ranks_per_node"] = str(spec.get("ranks_per_node") or 1)
    for key in ("engine", "strategy", "env_name", "python", "workdir"):
        values[key] = str(spec.get(key) or values[key])
    values["set"] = _typed_variables(spec.get("set") or {})
    if spec.get("grace") is not None:
        values["grace"] = f"{spec['grace']:g}"
    if spec.get("replace_backend"):
        values["replace_backend"] = "on"
    return values


def _typed_variables(variables: Mapping[str, str]) -> str:
    """Variables one to a line; as JSON where a value holds line ends, which a line cannot."""
    if any("\n" in value or "\r" in value for value in variables.values()):
        return json.dumps(dict(variables), ensure_ascii=False)
    return "\n".join(f"{key}={value}" for key, value in variables.items())


def _json(items: list[str]) -> str:
    return json.dumps(items, ensure_ascii=False)


def typed(form: Mapping[str, Any]) -> Values:
    """What was typed, with the line ends that browsers send made plain again."""
    values: Values = defaultdict(str)
    for name in FIELDS:
        value = form.get(name)
        if isinstance(value, str):
            values[name] = value.replace("\r\n", "\n")
    return values


def read(values: Values) -> tuple[JobRequest | None, Errors]:
    """The request that the form means, or an error for each field that is wrong."""
    errors: Errors = {}
    body: dict[str, Any] = {"engine": values["engine"] or "unisono"}
    for name in ("name", "env_name", "python", "workdir", "strategy"):
        if values[name].strip():
            body[name] = values[name].strip()
    _code(values, body, errors)
    _placement(values, body, errors)
    variables = _variables(values["set"], errors)
    if variables:
        body["set"] = variables
    if values["replace_backend"]:
        body["replace_backend"] = True
    if values["grace"].strip():
        body["grace"] = _seconds(values["grace"].strip(), errors)
    if errors:
        return None, errors
    try:
        return JobRequest.model_validate(body), {}
    except ValidationError as error:
        for entry in error.errors():
            where = str(entry["loc"][0]) if entry["loc"] else ""
            message = str(entry["msg"]).removeprefix("Value error, ")
            errors.setdefault(_field(where, message, values), message)
        return None, errors


def _code(values: Values, body: dict[str, Any], errors: Errors) -> None:
    kind = values["kind"]
    if kind == "command":
        command = _list(values, "command", errors)
        if not command and "command" not in errors:
            errors["command"] = (
                'The command is missing; write a list such as ["python", "train.py"].'
            )
        body["command"] = command
        return
    body["args"] = _list(values, "args", errors)
    if kind == "path":
        body["script"] = values["script"].strip()
        if not body["script"]:
            errors["script"] = "The path of the script is missing."
    elif kind == "upload":
        body["bundle"] = values["bundle"]
        body["script"] = values["entry"].strip()
        if not values["bundle"]:
            errors["file"] = "Choose a .py or .tar.gz file."
        elif not body["script"]:
            errors["entry"] = "The path of the script inside the archive is missing."
    else:
        errors["kind"] = f"{kind!r:.40} is none of: script on the nodes, upload, command."


def _placement(values: Values, body: dict[str, Any], errors: Errors) -> None:
    place = values["place"]
    if place == "all":
        body["all_free"] = True
    elif place == "on":
        body["on"] = _on(values["on"], errors)
    else:
        for name in ("nodes", "ranks_per_node"):
            body[name] = _count(values[name], name, errors)


def _list(values: Values, name: str, errors: Errors) -> list[str]:
    text = values[name].strip()
    if not text:
        return []
    try:
        items = json.loads(text)
    except ValueError as error:
        example = _json(_words(text))
        errors[name] = f"Not a JSON list ({error}). Did you mean {example:.300}?"
        return []
    if not isinstance(items, list):
        errors[name] = f'A JSON list is needed, such as ["--epochs", "5"]; this is {text:.80}'
        return []
    for number, item in enumerate(items, 1):
        if not isinstance(item, str):
            plain = json.dumps(item)
            errors[name] = f'Item {number} is {plain:.60}, not text: write it as "{plain:.60}".'
            return []
    return items


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _count(text: str, name: str, errors: Errors) -> int | None:
    try:
        value = int(text.strip())
    except ValueError:
        value = 0
    if 1 <= value <= 4096:
        return value
    errors[name] = f"{text.strip()[:40]!r} is not a whole number from 1 to 4096."
    return None


def _seconds(text: str, errors: Errors) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        errors["grace"] = f"{text[:40]!r} is not a number of seconds, such as 15."
        return None
    return seconds


def _on(text: str, errors: Errors) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.replace("\n", ",").split(","):
        if not part.strip():
            continue
        node, colon, ranks = part.strip().rpartition(":")
        if not colon or not node or not ranks.strip().isdecimal() or int(ranks) < 1:
            errors["on"] = f"{part.strip()[:60]!r} is not NODE:RANKS, such as w1:4."
            return {}
        if node in found:
            errors["on"] = f"{node[:60]!r} is named twice."
            return {}
        found[node] = int(ranks)
    if not found:
        errors["on"] = "Name at least one node, such as w1:4."
    return found


def _variables(text: str, errors: Errors) -> dict[str, str]:
    # no variable's name begins so: it is an object with values that hold line ends
    if text.lstrip().startswith("{"):
        return _object(text, errors)
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        key, equals, value = line.partition("=")
        if not equals or not key.strip():
            errors["set"] = f"Line {number} is not KEY=VALUE: {line[:60]!r}."
            return {}
        found[key.strip()] = value
    return found


def _object(text: str, errors: Errors) -> dict[str, str]:
    try:
        found = json.loads(text)
    except ValueError as error:
        errors["set"] = f"Neither KEY=VALUE lines nor a JSON object ({error})."
        return {}
    for key, value in found.items():
        if not isinstance(value, str):
            plain = json.dumps(value)
            errors["set"] = f'{key[:60]} is {plain:.60}, not text: write it as "{plain:.60}".'
            return {}
    return dict(found)


def _field(where: str, message: str, values: Values) -> str:
    """The form's field that an error of the API's model is about."""
    if where == "script" and values["kind"] == "upload":
        return "entry"
    if where == "all_free":
        return ""
    if where:
        return where if where in FIELDS else ""
    if message.startswith("script:"):
        return "entry"
    for start in ("command", "set", "on", "workdir"):
        if message.startswith(start):
            return start
    return "python" if message.startswith("give either python") else ""


def parsed_args(values: Values) -> list[str] | None:
    """The arguments as they were understood, to be shown without JavaScript; None when not."""
    if not values["args"].strip():
        return []
    ignored: Errors = {}
    items = _list(values, "args", ignored)
    return None if ignored else items
