"""Audit: invariants I1 to I7 over a whole log, streaming; every violation is named, none repaired.

Three passes, each with memory for what is in flight only: the control log (order, exactly once,
versions), the rows that plans name (what was trained), the data log (what happened). `recompute`
in audit_model.py adds the fourth witness: the weights themselves.
"""

from collections.abc import Callable

from molt.replay.audit_control import check_lineage, leaves, read_facts
from molt.replay.audit_data import DataPass
from molt.replay.audit_plans import Advantages, PlanPass
from molt.replay.audit_report import Report
from molt.store.control import lineage_of
from molt.store.log import Log


def audit(
    log: Log,
    *,
    advantages: Advantages | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Check the whole log; the newest lineage and every abandoned one.

    `advantages` recomputes each group's advantages (without it they are taken as they are);
    `progress(done, total, phase)` is called after each record and commit. Damage is a violation of
    I6 and does not end the audit. Returns the report; `to_json` is the document of `molt audit`.
    """
    report = Report(progress or (lambda done, total, phase: None))
    facts = read_facts(log, report)
    if any(fact.epoch not in facts.configs for fact in facts.records):
        return report  # without an epoch's record, a violation by now, no lineage can be told
    for leaf in leaves(facts.epochs):
        check_lineage(report, facts, lineage_of(facts.epochs, leaf))
    PlanPass(log, report, facts, advantages).run()
    DataPass(log, report, facts, lineage_of(facts.epochs)).run()
    return report
