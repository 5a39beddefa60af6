"""Diagnose a run from its metrics. This file only re-exports names."""

from covey_report.diagnosis.diagnose import LiveDiagnosis, diagnose
from covey_report.diagnosis.features import RunHistory
from covey_report.diagnosis.rule import NOTE, PROBLEM, WITHDRAWN, Finding, Rule
from covey_report.diagnosis.rules import RULES

__all__ = ["NOTE", "PROBLEM", "RULES", "WITHDRAWN", "Finding", "LiveDiagnosis", "Rule", "RunHistory", "diagnose"]
