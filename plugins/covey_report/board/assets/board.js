// The board: the list of runs, which is asked for again and again, and a report of those that are chosen, which grows.

const MOST = 8; // number of runs that can be shown together
const PAUSE = 2000, HIDDEN_PAUSE = 15000, HURRY = 30; // milliseconds between two looks
const STATES = { running: 'running', finished: 'finished', stopped: 'stopped', failed: 'failed', dead: 'dead', waiting: 'not started' };
const rows = new Map(); // elements of the list by name of the run
const list = { runs: [], chosen: [], text: '', state: '' };

async function ask(path, names, more) {
  const parameters = new URLSearchParams([...names.map((name) => ['run', name]), ...(more || [])]);
  const answer = await fetch(path + (names.length ? '?' + parameters : ''));
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// --- the list

const filters = element('div', { class: 'tools' },
  labelled('Find', element('input', { type: 'search', placeholder: 'name, recipe, model, finding', oninput: (event) => { list.text = event.target.value.toLowerCase(); showList(); } })),
  labelled('State', choice([['', 'all'], ['running', 'running'], ['finished', 'finished'], ['ended', 'ended too early'], ['problems', 'with a problem']], '', (value) => { list.state = value; showList(); })),
  element('button', { type: 'button', id: 'choose-none', onclick: () => choose([]) }, 'Choose none'));
const items = element('ul', { class: 'runs', 'aria-label': 'Runs' });
const note = element('p', { class: 'muted note', role: 'status' });
byId('runs').querySelector('.body').append(filters, items, note);

function stateOf(run) {
  const name = run.error ? 'unreadable' : run.state;
  const steps = run.step ? (run.total >= run.step && run.state !== 'finished' ? whole(run.step) + ' of ' + count(run.total, 'step') : count(run.step, 'step')) : '';
  const doing = [steps, run.left ? duration(run.left) + ' left' : '', run.step ? '' : escapedLine(run.activity)].filter(Boolean).join(' \u00b7 ');
  return element('p', {}, element('span', { class: 'state ' + (STATES[run.state] === run.state ? run.state : 'waiting') }, name), ' ', element('span', { class: 'muted' }, doing));
}

// What was found first, or what keeps the run from being read.
function whatOf(run) {
  if (run.error) return element('p', { class: 'what broken' }, readable(run.error));
  if (!run.read) return element('p', { class: 'what muted' }, 'reading \u2026');
  const more = run.problems > 1 ? ' and ' + count(run.problems - 1, 'more problem') : '';
  const ended = ['failed', 'stopped'].includes(run.state) && run.reason ? [readable(run.reason), run.finding ? '. ' : ''] : [];
  return element('p', { class: 'what' }, ended, element('span', { class: run.problems ? 'broken' : 'muted' }, run.problems ? '\u25cf ' : '', readable(run.finding)), element('span', { class: 'muted' }, more));
}

function figuresOf(run) {
  const texts = Object.entries(run.figures).map(([label, [unit, ...values]]) => [label + ' ', element('strong', {}, values.map((value) => inUnit(value, unit, 3)).join(' \u2192 '))]);
  return element('p', { class: 'figures' }, texts.map((text, i) => [i ? [element('span', { class: 'muted' }, ' \u00b7 '), element('br')] : '', text]));
}

function rowOf(run) {
  const row = rows.get(run.name) || { item: element('li', {}) };
  rows.set(run.name, row);
  const text = JSON.stringify(run);
  if (row.text === text) return row;
  if (!row.box) {
    row.box = element('input', { type: 'checkbox', 'aria-label': 'Show ' + escapedLine(run.name), onchange: () => toggle(run.name) });
    row.about = element('p', { class: 'muted' });
    row.item.append(row.box, element('div', {}, element('button', { type: 'button', class: 'name', title: 'Show this run alone', onclick: () => choose([run.name]) }, readable(run.name)), row.about));
  }
  row.text = text;
  const found = [run.name, ...run.about, run.state, run.finding, run.error].join(' ').toLowerCase();
  Object.assign(row, { found, problems: run.problems > 0 || run.error, state: run.state });
  row.about.replaceChildren(...readable(run.about.filter((part) => part && part !== run.name).join(' \u00b7 ')));
  while (row.item.childNodes.length > 2) row.item.lastChild.remove();
  row.item.append(stateOf(run), whatOf(run), figuresOf(run));
  return row;
}

function isWanted(row) {
  const ended = ['stopped', 'failed', 'dead'].includes(row.state);
  const byState = { '': true, problems: row.problems, ended }[list.state] ?? row.state === list.state;
  return byState && row.found.includes(list.text);
}

// Runs that go on come first, by name; then the others, the last one first.
function showList() {
  const goesOn = (run) => run.state === 'running';
  const sorted = [...list.runs].sort((a, b) => goesOn(b) - goesOn(a) || (goesOn(a) ? 0 : b.changed - a.changed) || (a.name < b.name ? -1 : 1));
  const wanted = sorted.map((run) => [run.name, rowOf(run)]).filter(([name, row]) => isWanted(row) || list.chosen.includes(name));
  for (const [name, row] of wanted) {
    row.box.checked = list.chosen.includes(name);
    row.box.disabled = !row.box.checked && list.chosen.length >= MOST;
    row.item.classList.toggle('chosen', row.box.checked);
  }
  const shown = wanted.map(([, row]) => row.item);
  if (shown.length !== items.children.length || shown.some((item, i) => items.children[i] !== item)) {
    const focused = document.activeElement;
    items.replaceChildren(...shown);
    if (items.contains(focused)) focused.focus({ preventScroll: true });
  }
  items.hidden = !shown.length;
  byId('choose-none').disabled = !list.chosen.length;
  const full = list.chosen.length >= MOST ? ' ' + MOST + ' runs can be shown together.' : '';
  const text = !list.runs.length ? '' : whole(shown.length) + ' of ' + count(list.runs.length, 'run') + (list.chosen.length ? ', ' + whole(list.chosen.length) + ' shown below.' : '. Choose one or several to see their curves and completions.') + full;
  if (note.textContent !== text) note.textContent = text; // it is read aloud when it changes
}

function showEmpty(folder) {
  const empty = byId('empty');
  if (list.runs.length) { if (empty) empty.remove(); return; }
  if (!empty) {
    items.after(element('div', { class: 'empty', id: 'empty' }, element('p', {}, 'There is no run in ', element('code', {}, readable(folder)), ' yet. A run appears here when it begins:'),
      element('p', {}, element('code', {}, 'covey train quickstart'))));
  }
}

// --- the chosen runs

function toggle(name) {
  choose(list.chosen.includes(name) ? list.chosen.filter((one) => one !== name) : [...list.chosen, name]);
}

function choose(names) {
  const parameters = new URLSearchParams(names.map((name) => ['run', name]));
  history.replaceState(null, '', names.length ? '#' + parameters : location.pathname);
  list.chosen = names;
  showList();
  return attempt(showChosen());
}

// An error is told in the list's note.
const attempt = (promise) => promise.catch((error) => { note.textContent = error.message; });

const chosenByAddress = () => new URLSearchParams(location.hash.slice(1)).getAll('run').slice(0, MOST);

// Ask for everything about the chosen runs, and fill the sections.
async function showChosen() {
  const names = list.chosen;
  const data = names.length ? await ask('/data', names) : { runs: [], charts: [], settings: [], findings: [] };
  if (names !== list.chosen) return; // others were chosen meanwhile
  Object.assign(DATA, data);
  for (const run of DATA.runs) Object.assign(run, { tokens: { groups: {} }, completions: { prompts: [], rewards: [], steps: [] }, row: list.runs.find((one) => one.name === run.name) });
  clearCharts();
  byId('contents').replaceChildren();
  for (const id of Object.keys(SECTIONS)) fill(id);
}

function fill(id) {
  const section = byId(id), body = section.querySelector('.body');
  body.replaceChildren();
  section.hidden = !DATA.runs.length || !SECTIONS[id](body);
  if (id === 'diagnosis') [...body.querySelectorAll('.findings > li')].forEach(pointTo);
  const links = byId('contents'), link = [...links.children].find((one) => one.hash === '#' + id);
  if (!section.hidden && !link) links.append(element('a', { href: '#' + id }, section.querySelector('h2').textContent));
}

// Ask for what was added to the chosen runs since; all of it anew where a run has ended or has a new metric.
async function follow() {
  const names = list.chosen, now = names.map((name) => list.runs.find((run) => run.name === name));
  if (now.includes(undefined)) { await choose(names.filter((name, i) => now[i])); return; }
  if (!names.length || names.length !== DATA.runs.length) return;
  const before = DATA.runs.map((run) => run.row);
  const same = (keys) => now.every((run, i) => keys.every((key) => run[key] === before[i][key]));
  if (!same(['state', 'read', 'finding', 'problems'])) { await showChosen(); return; }
  if (same(['last'])) return;
  const grown = await ask('/points', names, DATA.runs.map((run) => ['after', run.steps[1]]));
  if (names !== list.chosen) return;
  if (grown.runs.some((run, r) => Object.keys(run.series).some((name) => !DATA.runs[r].series[name]))) { await showChosen(); return; }
  grown.runs.forEach((run, r) => append(DATA.runs[r], run, { row: now[r], marks: grown.marks[r] }));
  growCharts();
  if (JSON.stringify(grown.findings) !== JSON.stringify(DATA.findings)) {
    DATA.findings = grown.findings;
    fill('diagnosis');
  }
  fill('overview');
}

function append(run, grown, more) {
  const push = (points, added) => points.forEach((column, i) => added[i].forEach((value) => column.push(value)));
  for (const kind of ['series', 'clocks']) for (const [name, added] of Object.entries(grown[kind])) push(run[kind][name], added);
  run.steps.splice(0, 2, ...grown.steps);
  Object.assign(run, more, { seconds: grown.seconds });
}

// --- completions side by side

const beside = { step: null, text: '', pointed: null };

function showBeside(body) {
  beside.box = element('div', {});
  beside.step = null;
  const steps = element('select', { onchange: () => attempt(showStep(Number(steps.value))) });
  const move = (by) => { const next = steps.options[steps.selectedIndex + by]; if (next) attempt(showStep(Number(next.value))); };
  beside.steps = steps;
  body.append(element('div', { class: 'tools' }, labelled('Step', steps),
    element('button', { type: 'button', 'aria-label': 'Previous step', onclick: () => move(-1) }, '\u2190'),
    element('button', { type: 'button', 'aria-label': 'Next step', onclick: () => move(1) }, '\u2192'),
    element('button', { type: 'button', onclick: () => attempt(showStep(null)) }, 'Newest step'),
    labelled('Search', element('input', { type: 'search', placeholder: 'prompt or completion', value: beside.text, oninput: (event) => { beside.text = event.target.value.toLowerCase(); drawGroups(); } }))), beside.box);
  attempt(showStep(null));
  return true;
}

// Ask for the completions of a step; of the last one that all chosen runs have if it is null.
async function showStep(step, pointed = null) {
  const names = list.chosen;
  const found = await ask('/completions', names, step === null ? [] : [['step', step]]);
  if (names !== list.chosen || !DATA.runs.length) return;
  Object.assign(beside, { step: found.step, pointed });
  beside.steps.replaceChildren(...found.steps.map((one) => element('option', { value: one, selected: one === found.step }, whole(one))));
  found.runs.forEach((completions, r) => { DATA.runs[r].completions = completions; });
  drawGroups();
}

// A row for each prompt, a column for each run: what the same prompt got from each.
function drawGroups() {
  const byPrompt = new Map();
  DATA.runs.forEach((run, r) => groupsOf(run).forEach((group) => {
    const key = JSON.stringify(run.completions.prompts[group[1]]), cells = byPrompt.get(key) || DATA.runs.map(() => []);
    cells[r].push(group);
    byPrompt.set(key, cells);
  }));
  const wanted = [...byPrompt.values()].filter((cells) => cells.some((groups, r) => groups.some((group) => hasText(DATA.runs[r], group))));
  const pointed = (cells) => Number(cells.some((groups, r) => groups.some((group) => isPointed(r, group))));
  wanted.sort((a, b) => pointed(b) - pointed(a));
  const names = DATA.runs.map((run, r) => element('h3', {}, element('span', { class: 'swatch swatch-' + (r + 1) }), ' ', readable(run.name)));
  const none = byPrompt.size ? 'No completion of this step has this text.' : 'No completions were written yet.';
  beside.box.replaceChildren(...(wanted.length ? [DATA.runs.length > 1 ? columns(names) : '', ...paged(wanted, GROUPS_SHOWN, (cells) => columns(cells.map(cellOf)), 'prompts')] : [element('p', { class: 'muted' }, none)]));
}

const isPointed = (r, [number]) => beside.pointed !== null && beside.pointed.run === r && beside.pointed.group === number;
const groupsOf = (run) => (run.completions.steps.length ? run.completions.steps[0][2] : []);

function hasText(run, [, prompt, samples]) {
  const texts = [...run.completions.prompts[prompt].map(([, text]) => text), ...samples.map(([text]) => text)];
  return !beside.text || texts.some((text) => plainText(text).toLowerCase().includes(beside.text));
}

function columns(cells) {
  const row = element('div', { class: 'beside' }, cells);
  row.style.setProperty('--runs', cells.length);
  return row;
}

function cellOf(groups, r) {
  if (!groups.length) return element('p', { class: 'lacking muted' }, 'This prompt was not sampled here at step ' + whole(beside.step) + '.');
  return element('div', {}, groups.map((group) => {
    const article = groupArticle(DATA.runs[r], { step: beside.step, group, hits: null }, { text: beside.text, colouring: '' }, null);
    article.classList.toggle('pointed', isPointed(r, group));
    return article;
  }));
}

// Beside a finding stands the way to what it points at: the completions of a step.
function pointTo(item, i) {
  const { run, samples } = DATA.findings[i], mark = DATA.runs[run].marks.find(({ number }) => number === i + 1);
  const sample = /^step (\d+), group (\d+)/.exec(samples[0] || ''), step = sample ? Number(sample[1]) : mark && mark.last;
  if (!step) return;
  item.append(element('p', {}, element('button', { type: 'button', onclick: async () => {
    await attempt(showStep(step, sample && { run, group: Number(sample[2]) }));
    byId('completions').scrollIntoView();
  } }, 'Completions of step ' + whole(step))));
}

// --- the beginning

let timer = 0;
async function look() {
  timer = 0;
  let pause = document.hidden ? HIDDEN_PAUSE : PAUSE;
  try {
    const answer = await ask('/runs', []);
    list.runs = answer.runs;
    byId('subtitle').replaceChildren(...readable(answer.folder));
    showList();
    showEmpty(answer.folder);
    await follow();
    if (answer.more) pause = HURRY;
  } catch (error) {
    note.textContent = 'The board does not answer (' + error.message + '). It is asked again and again.';
  }
  timer = setTimeout(look, pause);
}

document.addEventListener('visibilitychange', () => {
  if (document.hidden) return;
  repaint();
  if (!timer) return; // it looks at this moment
  clearTimeout(timer);
  look();
});
addEventListener('hashchange', () => choose(chosenByAddress()));
// The address names the chosen runs: a link within the page scrolls, and leaves it as it is.
document.addEventListener('click', (event) => {
  const link = event.target.closest('a[href^="#"]'), target = link && byId(link.hash.slice(1));
  if (link) event.preventDefault();
  if (!target) return;
  target.scrollIntoView();
  target.tabIndex = -1;
  target.focus({ preventScroll: true });
});
setTheme(theme);
list.chosen = chosenByAddress();
look().then(() => (list.chosen.length ? attempt(showChosen()) : null));
