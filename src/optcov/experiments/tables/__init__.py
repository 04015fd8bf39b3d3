"""The paper's tables as runs on any bundle and data, resumable cell by cell.

name         of the paper           what
fid          tab:fid                distance of samples, methods against K
timesteps    tab:timesteps          least number of steps to a distance, the cost of a step counted
bpd          tab:bpd                bits/dim by even and optimal trajectories
cost         tab:mem_time           size and time of an evaluation, with each head and without
iddpm        tab:improved_ddpm      learned range beside NPR
repeats      tab:ll_var             bits/dim at full timesteps over seeds
normalised   tab:fid_cmp_norm       distances at equal time, and beside Gotta Go Fast
peers        (ours)                 distances beside diffusers' schedulers
"""

from optcov.experiments.tables.cells import TABLES, Cell, CellStore, TableRun
from optcov.experiments.tables.evaluation import Evaluation
from optcov.experiments.tables.images import TableImages
from optcov.experiments.tables.published import published, published_value
from optcov.experiments.tables.render import write_table
from optcov.experiments.tables.result import Claim, Entry, Row, Section, TableResult
from optcov.experiments.tables.runs import table_run
from optcov.experiments.tables.sizes import SIZES, TableSize

__all__ = [
    "SIZES",
    "TABLES",
    "Cell",
    "CellStore",
    "Claim",
    "Entry",
    "Evaluation",
    "Row",
    "Section",
    "TableImages",
    "TableResult",
    "TableRun",
    "TableSize",
    "published",
    "published_value",
    "table_run",
    "write_table",
]
