// The findings of a diagnosis: what was seen and what to change; the rule is folded.

function showDiagnosis(body) {
  body.append(element('ol', { class: 'findings' }, DATA.findings.map(findingItem)));
  return DATA.findings.length > 0;
}

function findingItem(finding, i) {
  const entries = (pairs) => pairs.filter(([, text]) => text).map(([name, text]) => [element('dt', {}, name), element('dd', {}, readable(text))]);
  const rule = entries([['Met if', finding.threshold], ['Refuted if', finding.refuted_by]]), samples = finding.samples || [];
  return element('li', { id: 'finding-' + (i + 1), class: finding.level === 'note' ? 'note' : '' },
    element('h3', {}, finding.level === 'note' ? null : element('span', { class: 'mark-number' }, String(i + 1)), readable(runName(finding) + finding.title)),
    element('dl', {}, entries([['Seen', finding.evidence], ['Change', finding.setting]]),
      samples.length ? [element('dt', {}, 'Read'), element('dd', {}, element('ol', {}, samples.map((line) => element('li', {}, exampleNodes(line, finding.run)))))] : []),
    rule.length ? element('details', {}, element('summary', {}, 'Rule'), element('dl', {}, rule)) : null);
}

// A completion to read; in a report its group is a link.
function exampleNodes(line, run) {
  const [place, step, group] = byId('texts-0') && line.match(/^step (\d+), group (\d+)/) || [''];
  return [place ? element('a', { href: addressOf(DATA.runs[run], step, group) }, place) : '', ...readable(line.slice(place.length))];
}

// The name of the run of a finding where the page has several.
const runName = (finding) => ((DATA.runs || []).length > 1 ? DATA.runs[finding.run].name + ': ' : '');
