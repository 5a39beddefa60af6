// The recipe, and what the run recorded about itself.

function settingValue(value, standard) {
  if (value === null) return element('span', { class: 'muted' }, 'no such setting');
  return element('code', { class: value === standard ? 'same' : 'other' }, readable(value));
}

function showRecipe(body) {
  const all = DATA.settings;
  if (!all.length) return false;
  const box = element('div', {});
  const name = DATA.runs[0].recipe, others = DATA.runs.some((run) => run.recipe !== name);
  const views = {
    default: ['changed from the default', 'Default', 'default', all.filter((setting) => setting.changed)],
    recipe: ['changed from the built-in recipe' + (others ? '' : ' ' + escapedLine(name)), 'Built-in', 'built_in', all.filter((setting) => setting.edited)],
    all: ['all', 'Default', 'default', all],
  };
  const show = (chosen) => {
    const [, heading, key, settings] = views[chosen];
    const rows = settings.map((setting) => [element('code', {}, escapedLine(setting.name)),
      ...setting.values.map((value) => settingValue(value, setting[key])),
      setting[key] === null ? element('span', { class: 'muted' }, 'none') : element('code', { class: 'same' }, readable(setting[key]))]);
    const values = DATA.runs.length > 1 ? DATA.runs.map((run) => escapedLine(run.name)) : ['Value'];
    box.replaceChildren(rows.length ? table(['Setting', ...values, heading], rows, { label: 'Settings' }) : element('p', {}, 'No setting differs.'));
  };
  const known = all.some((setting) => setting.built_in !== null);
  const options = Object.entries(views).filter(([key]) => key !== 'recipe' || known).map(([key, [what, , , settings]]) =>
    [key, what + ' (' + whole(settings.length) + ')']);
  body.append(element('div', { class: 'tools' }, labelled('Settings', choice(options, 'default', show))), box);
  show('default');
  return true;
}

// Commands that go on from each run, to copy.
function showCommands(body) {
  for (const run of DATA.runs) {
    if (DATA.runs.length > 1 && run.commands.length) body.append(element('h3', {}, readable(run.name)));
    if (run.commands.length) body.append(element('dl', { class: 'commands' }, run.commands.map(([purpose, command]) => {
      const code = element('code', {}, readable(command));
      return [element('dt', {}, purpose), element('dd', {}, code, element('button', { type: 'button', 'aria-label': 'Copy: ' + escapedLine(command), onclick: (event) => copy(command, code, event.currentTarget) }, 'Copy'))];
    })));
  }
  return DATA.runs.some((run) => run.commands.length);
}

// Copy a text; where the browser does not allow it, select it.
async function copy(text, node, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = 'Copied';
  } catch {
    getSelection().selectAllChildren(node);
    button.textContent = 'Selected';
  }
  say(button.textContent);
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
    '. ' + (DATA.public ? 'It is without prompts, completions, paths, names and texts of the user, by covey report --public.'
      : 'The page holds prompts, so text of the data, completions and settings of the run: whoever gets the file can read them, and to publish it is to publish them.') + ' Charts: uPlot 1.6.32, \u00a9 2022 Leon Sorokin, MIT licence.'));
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
