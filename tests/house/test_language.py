"""Holds the page "The language of the house" of CONTRIBUTING.md, as far as a machine can: words, mood, completeness."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.house.repository import REPO, files, name_of, parse, python_files

# What follows the page: the whole product, its tools, and the kit of the tests.
FOLLOWS = (
    "coordinator",
    "launcher",
    "tandem_clients",
    "tandem_config",
    "tandem_files",
    "tools",
    "trainer_service",
    "weightsync",
    "rollout_service",
    "reward_service",
    "environment_service",
    "servicekit",
    "tests/kit",
)

# Words of this house only, and what to write instead. Whole words, in docstrings, comments and texts.
DIALECT = {
    r"(?:is|are|was|were|be|been|being|as) told|told (?:by|of|to|which|what)": "gets, is called with, is asked to",
    r"nobody|somebody|anybody|everybody": "name the service, or: no replica, another process",
    r"who (?:is|are|was) there|(?:is|are|was|were) (?:there any ?more|around)": "present, announced",
    r"takes? (?:its|their|our) leave": "withdraws, leaves the group",
    r"la(?:ys?|id|ying) open": "reports",
    r"in words": "as text",
    r"hop(?:es?|ed|ing)": "expects, waits for",
    r"at once": "immediately; concurrently; together",
    r"(?:is|are|was|were|be|been) away": "unreachable, lost",
    r"without a word": "without a message",
    r"(?:go|goes|going|went) on": "continues, resumes",
    r"(?<=, )since (?!when|then|the (?:run|release)|this)": "because, for a cause",
}
# The same in names of functions, classes, arguments and variables, as parts of a snake_case name: `_tell_failure`.
DIALECT_NAMES = re.compile(
    r"(?:^|_)(?:tells?|told|hears?|heard|talks?|nobody|somebody|anybody|everybody|whats|hop(?:e[sd]?|ing)"
    r"|welcomes?|goes_on|go_on|(?:last|leave)_words?|words_of)(?:_|$)"
)

# Files beside Python and Markdown whose comments and texts people read.
CONFIGURATION = (".yaml", ".yml", ".conf", ".lua", ".proto", ".sh", ".Dockerfile")

# Docstrings of functions begin with an imperative, those of properties may with a noun. Nouns that end as verbs do:
PLURALS = {"Arguments", "Bytes", "Seconds"}


def texts(path: Path) -> list[tuple[int, str]]:
    """The docstrings, other texts with a space in them, and comments of a file, with their lines."""
    found = [
        (node.lineno, node.value)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip()
    ]
    source = io.StringIO(path.read_text(encoding="utf-8"))
    comments = [token for token in tokenize.generate_tokens(source.readline) if token.type == tokenize.COMMENT]
    return found + [(comment.start[0], comment.string) for comment in comments]


def wrapped_lines(path: Path) -> list[tuple[int, str]]:
    """Each line of a file together with the next one, because sentences are wrapped; with its number."""
    lines = path.read_text(encoding="utf-8").splitlines()
    following = [re.sub(r"^\s*(?:#|//|--|\*)+ ?", "", line) for line in [*lines[1:], ""]]
    return [(number, f"{line} {after}") for number, (line, after) in enumerate(zip(lines, following, strict=True), 1)]


def dialect(text: str) -> list[str]:
    """The house's own words in a text; what stands in backticks is code."""
    prose = " ".join(re.sub(r"`[^`]*`", "", text).split())
    genitive = ["'# Of', say: what it is, e.g. '# Seconds of ...'"] if text.startswith("# Of ") else []
    return genitive + [
        f"{match[0]!r}, say: {instead}"
        for words, instead in DIALECT.items()
        for match in re.finditer(rf"\b(?:{words})\b", prose, re.IGNORECASE)
    ]


MAX_WORDS = 25
# An enumeration may be longer, as many terms as it has; tables, examples and commands are no sentences.
COMMAS_OF_A_LIST = 4
_PARAGRAPHS = re.compile(r"\n\s*\n|\n(?=\s*(?:Args|Returns|Raises|Attributes|Yields):)|\n(?=\s*\* )|\n(?=\s+\w+: )")
_NO_PROSE = re.compile(r"\S {2,}\S|>>>|^\s*\||[\b]|^\s*tandem ", re.MULTILINE)
_COMMENTS = re.compile(r"(?:^ *# .*\n?)+", re.MULTILINE)


def long_sentences(path: Path) -> list[str]:
    """The sentences, or parts up to a colon or semicolon, of more than MAX_WORDS in docstrings and comments."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(parse(path)) if isinstance(node, kinds)]
    source = path.read_text(encoding="utf-8")
    texts += [re.sub(r"^ *# ", "", block, flags=re.MULTILINE) for block in _COMMENTS.findall(source)]
    parts = [part for text in texts for part in _PARAGRAPHS.split(text) if not _NO_PROSE.search(part)]
    sentences = [sentence for part in parts for sentence in re.split(r"(?<=[.!?;:])\s", " ".join(part.split()))]
    return [
        f"{len(sentence.split())}: {sentence}"
        for sentence in sentences
        if len(sentence.split()) > MAX_WORDS and sentence.count(",") < COMMAS_OF_A_LIST
    ]


def definitions(tree: ast.AST, *, private: bool = False) -> list[tuple[ast.AST, bool]]:
    """Classes, methods and functions that are not inside a function, and whether each is public."""
    found: list[tuple[ast.AST, bool]] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = private or node.name.startswith("_")
            found.append((node, not hidden))
            if isinstance(node, ast.ClassDef):
                found += definitions(node, private=hidden)
    return found


def third_person(docstring: str) -> bool:
    """Whether a function's docstring begins with "Returns ..." instead of "Return ..."."""
    word = docstring.split()[0]
    return re.fullmatch(r"[A-Z][a-z]*[^s'\W]s", word) is not None and word not in PLURALS


def mood(tree: ast.AST) -> list[str]:
    """Functions of a file, private ones too, whose docstrings do not begin as the page says."""
    functions = [node for node, _ in definitions(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        f"{node.lineno}: {docstring.splitlines()[0]}"
        for node in functions
        if (docstring := ast.get_docstring(node)) and third_person(docstring)
    ]


def silent(tree: ast.AST) -> list[str]:
    """Public classes, methods and functions of a file without a docstring."""
    return [
        f"{node.lineno}: {node.name}"
        for node, public in definitions(tree)
        if public
        and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not ast.get_docstring(node)
        and not any(decorator in ("overload", "override") for decorator in map(ast.unparse, node.decorator_list))
    ]


def nameless(tree: ast.AST) -> list[str]:
    """Variables called `each`: what they hold has a name. Fields of a dataclass may be, as in `Items(each=...)`."""
    fields = {node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    names = (node for node in stored if node not in fields)
    return [f"{node.lineno}: {node.id}" for node in names if node.id == "each"]


def odd_names(tree: ast.AST) -> list[str]:
    """Functions, classes, arguments and variables of a file that are named in dialect."""
    named = [
        (node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    named += [(node.lineno, node.arg) for node in ast.walk(tree) if isinstance(node, ast.arg)]
    stored = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)]
    named += [(node.lineno, node.id) for node in stored if isinstance(node, ast.Name)]
    named += [(node.lineno, node.attr) for node in stored if isinstance(node, ast.Attribute)]
    return [f"{line}: {name}" for line, name in sorted(set(named)) if DIALECT_NAMES.search(_snake_case(name))]


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def followers() -> list[Path]:
    missing = [name for name in FOLLOWS if not (REPO / name).exists()]
    assert missing == [], f"these do not exist: {missing}"
    return [path for path in python_files() if _is_in(path, FOLLOWS)]


def _is_in(path: Path, names: tuple[str, ...]) -> bool:
    return any(name_of(path) == name or name_of(path).startswith(f"{name}/") for name in names)


def test_texts_use_the_terms_of_the_field() -> None:
    assert [
        f"{name_of(path)}:{line}: {what}"
        for path in followers()
        for line, text in texts(path)
        for what in dialect(text)
    ] == []


def test_documents_use_the_terms_of_the_field() -> None:
    """All but the page itself, which quotes the words, and the history."""
    pages = [path for path in files() if path.suffix == ".md" and path.name not in ("CONTRIBUTING.md", "CHANGELOG.md")]
    assert len(pages) > 10
    assert [
        f"{name_of(path)}:{line}: {what}"
        for path in pages
        for line, text in wrapped_lines(path)
        for what in dialect(text)
    ] == []


def test_configuration_uses_the_terms_of_the_field() -> None:
    """Manifests, the compose file, Dockerfiles, scripts, protos and Lua; tests of them are not looked at."""
    own = [path for path in files() if path.suffix in CONFIGURATION and not name_of(path).startswith("tests/")]
    assert {path.suffix for path in own} == set(CONFIGURATION)
    assert [
        f"{name_of(path)}:{line}: {what}"
        for path in own
        for line, text in wrapped_lines(path)
        for what in dialect(text)
    ] == []


def test_names_use_the_terms_of_the_field() -> None:
    assert [f"{name_of(path)}:{what}" for path in followers() for what in odd_names(parse(path))] == []


def test_sentences_are_short() -> None:
    assert [f"{name_of(path)}: {text}" for path in followers() for text in long_sentences(path)] == []


def test_a_long_sentence_is_recognised(tmp_path: Path) -> None:
    path, words = tmp_path / "bad.py", "a word of many " * 7
    path.write_text(f'"""{words}."""\n# {words}\n\n# no   sentence, {words}\n', encoding="utf-8")
    assert len(long_sentences(path)) == 2


def test_docstrings_of_functions_are_imperative() -> None:
    assert [f"{name_of(path)}:{what}" for path in followers() for what in mood(parse(path))] == []


def test_everything_public_has_a_docstring() -> None:
    assert [f"{name_of(path)}:{what}" for path in followers() for what in silent(parse(path))] == []


def test_variables_are_named_for_what_they_hold() -> None:
    assert [f"{name_of(path)}:{what}" for path in followers() for what in nameless(parse(path))] == []


@pytest.mark.parametrize(
    "text",
    [
        "Told of every sync.",
        "Nobody can be looked for.",
        "if too few are there any more",
        "what is wrong, in words",
        "# Of a request, in seconds.",
    ],
)
def test_dialect_is_recognised(text: str) -> None:
    assert len(dialect(text)) == 1


@pytest.mark.parametrize(
    "text", ["`nobody`", "# Seconds of a request.", "an untold number", "in other words", "Show hopping counts."]
)
def test_other_words_are_not(text: str) -> None:
    assert dialect(text) == []


def test_a_bad_file_is_recognised() -> None:
    bad = ast.parse(
        'class A:\n    def b(self):\n        """Returns it."""\n    def c(self): ...\n    def _d(self): ...'
    )
    assert (mood(bad), silent(bad)) == (["2: Returns it."], ["1: A", "4: c"])
    assert nameless(ast.parse("for each in []: ...")) == ["1: each"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def _tell_failure(): ...", ["1: _tell_failure"]),
        ("class Tell: ...", ["1: Tell"]),
        ("def f(tell): self.last_heard = told = tell", ["1: last_heard", "1: tell", "1: told"]),
        ("def f(tie_word_embeddings, shopping): heartbeat = len(last_words)", []),
    ],
)
def test_a_name_in_dialect_is_recognised(source: str, found: list[str]) -> None:
    assert odd_names(ast.parse(source)) == found


@pytest.mark.parametrize(
    ("first_line", "is_third_person"),
    [
        ("Sends it.", True),
        ("Passes it on.", True),
        ("Pass it on.", False),
        ("Bytes of it.", False),
        ("SGLang's own.", False),
    ],
)
def test_the_third_person_is_recognised(first_line: str, is_third_person: bool) -> None:
    assert third_person(first_line) == is_third_person
