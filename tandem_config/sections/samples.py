"""What is stored of each iteration's samples."""

from pydantic import Field

from tandem_config.sections.base import PositiveInt, Section, about


class SamplesSection(Section):
    """Stored samples: prompts and completions with their rewards, in the run's folder `samples/`."""

    enabled: bool = Field(
        True,
        description="Store samples, for `tandem samples` and the page. Only your own user can open the folder.",
        json_schema_extra=about("a reward that is wrong shows in the completions, and nowhere else"),
    )
    every: PositiveInt = Field(
        1,
        description="Store the samples of every n-th iteration; those of the first and of evaluations always.",
        json_schema_extra=about("a file of the demo takes 20 KB; a thread of its own writes it", unit="iterations"),
    )
    max_mib: PositiveInt = Field(
        2048,
        description=(
            "Compressed size of all stored samples. Beyond it iterations are removed: more of the older ones, so that "
            "the first, the newest and some between them stay."
        ),
        json_schema_extra=about("about 600 million tokens of text, beside checkpoints of many GB", unit="MiB"),
    )
    token_ids: bool = Field(
        False,
        description="Store each completion's token ids too.",
        json_schema_extra=about("the text, with its special tokens, is nearly always enough"),
    )
