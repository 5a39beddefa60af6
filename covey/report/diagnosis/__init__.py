"""Say what is wrong with a run from its metrics. This file only re-exports names."""

from covey.report.diagnosis.diagnose import LiveDiagnosis, diagnose
from covey.report.diagnosis.finding import NOTE, PROBLEM, Finding
from covey.report.diagnosis.history import RunHistory
from covey.report.diagnosis.rules import RULES, Rule

__all__ = ["NOTE", "PROBLEM", "RULES", "Finding", "LiveDiagnosis", "Rule", "RunHistory", "diagnose"]
