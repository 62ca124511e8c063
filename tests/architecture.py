"""The rules of the package's layout as functions from parsed modules to lists of breaches.

Each rule reads the AST only; it imports nothing of megafsdp. A breach is one line that names the
file, what breaks the rule and, where it is not plain, what to do. tests/test_architecture.py runs
every rule on the tree, and on a snippet that breaks it.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "megafsdp"

# What a folder may import besides itself, errors and device. A dotted entry opens one sub-package.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "_native": frozenset(),
    "device": frozenset(),
    "mesh": frozenset(),
    "quantize": frozenset({"_native"}),
    "data": frozenset(),
    "buffer": frozenset({"_native", "mesh"}),
    "parallel": frozenset({"mesh", "buffer.comm"}),
    "fsdp": frozenset({"mesh", "quantize", "buffer"}),
    "models": frozenset({"mesh", "quantize", "parallel"}),
    "optimizer": frozenset({"_native", "mesh", "quantize", "buffer", "fsdp"}),
    "checkpoint": frozenset(
        {"_native", "mesh", "quantize", "buffer", "fsdp", "optimizer"}
        # Hugging Face files are read and written by the config of the model.
        | {"models"}
    ),
    "training": frozenset(
        {"mesh", "quantize", "data", "buffer", "parallel", "fsdp", "models", "optimizer"}
        # megafsdp doctor says whether the compiled kernels are there.
        | {"checkpoint", "_native"}
    ),
    # On top of all others: bridges to other libraries, and the keywords of one.
    "integrations": frozenset({"buffer", "checkpoint", "fsdp", "mesh", "optimizer"}),
    "megatron": frozenset({"fsdp", "mesh", "optimizer"}),
    # python -m megafsdp.
    "__main__": frozenset({"training"}),
}
OPEN_TO_ALL = frozenset({"errors", "device"})

# The sub-packages of a folder, and which others of the same folder each may import. The folder's
# own files stand above its sub-packages, but for those (training/cli, fsdp/estimate) that list it.
SUB_PACKAGES: dict[str, frozenset[str]] = {
    "buffer": frozenset({"buffer.comm"}),
    "buffer.comm": frozenset(),
    "buffer.dtensor": frozenset({"buffer.comm"}),
    "fsdp": frozenset({"fsdp.params", "fsdp.runtime"}),
    "fsdp.params": frozenset(),
    "fsdp.runtime": frozenset({"fsdp.params"}),
    "fsdp.estimate": frozenset({"fsdp", "fsdp.params", "fsdp.runtime"}),
    "optimizer": frozenset({"optimizer.adam"}),
    "optimizer.kernels": frozenset(),
    "optimizer.states": frozenset({"optimizer.kernels"}),
    "optimizer.grads": frozenset({"optimizer.kernels"}),
    "optimizer.adam": frozenset({"optimizer.kernels", "optimizer.states", "optimizer.grads"}),
    "optimizer.muon": frozenset({"optimizer.states", "optimizer.grads", "optimizer.adam"}),
    "optimizer.offload": frozenset({"optimizer.kernels", "optimizer.states", "optimizer.adam"}),
    "checkpoint": frozenset(
        {"checkpoint.format", "checkpoint.state", "checkpoint.background", "checkpoint.tools"}
        | {"checkpoint.storage"}
        # convert() reads and writes Megatron-LM's checkpoints.
        | {"checkpoint.megatron"}
    ),
    "checkpoint.storage": frozenset(),
    "checkpoint.format": frozenset({"checkpoint.storage"}),
    "checkpoint.state": frozenset({"checkpoint.format"}),
    "checkpoint.background": frozenset({"checkpoint.format", "checkpoint.storage"}),
    "checkpoint.tools": frozenset({"checkpoint.format", "checkpoint.state", "checkpoint.storage"}),
    "checkpoint.huggingface": frozenset(
        {"checkpoint.format", "checkpoint.state", "checkpoint.background", "checkpoint.tools"}
        | {"checkpoint.storage"}
    ),
    "checkpoint.megatron": frozenset(
        {"checkpoint.format", "checkpoint.state", "checkpoint.tools", "checkpoint.storage"}
    ),
    "training": frozenset(
        {"training.config", "training.process", "training.step", "training.metrics"}
    ),
    "training.config": frozenset(),
    "training.process": frozenset(),
    "training.step": frozenset({"training.config", "training.process"}),
    "training.metrics": frozenset({"training.config", "training.process", "training.step"}),
    "training.dry_run": frozenset({"training.config", "training.process", "training.step"}),
    "training.pictures": frozenset(
        {"training.config", "training.process", "training.metrics", "training.dry_run"}
    ),
    "training.cli": frozenset(
        {"training", "training.config", "training.process", "training.metrics"}
        | {"training.dry_run", "training.pictures"}
    ),
}
# Packages whose __init__ exports the names of files above it in the table.
PUBLIC_ROOMS = frozenset(
    {"", "checkpoint", "data", "fsdp", "megatron", "models", "optimizer", "parallel", "quantize"}
    | {"training"}
)

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8
MAX_ATTRIBUTES = 16
# Entry points whose keywords are a promise to users, and rooms whose constructors mirror those of
# torch and of TransformerEngine.
MANY_PARAMETERS = frozenset({"fully_shard", "fully_shard_model", "save", "async_save", "load"})
CONSTRUCTORS_OF_MANY = frozenset({"optimizer", "parallel"})

# Where classes are lists of settings or parts of a network: as many fields as there are facts.
MANY_ATTRIBUTES = ("megatron", "models", "training.config")

# Rooms in which a reader stops often, and how many own-line comments a code line they have.
COMMENTED_ROOMS = ("fsdp", "buffer", "optimizer")
MIN_COMMENTS = 0.07

# Of the command line and its files; what stands below training/ gets plain dataclasses.
VALIDATION_LIBRARIES = frozenset({"pydantic", "jsonargparse"})

# Where names that torch keeps to itself may stand; the last is a subclass of torch's DTensor.
PRIVATE_DOORS = (
    "megafsdp/device/torch_private.py",
    "megafsdp/mesh/torch_private.py",
    "megafsdp/buffer/dtensor/uneven.py",
)
# Attributes that torch keeps to itself, of objects that a dotted name does not show to be torch's.
PRIVATE_ATTRIBUTES = frozenset(
    {
        "_local_tensor",
        "_spec",
        "_execution_engine",
        "_version",
        "_base",
        "_schema",
        "_flatten",
        "_concatenate",
    }
    | {"_compiled_call_impl", "_non_persistent_buffers_set", "_post_accumulate_grad_hooks"}
    | {"_backward_hooks", "_register_load_state_dict_pre_hook"}
)

# May be imported inside a function: heavy, or not there.
LAZY_PACKAGES = frozenset(
    {"numba", "wandb", "tensorboard", "transformers", "tokenizers"}
    # By name, by megafsdp.checkpoint.huggingface.
    | {"safetensors", "huggingface_hub"}
    | {"torch.utils.tensorboard"}
    # Imports the compiler, which takes seconds; by attention with context parallelism.
    | {"torch.nn.attention.bias"}
    # Compressed files and tables, by megafsdp.data.
    | {"zstandard", "pyarrow", "datasets"}
    # Imports triton, which is there on CUDA at most.
    | {"megafsdp.models.loss_kernel"}
    # The bundle of the plotting library.
    | {"vl_convert"}
    # Kernels of linear attention on CUDA.
    | {"fla", "causal_conv1d"}
    # Drivers of object stores.
    | {"fsspec"}
)

COLLECTIVE_STEMS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "reduce_scatter",
    "broadcast",
    "barrier",
    "monitored_barrier",
    "gather",
    "scatter",
    "reduce",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
)
# A class of tensors; waiting for one issues nothing.
NO_COLLECTIVES = ("torch.distributed._functional_collectives.AsyncCollectiveTensor",)
COLLECTIVE_MODULES = ("torch.distributed._functional_collectives", "torch.distributed.nn")
COLLECTIVES_DOOR = "megafsdp/buffer/comm/collectives.py"

AXIS_NAMES = frozenset({"dp_outer", "dp_shard", "cp", "tp", "ep", "edp"})


@dataclass(frozen=True)
class Module:
    """One parsed file.

    Attributes:
        path: Path from the root of the checkout, with forward slashes.
        source: Its text.
        tree: Its AST.
    """

    path: str
    source: str
    tree: ast.Module = field(repr=False)

    @classmethod
    def parse(cls, path: str, source: str) -> Module:
        """Parse a text as the file of a path."""
        return cls(path, source, ast.parse(source))

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """Return every node of the AST."""
        return list(ast.walk(self.tree))

    @functools.cached_property
    def imports(self) -> list[Import]:
        """Return every import, those for type checking included."""
        return list(_imports_below(self.tree, is_inside_function=False))

    @functools.cached_property
    def name(self) -> str:
        """Return the dotted module name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_package(self) -> bool:
        """Return whether the file is the __init__ of a package."""
        return self.path.endswith("/__init__.py")

    @functools.cached_property
    def package(self) -> str:
        """Return the dotted package of the file within megafsdp; empty for megafsdp itself."""
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        return package.partition(".")[2]

    @property
    def room(self) -> str:
        """Return the folder or top-level file of the package; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: ``from target import name`` or ``import target`` (name empty)."""

    target: str
    name: str
    line: int
    is_inside_function: bool


def read_modules(root: Path, folder: str) -> list[Module]:
    """Parse every Python file of a folder of the checkout; none if there is no such folder."""
    paths = sorted((root / folder).rglob("*.py"))
    return [Module.parse(p.relative_to(root).as_posix(), p.read_text()) for p in paths]


def _imports_below(parent: ast.AST, *, is_inside_function: bool) -> Iterator[Import]:
    is_inside_function |= isinstance(parent, _FUNCTIONS)
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", node.lineno, is_inside_function)
        elif isinstance(node, ast.ImportFrom):
            target = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Import(target, alias.name, node.lineno, is_inside_function)
        # An import is a statement: no expression has one below it.
        elif not isinstance(node, ast.expr):
            yield from _imports_below(node, is_inside_function=is_inside_function)


def breaches_of_layers(modules: Sequence[Module]) -> list[str]:
    """Find imports that the table of folders does not allow, and files that stand in no folder."""
    breaches = []
    by_name = {m.name: m for m in modules}
    for module in modules:
        if module.room and module.room not in MAY_IMPORT:
            breaches.append(f"{module.path}: '{module.room}' is no folder of the design")
            continue
        for target, line in _internal_targets(module, by_name):
            if not module.room or _is_allowed(module.room, target):
                continue
            breaches.append(f"{module.path}:{line}: {module.room} may not import {target}")
    return breaches


def breaches_of_sub_packages(modules: Sequence[Module]) -> list[str]:
    """Find sub-packages that are not listed, and imports that their table does not allow."""
    breaches = []
    by_name = {m.name: m for m in modules}
    for module in modules:
        package = module.package
        if "." in package and package not in SUB_PACKAGES:
            breaches.append(f"{module.path}: '{package}' is no sub-package of the design")
            continue
        if module.is_package and package in PUBLIC_ROOMS:
            continue
        allowed = SUB_PACKAGES.get(package, frozenset()) | {package}
        for target, line in _internal_targets(module, by_name):
            target_package = by_name[target].package
            is_same_room = target_package.partition(".")[0] == module.room != ""
            if is_same_room and target_package not in allowed:
                breaches.append(f"{module.path}:{line}: {package} may not import {target_package}")
    return breaches


def breaches_of_signboards(modules: Sequence[Module]) -> list[str]:
    """Find folders whose __init__ does not say what to read first, or exports what it may not."""
    breaches = []
    for module in modules:
        if not module.is_package or not module.package:
            continue
        if module.imports and module.package not in PUBLIC_ROOMS:
            breaches.append(f"{module.path}: only the public rooms export names")
        if "Read first:" not in (ast.get_docstring(module.tree) or ""):
            breaches.append(f"{module.path}: say in the docstring which file to read first")
    return breaches


def breaches_of_acyclicity(modules: Sequence[Module]) -> list[str]:
    """Find a cycle among the modules that modules name in their imports."""
    by_name = {m.name: m for m in modules}
    graph = {m.name: {target for target, _ in _internal_targets(m, by_name)} for m in modules}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["imports in a cycle: " + " <- ".join(error.args[1])]
    return []


def breaches_of_import_style(modules: Sequence[Module]) -> list[str]:
    """Find relative imports, and imports inside functions of packages that are always there."""
    breaches = []
    for module in modules:
        for found in module.imports:
            where = f"{module.path}:{found.line}"
            if found.target.startswith("."):
                breaches.append(f"{where}: relative import of {found.target}; spell it out")
            is_lazy = any(f"{found.target}.".startswith(f"{p}.") for p in LAZY_PACKAGES)
            if found.is_inside_function and not is_lazy:
                breaches.append(f"{where}: import of {found.target} inside a function")
    return breaches


def breaches_of_the_collectives_door(modules: Sequence[Module]) -> list[str]:
    """Find uses of torch.distributed collectives outside buffer/comm/collectives.py."""
    breaches = []
    for module in modules:
        if module.path == COLLECTIVES_DOOR:
            continue
        for dotted, line in _torch_references(module):
            parent, _, name = dotted.rpartition(".")
            is_collective = parent == "torch.distributed" and _is_collective(name)
            is_of_module = dotted.startswith(COLLECTIVE_MODULES) and dotted not in NO_COLLECTIVES
            if is_collective or is_of_module:
                breaches.append(f"{module.path}:{line}: {dotted} belongs in {COLLECTIVES_DOOR}")
    return breaches


def breaches_of_sizes(modules: Sequence[Module]) -> list[str]:
    """Find files, functions and parameter lists beyond their caps."""
    breaches = []
    for module in modules:
        num_lines = len(module.source.splitlines())
        if num_lines > MAX_FILE_LINES:
            breaches.append(f"{module.path}: {num_lines} lines, cap {MAX_FILE_LINES}")
        for node in module.nodes:
            if not isinstance(node, _FUNCTIONS):
                continue
            where = f"{module.path}:{node.lineno}: {node.name}()"
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                breaches.append(f"{where} has {num_lines} lines, cap {MAX_FUNCTION_LINES}")
            num_parameters = _num_parameters(node)
            is_excepted = node.name in MANY_PARAMETERS or (
                node.name == "__init__" and module.room in CONSTRUCTORS_OF_MANY
            )
            if num_parameters > MAX_PARAMETERS and not is_excepted:
                breaches.append(f"{where} has {num_parameters} parameters, cap {MAX_PARAMETERS}")
    return breaches


def breaches_of_axis_spelling(modules: Sequence[Module]) -> list[str]:
    """Find names of mesh axes written out as strings outside mesh/."""
    return [
        f"{module.path}:{node.lineno}: axis name {node.value!r} is spelt in mesh/ alone"
        for module in modules
        if module.room != "mesh"
        for node in module.nodes
        if isinstance(node, ast.Constant) and node.value in AXIS_NAMES
    ]


def breaches_of_public_names(examples: Sequence[Module], modules: Sequence[Module]) -> list[str]:
    """Find imports in examples of anything but public names of the package or its folders."""
    packages = {m.name for m in modules if m.path.endswith("__init__.py")}
    # Each bridge to a library is imported by its own name: no package may import them all.
    packages |= {m.name for m in modules if m.path.startswith(f"{PACKAGE}/integrations/")}
    breaches = []
    for example in examples:
        for found in example.imports:
            if found.target.partition(".")[0] != PACKAGE:
                continue
            if found.target not in packages or found.name.startswith("_"):
                what = f"{found.target}.{found.name}".rstrip(".")
                breaches.append(f"{example.path}:{found.line}: {what} is not a public name")
    return breaches


def breaches_of_private_names(modules: Sequence[Module]) -> list[str]:
    """Find names that torch keeps to itself outside of the files that wrap them."""
    breaches = []
    for module in modules:
        if module.path in PRIVATE_DOORS:
            continue
        references = ((_private_part(dotted), line) for dotted, line in _torch_references(module))
        found = {(name, line) for name, line in references if name}
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES:
                found.add((node.attr, node.lineno))
            elif isinstance(node, ast.Constant) and node.value in PRIVATE_ATTRIBUTES:
                found.add((str(node.value), node.lineno))
        for name, line in sorted(found, key=lambda pair: pair[::-1]):
            breaches.append(f"{module.path}:{line}: {name} belongs in {' or '.join(PRIVATE_DOORS)}")
    return breaches


def breaches_of_placement_questions(modules: Sequence[Module]) -> list[str]:
    """Find calls of ``is_shard()``: of a strided shard it is False on some versions of torch."""
    return [
        f"{module.path}:{node.lineno}: is_shard() misses strided shards; ask cut_dim() of mesh/"
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Attribute) and node.attr == "is_shard"
    ]


def breaches_of_wrappers(modules: Sequence[Module]) -> list[str]:
    """Find wrappers of private names whose docstrings do not say what torch offers in public."""
    return [
        f"{module.path}:{node.lineno}: {node.name}() has no line 'Public: ...' and torch's versions"
        for module in modules
        if module.path in PRIVATE_DOORS and module.path.endswith("/torch_private.py")
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef)
        and not {"Public:", "2.15."} <= set((ast.get_docstring(node) or "").split())
    ]


def breaches_of_attributes(modules: Sequence[Module]) -> list[str]:
    """Find classes with more attributes than the cap: annotated fields and what self is given."""
    breaches = []
    for module in modules:
        if f"{module.package}.".startswith(tuple(f"{p}." for p in MANY_ATTRIBUTES)):
            continue
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and (num := len(_attributes(node))) > MAX_ATTRIBUTES:
                where = f"{module.path}:{node.lineno}: class {node.name}"
                breaches.append(f"{where} has {num} attributes, cap {MAX_ATTRIBUTES}")
    return breaches


def breaches_of_comments(modules: Sequence[Module], room: str) -> list[str]:
    """Find a room whose files have too few comments for their code."""
    counts = [_num_comments_and_code(m) for m in modules if m.room == room]
    num_comments, num_code = (sum(column) for column in zip(*counts, strict=True))
    if num_comments >= MIN_COMMENTS * num_code:
        return []
    wanted = f"at least {MIN_COMMENTS} a line"
    return [f"megafsdp/{room}: {num_comments} comments to {num_code} lines of code, {wanted}"]


def breaches_of_validation(modules: Sequence[Module]) -> list[str]:
    """Find imports of the validation library outside of training/."""
    return [
        f"{module.path}:{found.line}: only training/ imports {found.target}"
        for module in modules
        if module.room != "training"
        for found in module.imports
        if found.target.partition(".")[0] in VALIDATION_LIBRARIES
    ]


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _internal_targets(module: Module, by_name: Mapping[str, Module]) -> Iterator[tuple[str, int]]:
    """Yield the modules of the package that a module's imports name, with the line of each."""
    for found in module.imports:
        if found.target.partition(".")[0] == PACKAGE:
            submodule = f"{found.target}.{found.name}"
            yield (submodule if submodule in by_name else found.target), found.line


def _is_allowed(room: str, target: str) -> bool:
    inner = target.partition(".")[2]
    target_room = inner.partition(".")[0]
    if target_room == room:
        return True
    opened = {target_room, inner, inner.rpartition(".")[0]}
    return not MAY_IMPORT[room].isdisjoint(opened) or target_room in OPEN_TO_ALL


def _torch_references(module: Module) -> Iterator[tuple[str, int]]:
    """Yield every dotted name that begins with torch, import aliases resolved."""
    aliases = {"torch": "torch"}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname}
            yield from ((a.name, node.lineno) for a in node.names if a.name.startswith("torch"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}", node.lineno
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            first, *rest = _dotted(node)
            if aliases.get(first, "").startswith("torch"):
                yield ".".join([aliases[first], *rest]), node.lineno


def _dotted(node: ast.expr) -> list[str]:
    """Return the names of ``a.b.c``; an empty first one if it does not begin with a name."""
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _is_collective(name: str) -> bool:
    # Variants carry a suffix: all_gather_into_tensor, broadcast_object_list, scatter_object_list.
    return any(name == stem or name.startswith(f"{stem}_") for stem in COLLECTIVE_STEMS)


def _num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    parameters = function.args
    names = [a.arg for a in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def _private_part(dotted: str) -> str:
    """Return a dotted name of torch up to its first private part; empty if it has none."""
    parts = dotted.split(".")
    # Operators have names of their own, and those on lists of tensors no public twin.
    if parts[:2] == ["torch", "ops"]:
        return ""
    for k, part in enumerate(parts):
        if part.startswith("_") and not part.startswith(("_foreach_", "__")):
            return ".".join(parts[: k + 1])
    return ""


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's annotated fields, and of all that its methods give to self."""
    fields = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
    names = {target.id for target in fields if isinstance(target, ast.Name)}
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            owner = child.value
            if isinstance(owner, ast.Name) and owner.id == "self":
                names.add(child.attr)
    return names


def _num_comments_and_code(module: Module) -> tuple[int, int]:
    """Return own-line comments, and lines that are neither blank nor comment nor docstring."""
    documented: set[int] = set()
    for node in module.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | _FUNCTIONS[0] | _FUNCTIONS[1]) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    num_comments = num_code = 0
    for number, line in enumerate(module.source.splitlines(), start=1):
        text = line.strip()
        if text and number not in documented:
            num_comments += text.startswith("#")
            num_code += not text.startswith("#")
    return num_comments, num_code
