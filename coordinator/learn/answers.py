r"""The answer in a completion's text, to see which completions give the same one (maj@k). Pure.

A reward says whether a text is right, not whether two texts agree. So answers are compared as texts: what stands in the
last `\boxed{}`, else after the last `####`, else the whole text, without case, spaces and a full stop at its end. `0.5`
and `\frac12` are two answers, and a completion without a mark has an answer of its own, unless another one is equal.
"""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARK = "####"
_SPACE = re.compile(r"\s+")


def answer_in(text: str) -> str:
    r"""Return the normalised answer of a completion.

    >>> answer_in(r"so it is $\boxed{ \frac{1}{2} }$."), answer_in("6 * 7 = 42\n#### 42 "), answer_in("Forty  Two.")
    ('\\frac{1}{2}', '42', 'fortytwo')
    """
    boxes = list(_BOX.finditer(text))
    found = _until_closed(text, boxes[-1].end()) if boxes else text.rpartition(_MARK)[2]
    return _SPACE.sub("", found).casefold().removesuffix(".")


def _until_closed(text: str, start: int) -> str:
    """Return the text from `start` to the brace that closes the one before it; all of it without one."""
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return text[start:]
