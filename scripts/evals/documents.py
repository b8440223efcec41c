"""The documents of the task `documents`, and sentences of each to be gone on with.

A question is a sentence cut short and its answer how the text goes on: a model of 135 million
weights finds that in its context, where it answers questions in words badly with any cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.models import ROOT

TEXTS = Path(__file__).with_name("texts")
EXAMPLES = 3


class Question(NamedTuple):
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text of the repository. The first `EXAMPLES` questions are the examples of a prompt."""

    name: str
    path: Path
    questions: tuple[Question, ...]

    def text(self) -> str:
        """In one line."""
        return " ".join(self.path.read_text(encoding="utf-8").split())


DOCUMENTS = (
    Document(
        "license",
        ROOT / "LICENSE",
        (
            Question(
                '"Licensor" shall mean the copyright owner or',
                "entity authorized by the copyright owner that is granting the License",
            ),
            Question(
                '"You" (or "Your") shall mean an individual or',
                "Legal Entity exercising permissions granted by this License",
            ),
            Question(
                "You must give any other recipients of the Work or Derivative Works a",
                "copy of this License",
            ),
            Question(
                "You must cause any modified files to carry",
                "prominent notices stating that You changed the files",
            ),
            Question("In no event and under no legal", "theory"),
            Question("This License does not grant permission to use the", "trade names"),
            Question(
                '"Object" form shall mean any form resulting from mechanical',
                "transformation or translation of a Source form",
            ),
            Question("While redistributing the Work or Derivative", "Works thereof"),
            Question(
                "The contents of the NOTICE file are for",
                "informational purposes only and do not modify the License",
            ),
            Question("Unless required by applicable law or agreed to in", "writing"),
        ),
    ),
    Document(
        "declaration",
        TEXTS / "declaration.txt",
        (
            Question("He has refused his Assent to", "Laws"),
            Question("To prove this, let Facts be submitted to a", "candid world"),
            Question(
                "He has affected to render the Military independent of and",
                "superior to the Civil power",
            ),
            Question("He has kept among us, in times of", "peace"),
            Question(
                "The history of the present King of Great Britain is a history of",
                "repeated injuries and usurpations",
            ),
            Question("He has made Judges dependent on his", "Will alone"),
            Question("He has dissolved Representative Houses", "repeatedly"),
            Question("He has endeavoured to prevent the population of", "these States"),
            Question("He has erected a multitude of", "New Offices"),
            Question("Such has been the patient sufferance of", "these Colonies"),
        ),
    ),
    Document(
        "constitution",
        TEXTS / "constitution.txt",
        (
            Question(
                "The House of Representatives shall chuse their", "Speaker and other Officers"
            ),
            Question("When sitting for that Purpose, they shall be on", "Oath or Affirmation"),
            Question("When vacancies happen in the Representation from any", "State"),
            Question("Each House may determine the Rules of", "its Proceedings"),
            Question("Each House shall keep a Journal of", "its Proceedings"),
            Question(
                "All Bills for raising Revenue shall originate in the", "House of Representatives"
            ),
            Question(
                "The executive Power shall be vested in a",
                "President of the United States of America",
            ),
            Question("The Senate shall have the sole Power to try", "all Impeachments"),
            Question("He shall hold his Office during the Term of", "four Years"),
            Question(
                "The Senate of the United States shall be composed of",
                "two Senators from each State",
            ),
        ),
    ),
)
