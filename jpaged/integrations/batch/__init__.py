"""Batch files: lines to requests, outputs to lines, and a run over a file that loses nothing.

lines.py: a line to a request. answers.py: an output to a line. source.py, tables.py: where lines
come from. journal.py, rows.py: the output file, what it holds already, and the manifest beside
it. manifest.py, judged.py: what made an output, and which settings that are. stats.py, progress.py:
what a run counts and shows. run.py: the loop. check.py: the same without running anything.
merge.py: shards to one file.
"""

from jpaged.integrations.batch.answers import answer_line, encode_line, error_line
from jpaged.integrations.batch.lines import BatchRequest, Settings
from jpaged.integrations.batch.source import LineError

__all__ = ["BatchRequest", "LineError", "Settings", "answer_line", "encode_line", "error_line"]
