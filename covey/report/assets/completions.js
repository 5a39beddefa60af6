// The completions of training: groups side by side, chosen by step, prompt, reward and text. Only what is asked for is
// made into elements.

const GROUPS_SHOWN = 6;
const SHORT_CHAT = 3; // number of messages of a prompt up to which all are shown at once

function showCompletions(body) {
  const runs = DATA.runs.filter((run) => run.completions.steps.length);
  if (!runs.length) return false;
  const box = element('div', {});
  const pick = (i) => box.replaceChildren(...completionBrowser(runs[Number(i)]));
  if (runs.length > 1) body.append(element('div', { class: 'tools' }, labelled('Run', choice(runs.map((run, i) => [i, escapedLine(run.name)]), 0, pick))));
  body.append(box);
  pick(0);
  return true;
}

function completionBrowser(run) {
  const { steps, prompts, total, kept } = run.completions;
  const wanted = { step: steps[steps.length - 1][0], prompt: null, text: '', low: null, high: null, order: 'file', colouring: '' };
  const results = element('div', {});
  const stepChoice = choice([['all', 'all steps'], ...steps.map(([step]) => [step, 'step ' + whole(step)])], wanted.step, (value) => {
    wanted.step = value === 'all' ? null : Number(value);
    show();
  });
  const move = (by) => {
    const at = steps.findIndex(([step]) => step === wanted.step);
    const next = at < 0 ? (by > 0 ? 0 : steps.length - 1) : Math.min(steps.length - 1, Math.max(0, at + by));
    wanted.step = steps[next][0];
    stepChoice.value = String(wanted.step);
    show();
  };
  let waiting = 0;
  const later = () => { clearTimeout(waiting); waiting = setTimeout(show, 120); };
  const search = element('input', { type: 'search', placeholder: 'prompt or completion', oninput: () => { wanted.text = search.value.toLowerCase(); later(); } });
  const bound = (name) => element('input', { type: 'number', step: 'any', inputmode: 'decimal', class: 'short',
    oninput: (event) => { wanted[name] = event.target.value === '' ? null : Number(event.target.value); later(); } });
  const order = choice([['file', 'as sampled'], ['spread', 'largest spread first'], ['low', 'lowest reward first'], ['high', 'highest reward first']], 'file',
    (value) => { wanted.order = value; show(); });
  const follow = (prompt) => {
    wanted.prompt = prompt;
    if (prompt !== null) { wanted.step = null; stepChoice.value = 'all'; }
    show();
  };
  const colours = colourings(run), withValues = tokenSteps(run);
  const goTo = (step) => {
    wanted.step = step;
    stepChoice.value = String(step);
    show();
  };
  const colour = !colours.length ? null : labelled('Colour by', choice([['', 'nothing'], ...colours], '', (value) => {
    wanted.colouring = value;
    if (value && wanted.step !== null && !withValues.includes(wanted.step)) goTo(nearestStep(withValues, wanted.step));
    else show();
  }));
  const show = () => {
    const groups = chosenGroups(run, wanted);
    const about = count(groups.length, 'group') + (wanted.step === null ? ' of all steps' : ' of step ' + whole(wanted.step)) + ' shown.';
    const rest = kept.groups < total.groups ? ' This page keeps ' + whole(kept.groups) + ' of ' + whole(total.groups) + ' groups, from ' + whole(kept.steps) + ' of ' + whole(total.steps) + ' steps; search looks at these.' : '';
    const clear = wanted.prompt === null ? null : element('button', { type: 'button', class: 'filter', 'aria-pressed': 'true', onclick: () => follow(null) }, 'one prompt \u00d7');
    const lacking = wanted.colouring && wanted.step !== null && !withValues.includes(wanted.step);
    const jump = lacking ? element('p', { class: 'muted note' }, 'No tokens were scored at this step; of ' + count(withValues.length, 'step') + ' one group was. ',
      element('button', { type: 'button', onclick: () => goTo(nearestStep(withValues, wanted.step)) }, 'Go to step ' + whole(nearestStep(withValues, wanted.step)))) : '';
    results.replaceChildren(element('p', { class: 'muted note', role: 'status' }, about + rest), clear || '', jump,
      ...paged(groups, GROUPS_SHOWN, (group) => groupArticle(run, group, wanted, follow), 'groups'));
  };
  show();
  return [element('div', { class: 'tools' }, labelled('Step', stepChoice),
    element('button', { type: 'button', 'aria-label': 'Previous step', onclick: () => move(-1) }, '\u2190'),
    element('button', { type: 'button', 'aria-label': 'Next step', onclick: () => move(1) }, '\u2192'),
    labelled('Search', search), labelled('Reward from', bound('low')), labelled('to', bound('high')), labelled('Order', order), colour || ''), results];
}

const nearestStep = (steps, step) => steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));

// The groups that meet the filters, each `{step, group, hits}`: hits are the samples that do.
function chosenGroups(run, wanted) {
  const { steps, prompts } = run.completions, found = [];
  const filtered = wanted.text !== '' || wanted.low !== null || wanted.high !== null;
  const promptHas = new Map();
  const inPrompt = (number) => {
    if (!promptHas.has(number)) promptHas.set(number, prompts[number].some(([, text]) => plainText(text).toLowerCase().includes(wanted.text)));
    return promptHas.get(number);
  };
  for (const [step, , groups] of steps) {
    if (wanted.step !== null && step !== wanted.step) continue;
    for (const group of groups) {
      if (wanted.prompt !== null && group[1] !== wanted.prompt) continue;
      const hits = new Set();
      group[2].forEach(([text, reward], i) => {
        if (wanted.low !== null && !(reward !== null && reward >= wanted.low)) return;
        if (wanted.high !== null && !(reward !== null && reward <= wanted.high)) return;
        if (wanted.text && !plainText(text).toLowerCase().includes(wanted.text) && !inPrompt(group[1])) return;
        hits.add(i);
      });
      if (hits.size) found.push({ step, group, hits: filtered ? hits : null });
    }
  }
  const rewards = (entry) => entry.group[2].map(([, reward]) => reward).filter((reward) => reward !== null);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const keys = { spread: (values) => Math.min(...values) - Math.max(...values), low: mean, high: (values) => -mean(values) };
  if (keys[wanted.order]) {
    const key = new Map(found.map((entry) => { const values = rewards(entry); return [entry, values.length ? keys[wanted.order](values) : Infinity]; }));
    found.sort((a, b) => key.get(a) - key.get(b));
  }
  if (wanted.colouring) {
    const lacks = ({ step, group }) => Number(!tokenRows(run, step, group[0]));
    found.sort((a, b) => lacks(a) - lacks(b));
  }
  return found;
}

function groupArticle(run, { step, group: [number, prompt, samples], hits }, wanted, follow) {
  const rewards = samples.map(([, reward]) => reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const strongest = Math.max(1e-9, ...samples.map(([, , advantage]) => Math.abs(advantage || 0)));
  const rows = wanted.colouring ? tokenRows(run, step, number) : null;
  const turnsOf = run.completions.prompts[prompt], last = turnsOf[turnsOf.length - 1];
  const others = run.completions.steps.some(([other, , groups]) => groups.some((one) => one[1] === prompt && (other !== step || one[0] !== number)));
  return element('article', { class: 'group' },
    element('header', {}, element('h3', {}, 'Step ' + whole(step) + ', group ' + number),
      element('span', { class: 'muted' }, rewards.length ? 'mean reward ' + brief(mean) + (samples.some(([, , advantage]) => advantage) ? '' : ' \u00b7 advantages all 0: no signal') : 'not scored'),
      others && follow ? element('button', { type: 'button', class: 'quiet', onclick: () => follow(prompt) }, 'Same prompt at other steps') : null),
    element('div', { class: 'prompt' }, turnsOf.length > SHORT_CHAT
      ? [turns([last], wanted.text), element('details', {}, element('summary', {}, 'Whole prompt (' + turnsOf.length + ' turns)'), turns(turnsOf, wanted.text))]
      : turns(turnsOf, wanted.text)),
    rows ? colouringNote(rows, wanted.colouring) : null,
    element('div', { class: 'samples' }, samples.map((sample, i) => sampleCard(run, sample, i, strongest, hits, wanted, rows))));
}

// Rewards by function where there are several, and the length.
function aboutSample(names, parts, length) {
  const scored = names.length > 1 ? parts.map((value, i) => (value === null ? null : escapedLine(names[i]) + ' ' + brief(value))) : [];
  return [...scored, length === null ? null : count(length, 'token')].filter(Boolean).join(' \u00b7 ');
}

function sampleCard(run, [text, reward, advantage, parts, wasCut, length], i, strongest, hits, wanted, rows) {
  const row = rows && rows.find(([sample]) => sample === i);
  const tone = advantage === null || advantage === 0 ? '' : advantage > 0 ? 'good' : 'bad';
  const bar = element('span', { class: 'bar ' + tone, 'aria-hidden': 'true' }, element('span', {}));
  bar.firstChild.style.width = advantage === null ? '0' : (50 * Math.abs(advantage) / strongest).toFixed(1) + '%';
  const names = run.completions.rewards;
  return element('div', { class: 'sample ' + tone + (hits && hits.has(i) ? ' hit' : ''), role: 'group', 'aria-label': 'completion ' + (i + 1) },
    element('p', { class: 'scores' }, element('strong', {}, reward === null ? 'no reward' : brief(reward)),
      advantage === null ? null : [bar, element('span', {}, element('span', { class: 'muted' }, 'advantage '), signed(advantage))]),
    row ? tokenBlock(row, wanted.colouring, strongestValue(rows, wanted.colouring), length, 'completion ' + (i + 1), wanted.text)
      : completionBlock(text, wanted.text, 'completion ' + (i + 1)),
    element('p', { class: 'muted small about' }, aboutSample(names, parts, length), wasCut ? [' ', element('span', { class: 'chip' }, 'cut off')] : ''));
}
