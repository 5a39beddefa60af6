"""Write runs as one offline HTML page. This file only re-exports names."""

from covey.report.page import Finding, build_page, write_report
from covey.train.run_files import REPORT

__all__ = ["REPORT", "Finding", "build_page", "write_report"]
