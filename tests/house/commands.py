"""The commands that the documents show, and which test or script runs each kind of them for real."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.house.repository import REPO, name_of

BLOCK = re.compile(r"^```(console|bash|sh)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)

# What a reader runs -> the file that runs it too, and a text in that file that shows it. A command that a document
# gains must gain a line here, and the test that it names.
RUN_BY = {
    "make help": ("tests/house/test_make.py", 'make("help")'),
    "make venv": ("Makefile", "check: venv"),
    "make check": ("Makefile", "test: check"),
    "make test": (".ci/run", "make test"),
    "make test-fast": ("tests/house/test_make.py", '"test-fast"'),
    "make test-all": ("tests/house/test_make.py", '"test-all"'),
    "make images": ("tests/images/conftest.py", '"make", "images"'),
    "docker compose": ("tests/images/conftest.py", '["docker", "compose"'),
    "make demo": ("tests/e2e/test_demo.py", 'tandem("demo")'),
    "tandem check": ("tests/house/test_command.py", 'tandem("check"'),
    "tandem run": ("tests/e2e/test_run.py", 'tandem("run", "--resume"'),
    "tandem top": ("tests/e2e/test_run.py", 'tandem("top", "--once")'),
    "tandem status": ("tests/e2e/test_run.py", 'tandem("status")'),
    "tandem plan": ("tests/unit/launcher/test_plan_command.py", '["plan", *arguments]'),
    "tandem version": ("tests/house/test_command.py", 'tandem("version"'),
    "tandem --help": ("tests/house/test_command.py", '"--help"'),
    "python -m examples.arithmetic.make_model": ("tests/house/test_arithmetic_example.py", 'main(["data"'),
    "python -m examples.weight_sync": ("tests/integration/weightsync/test_example.py", '"examples.weight_sync"'),
    "python -m servicekit.redis.acl": ("tests/manifests/test_stand_in.py", '"python "'),
    "python -m tools.configuration_reference": ("tests/unit/config/test_reference.py", 'main(["check"])'),
    "python -m tools.prometheus_rule": ("tests/manifests/test_components.py", "prometheus_rule(RULES"),
    # Real kubectl, against a stand-in for the API server.
    "kubectl apply": ("tests/manifests/test_stand_in.py", '"apply"'),
    "kubectl create": ("tests/manifests/test_stand_in.py", '"create"'),
    "kubectl delete": ("tests/manifests/test_stand_in.py", '"delete"'),
    "kubectl get": ("tests/manifests/test_stand_in.py", '"get"'),
    "kubectl label": ("tests/manifests/test_stand_in.py", '"label"'),
    "kubectl scale": ("tests/manifests/test_stand_in.py", '"scale"'),
}
# Need pods that run: no test has any, and docs/kubernetes.md says so.
NEEDS_A_CLUSTER = {
    "kubectl cp",
    "kubectl describe",
    "kubectl drain",
    "kubectl exec",
    "kubectl logs",
    "kubectl port-forward",
    "kubectl wait",
}
# Programs of the reader's system; what they do is not ours to test.
FOREIGN = {"cd", "git", "apt-get", "curl", "less", "cat", "ls", "head", "tail", "export", "rm", "source"}


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a document; `words` are split as a shell does, without leading assignments."""

    document: Path
    words: tuple[str, ...]

    @property
    def kind(self) -> str:
        """What RUN_BY lists: program and subcommand, or `python -m module`."""
        program = Path(self.words[0]).name
        if program.startswith("python") and self.words[1:2] == ("-m",):
            return f"python -m {self.words[2]}"
        return " ".join([program, *self.words[1:2]])

    def __str__(self) -> str:
        return f"{name_of(self.document)}: {shlex.join(self.words)}"


def block_lines(language: str, text: str) -> list[str]:
    """Returns the command lines of a block: those after `$ ` in a console block, all but comments in a script."""
    lines = text.replace("\\\n", " ").splitlines()
    if language == "console":
        return [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def commands_in(document: Path) -> list[Command]:
    """Returns the commands of a Markdown file, `a && b` as two."""
    found = []
    for language, text in BLOCK.findall(document.read_text(encoding="utf-8")):
        for line in block_lines(language, text):
            for part in re.split(r"&&|;", line.partition(" #")[0]):
                words = shlex.split(part)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words:
                    found.append(Command(document=document, words=tuple(words)))
    return found


def documents() -> list[Path]:
    """Returns the Markdown files whose commands are promises."""
    named = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
    return [path for path in named if path.is_file()] + sorted((REPO / "examples").rglob("*.md"))
