"""The documents of the task `documents`, and short questions that each of them answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.models import ROOT

TEXTS = Path(__file__).with_name("texts")


class Question(NamedTuple):
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text of the repository. The first three questions are the examples of a prompt."""

    name: str
    path: Path
    questions: tuple[Question, ...]

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8").strip()


DOCUMENTS = (
    Document(
        "license",
        ROOT / "LICENSE",
        (
            Question("What is the name of this license?", "Apache License"),
            Question("What is the version of this license?", "2.0"),
            Question("In which month was this version published?", "January"),
            Question("In which year was this version published?", "2004"),
            Question("Which web site is named at the top?", "http://www.apache.org/licenses/"),
            Question("What is the title of section 1?", "Definitions"),
            Question("What is the title of section 4?", "Redistribution"),
            Question("What is the title of section 6?", "Trademarks"),
            Question("What is the title of section 7?", "Disclaimer of Warranty"),
            Question("What is the title of section 8?", "Limitation of Liability"),
        ),
    ),
    Document(
        "declaration",
        TEXTS / "declaration.txt",
        (
            Question("In which year was this declared?", "1776"),
            Question("Of how many states is this the declaration?", "thirteen"),
            Question("Of which country is the King?", "Great Britain"),
            Question("In which month was this declared?", "July"),
            Question("By whom are all men endowed with Rights?", "their Creator"),
            Question(
                "From what do governments derive their just powers?", "the consent of the governed"
            ),
            Question("To whom shall Facts be submitted?", "a candid world"),
            Question("What has he refused to Laws?", "his Assent"),
            Question("What did he keep among us in times of peace?", "Standing Armies"),
            Question("Who was made dependent on his Will alone?", "Judges"),
        ),
    ),
    Document(
        "constitution",
        TEXTS / "constitution.txt",
        (
            Question("For how many Years are Senators chosen?", "six"),
            Question("How many Senators are there from each State?", "two"),
            Question("How old must a Representative be?", "twenty five Years"),
            Question("How old must a Senator be?", "thirty Years"),
            Question("How old must the President be?", "thirty five Years"),
            Question("Who is President of the Senate?", "The Vice President"),
            Question("Who has the sole Power of Impeachment?", "The House of Representatives"),
            Question("Who has the sole Power to try all Impeachments?", "The Senate"),
            Question("For how many Years does the President hold his Office?", "four"),
            Question("Who is Commander in Chief of the Army and Navy?", "The President"),
        ),
    ),
)
