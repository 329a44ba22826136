"""What is stored of each iteration's samples."""

from tandem_config.sections.base import PositiveInt, Section, setting


class SamplesSection(Section):
    """Stored samples: prompts and completions with their rewards, in the run's folder `samples/`."""

    enabled: bool = setting(True, "a reward that is wrong shows in the completions, and nowhere else")
    """Store samples, for `tandem samples` and the page. Only your own user can open the folder."""
    every: PositiveInt = setting(1, "a file of the demo takes 20 KB; a thread of its own writes it", "iterations")
    """Store the samples of every n-th iteration; those of the first and of evaluations always."""
    max_mib: PositiveInt = setting(2048, "about 600 million tokens of text, next to checkpoints of many GB", "MiB")
    """Compressed size of all stored samples. Beyond it iterations are removed: more of the older ones, so that the
    first, the newest and some between them stay."""
    token_ids: bool = setting(False, "the text, with its special tokens, is nearly always enough")
    """Store each completion's token ids too."""
