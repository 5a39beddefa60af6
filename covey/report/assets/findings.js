// The findings of a diagnosis: what was seen, by which rule, and what to change.

function showDiagnosis(body) {
  body.append(element('ul', { class: 'findings' }, DATA.findings.map((finding) => element('li', { class: finding.level === 'note' ? 'note' : '' },
    element('h3', {}, readable(finding.title)),
    element('dl', {}, [['Seen', finding.evidence], ['Rule', finding.threshold], ['Refuted if', finding.refuted_by], ['Change', finding.setting]].map(([name, text]) =>
      text ? [element('dt', {}, name), element('dd', {}, readable(text))] : []),
    (finding.samples || []).length ? [element('dt', {}, 'Read'),
      element('dd', {}, element('ol', {}, finding.samples.map((line) => element('li', {}, readable(line)))))] : [])))));
  return DATA.findings.length > 0;
}
