"""Where the answer is: every form of the table in docs/rewards.md, right and wrong, and what has none."""

import re

import pytest

from coordinator.workers.answer_extraction import accepted, after_prompt, answer_in, find_answer
from coordinator.workers.math_answers import scorer
from tests.house.repository import REPO

ROWS = re.findall(
    r"^\| (box|tag|hashes|label|sentence) \| (.*) \|$", (REPO / "docs/rewards.md").read_text("utf-8"), re.M
)
# (kind, form): code spans that hold the answer.
FORMS = [
    (kind, span.strip().replace(r"\|", "|"))
    for kind, cell in ROWS
    for _, span in re.findall(r"(`+)(.+?)\1(?!`)", cell)
    if "73" in span or "７３" in span
]


def wrong(form: str) -> str:
    return form.replace("73", "72").replace("７３", "７２")


@pytest.fixture(scope="module", params=["anywhere", "anchored"])
def score(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    scored = scorer(request.param)
    return lambda completion, answer: scored({"completion": completion, "answer": answer})


def test_the_table_has_all_kinds() -> None:
    assert len(FORMS) >= 40
    assert {kind for kind, _ in FORMS} == {"box", "tag", "hashes", "label", "sentence"}


@pytest.mark.parametrize(("kind", "form"), FORMS, ids=[form for _, form in FORMS])
def test_a_form_of_the_table(score, kind: str, form: str) -> None:  # type: ignore[no-untyped-def]
    found = find_answer(form)
    assert found is not None
    assert found.kind == kind
    for text in (form, f"First I had 72.\n{form}", f"<think>72? Answer: 72</think>{form}\n\nCheck: 70 + 4 = 74"):
        assert score(text, "73") == 1.0
        assert score(text, "74") == 0.0
    for text in (wrong(form), f"73 = 70 + 3\n{wrong(form)}", f"{wrong(form)}\n\nCheck: 70 + 3 = 73"):
        assert score(text, "73") == 0.0
    # A reference in that form, and what maj@k counts.
    assert score("#### 73", form) == 1.0
    assert score("#### 72", form) == 0.0
    assert answer_in(form) != answer_in(wrong(form))


@pytest.mark.parametrize("text", ["<think>It is 73", "It is 73.</think>", "<think>\\boxed{73}", "", "</think>\n#### "])
def test_without_an_answer_behind_the_thoughts(score, text: str) -> None:  # type: ignore[no-untyped-def]
    assert score(text, "73") == 0.0


def test_a_thought_that_the_prompt_begins_has_no_answer_until_it_is_closed() -> None:
    score = scorer("anywhere")
    prompt = "<|im_start|>assistant\n<think>\n"
    assert score({"completion": "so 73", "answer": "73", "prompt": prompt}) == 0.0
    assert score({"completion": "so 72</think>73", "answer": "73", "prompt": prompt}) == 1.0
    assert score({"completion": "so 73", "answer": "73", "prompt": "Write <think> first."}) == 1.0
    assert find_answer(after_prompt(prompt, r"\boxed{73}")) is None


# (reference, completion, score with "anywhere", with "anchored")
CASES = [
    # unmarked
    ("73", r"It costs \$73.", 1, 0),
    ("73", "9 and 64 =>73", 1, 0),
    ("73", "sum 9+64, total:73", 1, 0),
    ("73", "(73)", 1, 1),
    ("73", "total: 73", 1, 1),
    ("73", "total: 72", 0, 0),
    ("73", 'So it is "73".', 1, 0),
    ("73", "共73元", 1, 0),
    # marked, with words, signs, units
    ("73", "Answer: 70 + 3 = 73", 1, 1),
    ("73", "Answer: 73 dollars, since 70 + 3", 1, 1),
    ("70", "Answer: 73 dollars, since 70 + 3 = 70", 0, 0),
    ("1234", "Answer: 1,234.", 1, 1),
    ("0.5", r"<answer>50\%</answer>", 1, 1),
    ("-3", "答案：−3", 1, 1),
    ("5!", r"\boxed{120}", 1, 1),
    ("[0,1)", "<answer>[0,1)</answer>", 1, 1),
    ("[0,1]", "<answer>[0,1)</answer>", 0, 0),
    ("1,2", "Answer: 2 and 1", 1, 1),
    ("73", "Answer: 72 or 73", 0, 0),
    # letters
    ("B", "(B)", 1, 1),
    ("B", "B) Paris", 1, 0),
    ("B", "The answer is (B) Paris.", 1, 1),
    ("B", "The correct answer is B because A is too small", 1, 1),
    ("(B)", r"\boxed{\text{b}}", 1, 1),
    (r"\text{B}", "<answer>B. Paris</answer>", 1, 1),
    ("B", "Answer: C, and not B", 0, 0),
    ("B", "A is wrong.\nSo it must be B.", 1, 0),
    ("A", "A train leaves at B.", 0, 0),
    # numbers
    ("1e-05", r"\boxed{10^{-5}}", 1, 1),
    ("0.00001", "Answer: 1e-5", 1, 1),
    ("0.00001", r"\boxed{2e-5}", 0, 0),
    ("6.02e+23", r"\boxed{6.02 \times 10^{23}}", 1, 1),
    ("6.02e+23", "6.02 x 10^23", 1, 0),
    ("2.5e6", r"\boxed{250000}", 0, 0),
    ("1E5", "#### 100,000", 1, 1),
    ("e^2", r"\boxed{e \cdot e}", 1, 1),
    ("3e^x", r"\boxed{3 e^{x}}", 1, 1),
    (r"\frac{1}{30!}", r"\boxed{\frac{1}{31!}}", 0, 0),
    ("3e-7", r"\boxed{4e-7}", 0, 0),
    ("3e-7", r"\boxed{3\times10^{-7}}", 1, 1),
    ("0", r"\boxed{1e-9}", 0, 0),
    ("0.333333", r"\boxed{\frac13}", 1, 1),
    # truth values, accepted answers
    ("true", "Answer: Yes", 1, 1),
    ("false", "<answer>True</answer>", 0, 0),
    ("false", "No, it is not.", 1, 0),
    ('["73", "74"]', "Answer: 74", 1, 1),
    ('["73", "74"]', "Answer: 75", 0, 0),
]


@pytest.mark.parametrize(("answer", "completion", "anywhere", "anchored"), CASES)
def test_right_and_wrong(answer: str, completion: str, anywhere: float, anchored: float) -> None:
    job = {"completion": completion, "answer": answer}
    assert (scorer("anywhere")(job), scorer("anchored")(job)) == (anywhere, anchored)


def test_accepted_answers_are_texts() -> None:
    assert accepted('["1", "2"]') == ["1", "2"]
    assert accepted('["broken') == ['["broken']
    assert accepted('["a", 1]') == ['["a", 1]']
