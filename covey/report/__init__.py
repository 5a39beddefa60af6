"""Write runs as one offline HTML page. This file only re-exports names."""

from covey.report.diagnosis import Finding
from covey.report.page import build_page, write_report
from covey.train.run_files import REPORT

__all__ = ["REPORT", "Finding", "build_page", "write_report"]
