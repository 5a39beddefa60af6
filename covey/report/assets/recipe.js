// The recipe, and what the run recorded about itself.

function settingValue(value, standard) {
  if (value === null) return element('span', { class: 'muted' }, 'no such setting');
  return element('code', { class: value === standard ? 'same' : 'other' }, readable(value));
}

function showRecipe(body) {
  const all = DATA.settings;
  if (!all.length) return false;
  const box = element('div', {});
  const show = (everything) => {
    const rows = all.filter((setting) => everything || setting.changed);
    box.replaceChildren(rows.length ? table(['Setting', ...(DATA.runs.length > 1 ? DATA.runs.map((run) => escapedLine(run.name)) : ['Value']), 'Default'],
      rows.map((setting) => [element('code', {}, escapedLine(setting.name)), ...setting.values.map((value) => settingValue(value, setting.default)),
        setting.default === null ? element('span', { class: 'muted' }, 'none') : element('code', { class: 'same' }, readable(setting.default))]), { label: 'Settings' })
      : element('p', {}, 'Every setting has its default.'));
  };
  const changed = all.filter((setting) => setting.changed).length;
  body.append(element('div', { class: 'tools' }, labelled('Show', choice([['', 'the ' + whole(changed) + ' that differ from the default'],
    ['all', 'all ' + whole(all.length) + ' settings']], '', (value) => show(value === 'all')))), box);
  show(false);
  return true;
}

function showRecord(body) {
  for (const run of DATA.runs) {
    if (DATA.runs.length > 1) body.append(element('h3', {}, readable(run.name)));
    body.append(run.facts.length ? element('dl', { class: 'facts' }, run.facts.map(([name, text]) => [element('dt', {}, readable(name)), element('dd', {}, readable(text))]))
      : element('p', { class: 'muted' }, 'The run has recorded nothing about its model and machine yet.'));
    const notes = leftOut(run);
    if (notes.length) body.append(element('h3', {}, (DATA.runs.length > 1 ? escapedLine(run.name) + ': ' : '') + 'left out of this page'), element('ul', {}, notes.map((note) => element('li', {}, note))));
  }
  body.append(element('p', { class: 'muted note' }, 'Written by Covey ' + DATA.covey + ' at ' + DATA.written.replace('T', ' ').replace('+00:00', ' UTC') +
    '. The page holds prompts, completions and settings of the run: whoever gets the file can read them. Charts: uPlot 1.6.32, \u00a9 2022 Leon Sorokin, MIT licence.'));
  return true;
}

function leftOut(run) {
  const notes = [], { total, kept } = run.completions;
  if (kept.groups < total.groups) notes.push('Completions: ' + whole(kept.groups) + ' of ' + count(total.groups, 'group') + ' are here, from ' + whole(kept.steps) + ' of ' + count(total.steps, 'step') + ', evenly spaced. All are in samples.jsonl.');
  const longest = Math.max(0, ...Object.values(run.series).map(([steps]) => steps.length));
  if (run.steps[0] > longest) notes.push('Curves: at most ' + whole(longest) + ' of ' + count(run.steps[0], 'point') + ' per metric are here, with the lowest and the highest value of each range of steps. All are in metrics.jsonl.');
  if (run.questions.rows.length < run.questions.total) notes.push('Held-out questions: the text of ' + whole(run.questions.rows.length) + ' of ' + whole(run.questions.total) + ' is here; those that changed come first.');
  for (const [file, lines] of Object.entries(run.unreadable)) notes.push(escapedLine(file) + ': ' + count(lines, 'line') + ' could not be read.');
  return notes;
}
