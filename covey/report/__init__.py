"""Write runs as one offline HTML page. This file only re-exports names."""

from covey.report.page import REPORT, Finding, build_page, write_report

__all__ = ["REPORT", "Finding", "build_page", "write_report"]
