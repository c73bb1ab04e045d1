"""The tasks: where their data come from, what is scored, and what a loss is worth."""

from ncgru.lab.tasks.adding import Adding
from ncgru.lab.tasks.base import Batch, Source, Task
from ncgru.lab.tasks.copying import Copying
from ncgru.lab.tasks.denoise import Denoise
from ncgru.lab.tasks.language import OwnText, PennTreebank
from ncgru.lab.tasks.parenthesis import Parenthesis

__all__ = ["Adding", "Batch", "Copying", "Denoise", "OwnText", "Parenthesis", "PennTreebank", "Source", "Task"]
