"""Everything that can be known to be wrong before anything expensive starts, all of it at once.

The configuration itself is checked in `tandem_config`; here come the files, the host and the run's folder.
"""

from pathlib import Path

from launcher.check.data.rows import check_data
from launcher.check.data.tokenizer import check_tokenizer
from launcher.check.host import check_host
from launcher.check.model.folder import check_model
from launcher.check.resume import check_output, check_resume
from tandem_config.loading import Draft
from tandem_config.problems import ConfigProblem


def preflight(draft: Draft, *, redis_url: str | None, resume: Path | None = None) -> list[ConfigProblem]:
    """Problems and warnings of a drafted configuration, those of its text first.

    Args:
        draft: what `draft_config` made of the file; keys that are bad there are not judged again.
        redis_url: REDIS_URL if the user gave one.
        resume: run folder to go on with.
    """
    if draft.config is None:
        return list(draft.problems)
    problems: list[ConfigProblem] = []
    spec = None
    if draft.usable("model.path"):
        spec, found = check_model(draft.config, draft.usable)
        problems += found
        codec, found = check_tokenizer(draft.config, spec)
        problems += found
    else:
        codec = None
    problems += check_data(draft.config, draft.usable, spec, codec)
    problems += check_host(draft.config, redis_url)
    problems += check_output(draft.config) if resume is None else check_resume(resume, draft.config, spec, codec)
    return [*draft.problems, *draft.placed(problems)]
