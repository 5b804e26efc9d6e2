"""TagStream: split an answer that may begin with a thinking between two marks, however it is cut."""

from __future__ import annotations

from enum import Enum

from qrt.text.detokenizer import overlap
from qrt.text.parts import AnswerPart, ContentText, ReasoningText
from qrt.text.reasoning.formats import ReasoningFormat

MOST_SPACES = 64  # before the mark that begins the thinking


class Place(Enum):
    """Where an answer is."""

    BEGINNING = "before anything that is no space"
    THINKING = "in the thinking"
    BEHIND = "behind its end, before anything that is no space"
    CONTENT = "in the content"


class TagStream:
    """Splits one answer, piece by piece.

    A thinking begins at the answer's beginning only, and ends at the first mark of its end. Spaces around the
    thinking and before the content behind it are left out; an answer without thinking stays as it is.
    """

    def __init__(self, format: ReasoningFormat, inside: bool) -> None:
        """Begin; with `inside` the answer thinks already, and may yet write the mark that begins it."""
        self._format = format
        self._inside = inside
        self._place = Place.BEGINNING
        self._held = ""  # what may be spaces or a part of a mark
        self._seen = 0  # characters so far
        self._space: list[str] = []  # in the thinking: spaces that something may follow
        self._shown = False  # whether some thinking is shown

    @property
    def thinks(self) -> bool:
        """Whether the answer is in its thinking."""
        return self._place is Place.THINKING

    @property
    def is_behind(self) -> bool:
        """Whether no thinking follows any more."""
        return self._place in (Place.BEHIND, Place.CONTENT)

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain."""
        self._held += text
        self._seen += len(text)
        parts: list[AnswerPart] = []
        if self._place is Place.BEGINNING:
            self._begin()
        if self._place is Place.THINKING:
            self._think(parts)
        if self._place is Place.BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                self._place = Place.CONTENT
        if self._place is Place.CONTENT and self._held:
            parts.append(ContentText(self._held, self._seen))
            self._held = ""
        return parts

    def finish(self) -> list[AnswerPart]:
        """Return what is held back, at the end of the answer."""
        text, self._held = self._held, ""
        if self._place is Place.BEGINNING and not self._inside:
            return [ContentText(text, self._seen)] if text else []
        parts: list[AnswerPart] = []
        if self._place in (Place.BEGINNING, Place.THINKING):
            self._give(parts, text)
        return parts

    def _begin(self) -> None:
        """Decide whether the answer begins with a thinking, as soon as that is certain."""
        body = self._held.lstrip()
        spaces = len(self._held) - len(body)
        starts = self._format.starts
        if spaces <= MOST_SPACES:
            if any(len(body) < len(start) and start.startswith(body) for start in starts):
                return
            if start := next((start for start in starts if body.startswith(start)), None):
                self._held, self._place = body[len(start) :], Place.THINKING
                return
        self._place = Place.THINKING if self._inside else Place.CONTENT

    def _think(self, parts: list[AnswerPart]) -> None:
        """Show the thinking up to its end, or up to what may be a part of its end."""
        text = self._held
        found = [(at, end) for end in self._format.ends if (at := text.find(end)) >= 0]
        if found:
            at, end = min(found)
            self._give(parts, text[:at])
            self._held, self._place = text[at + len(end) :], Place.BEHIND
            return
        certain = len(text) - max(overlap(text, end) for end in self._format.ends)
        self._give(parts, text[:certain])
        self._held = text[certain:]

    def _give(self, parts: list[AnswerPart], text: str) -> None:
        """Show some thinking, without the spaces at its ends."""
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return
        shown = "".join(self._space) + body
        parts.append(ReasoningText(shown if self._shown else shown.lstrip()))
        self._space, self._shown = [text[len(body) :]], True
