"""Write runs as one offline HTML page. This file only re-exports names."""

from covey.monitor.run_files import REPORT
from covey.report.diagnosis import Finding
from covey.report.page import build_page, write_report

__all__ = ["REPORT", "Finding", "build_page", "write_report"]
