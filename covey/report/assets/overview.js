// The first screen: what the run was, and what came out.

function showTop() {
  const { runs } = DATA, [run] = runs;
  const title = runs.length > 1 ? count(runs.length, 'run') + ' compared' : run.name;
  byId('title').replaceChildren(...readable(title));
  byId('subtitle').replaceChildren(...readable(runs.length > 1 ? runs.map((one) => one.name).join(', ') : aboutRun(run)));
}

function aboutRun(run) {
  const method = run.method === 'sft' ? 'supervised training' : run.algorithm.toUpperCase().replace('DR_GRPO', 'Dr. GRPO');
  const [, last, planned] = run.steps;
  const steps = planned && planned !== last ? last + ' of ' + planned + ' steps' : count(last, 'step');
  const model = run.facts.find(([name]) => name === 'model');
  return [run.recipe !== run.name ? run.recipe : null, method, model ? model[1] : null, steps, run.seconds ? duration(run.seconds) : null,
    run.state === 'finished' ? null : 'not finished'].filter(Boolean).join(' \u00b7 ');
}

function edge(run, name) {
  const points = run.series[name];
  return points && points[1].length ? [points[1][0], points[1][points[1].length - 1]] : null;
}

// The figures of the first screen: label, unit, value before, value after.
function headline(run) {
  const wanted = run.method === 'sft' ? ['accuracy', 'loss'] : ['accuracy', 'reward'];
  const found = wanted.map((name) => run.figures.find((figure) => figure.name === name)).filter(Boolean)
    .map((figure) => ['Held-out ' + figure.name, figure.unit, figure.before, figure.after]);
  const metrics = run.method === 'sft' ? [['Loss', 'loss', '']] : [['Training reward', 'reward', ''], ['Completion length', 'completions/mean_length', 'tokens']];
  for (const [label, name, unit] of metrics) { const ends = edge(run, name); if (ends) found.push([label, unit, ...ends]); }
  return found.slice(0, 4);
}

function showOverview(body) {
  if (DATA.runs.length === 1) {
    const [run] = DATA.runs;
    const tiles = headline(run).map(([label, unit, before, after]) => element('div', { class: 'tile' },
      element('dt', {}, label), element('dd', {}, element('span', { class: 'was' }, inUnit(before, unit)),
        element('span', { class: 'arrow', 'aria-label': 'then' }, '\u2192'), element('strong', {}, inUnit(after, unit)))));
    body.append(element('dl', { class: 'tiles' }, tiles));
    return true;
  }
  const labels = [...new Set(DATA.runs.flatMap((run) => headline(run).map(([label]) => label)))];
  const rows = DATA.runs.map((run, r) => {
    const found = new Map(headline(run).map(([label, unit, before, after]) => [label, inUnit(before, unit) + ' \u2192 ' + inUnit(after, unit)]));
    return [element('span', { class: 'run-name' }, element('span', { class: 'swatch swatch-' + (r % 8 + 1) }), readable(run.name)), run.algorithm, numeric(whole(run.steps[1])),
      numeric(duration(run.seconds)), ...labels.map((label) => numeric(found.get(label) || '\u2013'))];
  });
  body.append(table(['Run', 'Method', numeric('Steps'), numeric('Time'), ...labels.map(numeric)], rows, { label: 'Runs' }));
  const differing = DATA.settings.filter((setting) => setting.differs);
  if (differing.length) {
    body.append(element('h3', {}, 'What differs in their recipes'),
      table(['Setting', ...DATA.runs.map((run) => escapedLine(run.name))], differing.map((setting) => [element('code', {}, escapedLine(setting.name)),
        ...setting.values.map((value) => settingValue(value, setting.default))]), { label: 'Settings that differ between the runs' }));
  }
  return true;
}
