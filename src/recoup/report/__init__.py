"""What was decided and why: as text, as one HTML file, and as plots."""

from recoup.report.page import to_html, to_notebook, write_html
from recoup.report.plots import plot_frontier, plot_memory, plot_sizes
from recoup.report.table import to_text

__all__ = ["plot_frontier", "plot_memory", "plot_sizes", "to_html", "to_notebook", "to_text", "write_html"]
