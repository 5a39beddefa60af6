// The first screen: how the run ended, what the diagnosis found, and what came out.

function showTop() {
  const { runs } = DATA, [run] = runs;
  const title = runs.length > 1 ? count(runs.length, 'run') + ' compared' : run.name;
  byId('title').replaceChildren(...readable(title));
  byId('subtitle').replaceChildren(...readable(runs.length > 1 ? runs.map((one) => one.name).join(', ') : aboutRun(run)));
  byId('verdicts').replaceChildren(...(runs.length > 1 ? [] : verdicts(run, DATA.findings)));
}

function aboutRun(run) {
  const method = run.method === 'sft' ? 'supervised training' : run.algorithm.toUpperCase().replace('DR_GRPO', 'Dr. GRPO');
  const model = run.facts.find(([name]) => name === 'model');
  return [run.recipe !== run.name ? run.recipe : null, method, model ? model[1].replace(/, sha256 [0-9a-f]+/, '') : null, progress(run), run.seconds ? duration(run.seconds) : null]
    .filter(Boolean).join(' \u00b7 ');
}

function progress(run) {
  const [, last, planned] = run.steps;
  return planned && planned !== last ? whole(last) + ' of ' + count(planned, 'step') : count(last, 'step');
}

const ENDINGS = { running: ['live', 'Running'], stopped: ['warn', 'Stopped'], failed: ['bad', 'Failed'], dead: ['bad', 'Broken off'] };
const SOUND = 'Nothing wrong was found';

// Chips: how the run ended, if it is not finished, and the first finding, which links to all of them.
function verdicts(run, findings) {
  const chips = [], about = findings.map((finding, i) => ({ ...finding, number: i + 1 })).filter((finding) => DATA.runs[finding.run] === run);
  if (ENDINGS[run.status]) {
    const [tone, text] = ENDINGS[run.status], [, last, planned] = run.steps;
    chips.push(element('span', { class: 'verdict ' + tone }, text + (last ? ' at step ' + whole(last) + (planned && planned > last ? ' of ' + whole(planned) : '') : ' before the first step') +
      (tone === 'live' && DATA.written ? ' (' + DATA.written.slice(0, 16).replace('T', ' ') + ' UTC)' : '')));
  }
  if (about.length) {
    const [first] = about, problems = about.filter(({ level }) => level === 'problem').length;
    const tone = problems ? 'bad' : first.title === SOUND && run.status === 'finished' ? 'good' : 'plain';
    const text = tone === 'good' ? ['Sound'] : [...readable(first.title), problems > 1 ? ' and ' + count(problems - 1, 'more problem') : ''];
    chips.push(element('a', { class: 'verdict ' + tone, href: '#finding-' + first.number }, text));
  }
  return chips;
}

// A change in colour and sign with its standard error: better or worse only where it exceeds two of them.
function changeNodes(change, unit, better) {
  if (!change) return [];
  const [by, error] = change;
  if (by === 0) return [element('span', { class: 'by' }, 'no change')];
  const isShare = unit === 'share', scale = isShare ? 100 : 1;
  const digits = isShare ? 1 : error ? Math.min(8, Math.max(0, 1 - Math.floor(Math.log10(error)))) : null;  // two of the error
  const size = (value) => (digits === null ? brief(Math.abs(value), 3) : Math.abs(scale * value).toLocaleString('en-US', { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  const text = (by > 0 ? '+' : '\u2212') + size(by) + (error === null ? '' : ' \u00b1\u202f' + size(error)) + (isShare ? ' points' : '');
  const isClear = error === null || Math.abs(by) >= 2 * error, isBetter = by * better > 0;
  const mark = !better ? null : !isClear ? ['', '\u2248', 'less than two standard errors'] : isBetter ? ['good', '\u25b2', 'better'] : ['bad', '\u25bc', 'worse'];
  return [element('span', { class: 'by ' + (mark ? mark[0] : '') }, text, mark ? [' ', element('span', { role: 'img', 'aria-label': mark[2], title: mark[2] }, mark[1])] : null)];
}

// The figures of the first screen.
function headline(run) {
  const wanted = run.method === 'sft' ? ['accuracy', 'loss'] : ['accuracy', 'reward'];
  const found = wanted.map((name) => run.figures.find((figure) => figure.name === name)).filter(Boolean)
    .map((figure) => ({ ...figure, label: 'Held-out ' + figure.name, ...latest(run, figure) }));
  const trends = run.method === 'sft' ? [['Loss', 'loss', '', -1]] : [['Training reward', 'reward', '', 1], ['Completion length', 'completions/mean_length', 'tokens', 0]];
  for (const [label, name, unit, better] of trends) if (run.trends[name]) {
    const [before, after, by, error] = run.trends[name];
    found.push({ label, unit, better, before, after, change: [by, error] });
  }
  return found.slice(0, 4);
}

// The last evaluation of a run that has none after training yet.
function latest(run, { curve, after }) {
  const [steps, values] = run.series[curve] || [[], []];
  if (after !== null) return {};
  return steps.length < 2 ? { note: 'before training' } : { after: values[values.length - 1], note: 'step ' + whole(steps[steps.length - 1]) };
}

function keyOfChanges(run) {
  const [trend] = Object.values(run.trends), several = DATA.runs.length > 1;
  return '\u00b1 is the standard error of a change: \u25b2 better, \u25bc worse, \u2248 less than two standard errors. ' +
    (trend ? 'Figures of training are means, of ' + (several ? 'the first and the last steps' : trend[4] + ' and ' + trend[5]) + '.' : '');
}

function fromTo({ before, after, unit }) {
  if (after === null || after === undefined) return [element('strong', {}, inUnit(before, unit))];
  return [element('span', { class: 'was' }, inUnit(before, unit)), element('span', { class: 'arrow', role: 'img', 'aria-label': 'then' }, '\u2192'), element('strong', {}, inUnit(after, unit))];
}

function showOverview(body) {
  if (DATA.runs.length === 1) {
    const tiles = headline(DATA.runs[0]).map((figure) => element('div', { class: 'tile' },
      element('dt', {}, figure.label, figure.note ? element('span', { class: 'small' }, ' \u00b7 ' + figure.note) : null),
      element('dd', {}, fromTo(figure)), element('dd', { class: 'small' }, changeNodes(figure.change, figure.unit, figure.better))));
    body.append(element('dl', { class: 'tiles' }, tiles), element('p', { class: 'muted note' }, keyOfChanges(DATA.runs[0])));
    return true;
  }
  const labels = [...new Set(DATA.runs.flatMap((run) => headline(run).map(({ label }) => label)))];
  const rows = DATA.runs.map((run, r) => {
    const found = new Map(headline(run).map((figure) => [figure.label, figure]));
    const cell = (figure) => (figure ? [element('div', {}, fromTo(figure)), element('div', { class: 'small' }, changeNodes(figure.change, figure.unit, figure.better))] : '\u2013');
    return [[element('span', { class: 'run-name' }, element('span', { class: 'swatch swatch-' + (r % 8 + 1) }), readable(run.name)), element('div', { class: 'verdicts' }, verdicts(run, DATA.findings))],
      ...labels.map((label) => numeric(cell(found.get(label)))), numeric(whole(run.steps[1])), numeric(duration(run.seconds)), run.algorithm];
  });
  body.append(table(['Run', ...labels.map(numeric), numeric('Steps'), numeric('Time'), 'Method'], rows, { label: 'Runs' }),
    element('p', { class: 'muted note' }, keyOfChanges(DATA.runs[0])));
  const differing = DATA.settings.filter((setting) => setting.differs);
  if (differing.length) {
    body.append(element('h3', {}, 'What differs in their recipes'),
      table(['Setting', ...DATA.runs.map((run) => escapedLine(run.name))], differing.map((setting) => [element('code', {}, escapedLine(setting.name)),
        ...setting.values.map((value) => settingValue(value, setting.default))]), { label: 'Settings that differ between the runs' }));
  }
  return true;
}
