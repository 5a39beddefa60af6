// The completions of training: groups side by side, chosen by step, prompt, reward and text. Only what is asked for is
// made into elements.

const GROUPS_SHOWN = 6;
const SHORT_CHAT = 3; // number of messages of a prompt up to which all are shown at once

function showCompletions(body) {
  const runs = DATA.runs.filter((run) => run.completions.steps.length);
  if (!runs.length) return false;
  const box = element('div', {}), runChoice = choice(runs.map((run, i) => [i, escapedLine(run.name)]), 0, (i) => pick(Number(i)));
  const pick = (i, link) => box.replaceChildren(...completionBrowser(runs[i], link));
  if (runs.length > 1) body.append(element('div', { class: 'tools' }, labelled('Run', runChoice)));
  body.append(box);
  pick(0);
  openGroup = (link) => {
    const i = runs.indexOf(DATA.runs[link.run]);
    if (i < 0) return;
    runChoice.value = String(i);
    pick(i, link);
    const article = box.querySelector('.linked');
    (article || box).scrollIntoView();
    if (article) article.focus({ preventScroll: true });
  };
  return true;
}

// Open a group by its address, #step=24&group=3, with &run=1 for the second run.
let openGroup = () => {};
function openAddress() {
  const parts = new URLSearchParams(location.hash.slice(1)), at = (name) => Number(parts.get(name));
  if (parts.has('step') && parts.has('group')) openGroup({ run: at('run'), step: at('step'), group: at('group') });
}

function addressOf(run, step, number) {
  const r = DATA.runs.indexOf(run);
  return '#step=' + step + '&group=' + number + (r > 0 ? '&run=' + r : '');
}

function completionBrowser(run, link) {
  const { steps, total, kept } = run.completions, isKept = link && steps.some(([step, , groups]) => step === link.step && groups.some(([number]) => number === link.group));
  const wanted = { step: isKept ? link.step : steps[steps.length - 1][0], prompt: null, text: '', low: null, high: null, order: 'file', colouring: '', link: isKept ? link : null };
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
    if (promptChoice) promptChoice.value = prompt === null ? '' : String(prompt);
    if (prompt !== null) { wanted.step = null; stepChoice.value = 'all'; }
    show();
  };
  const repeated = repeatedPrompts(run), promptChoice = !repeated.length ? null
    : choice([['', 'all'], ...repeated.map(([prompt, places]) => [prompt, promptExcerpt(run, prompt) + ' (' + places + '\u00d7)'])], '', (value) => follow(value === '' ? null : Number(value)));
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
    const lost = link && !isKept ? element('p', { class: 'note' }, 'Group ' + whole(link.group) + ' of step ' + whole(link.step) + ' is not on this page.') : '';
    const first = wanted.link ? groups.findIndex(({ step, group }) => step === wanted.link.step && group[0] === wanted.link.group) + 1 : 0;
    const clear = wanted.prompt === null || repeated.some(([prompt]) => prompt === wanted.prompt) ? null : element('button', { type: 'button', class: 'filter', 'aria-pressed': 'true', onclick: () => follow(null) }, 'one prompt \u00d7');
    const lacking = wanted.colouring && wanted.step !== null && !withValues.includes(wanted.step);
    const jump = lacking ? element('p', { class: 'muted note' }, 'No tokens were scored at this step; of ' + count(withValues.length, 'step') + ' one group was. ',
      element('button', { type: 'button', onclick: () => goTo(nearestStep(withValues, wanted.step)) }, 'Go to step ' + whole(nearestStep(withValues, wanted.step)))) : '';
    results.replaceChildren(lost, element('p', { class: 'muted note', role: 'status' }, about + rest), clear || '', wanted.prompt === null ? '' : promptCourse(run, wanted.prompt), jump,
      ...paged(groups, Math.max(GROUPS_SHOWN, first), (group) => groupArticle(run, group, wanted, follow), 'groups'));
  };
  show();
  return [element('div', { class: 'tools' }, labelled('Step', stepChoice),
    element('button', { type: 'button', 'aria-label': 'Previous step', onclick: () => move(-1) }, '\u2190'),
    element('button', { type: 'button', 'aria-label': 'Next step', onclick: () => move(1) }, '\u2192'),
    promptChoice ? labelled('Prompt', promptChoice) : '', labelled('Search', search), labelled('Reward from', bound('low')), labelled('to', bound('high')), labelled('Order', order), colour || ''), results];
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

// Prompts that were sampled more than once, `[prompt, times]`, the most frequent first.
const PROMPTS_OFFERED = 200;
function repeatedPrompts(run) {
  const times = new Map();
  for (const [, , groups] of run.completions.steps) for (const [, prompt] of groups) times.set(prompt, (times.get(prompt) || 0) + 1);
  return [...times].filter(([, places]) => places > 1).sort(([, a], [, b]) => b - a).slice(0, PROMPTS_OFFERED);
}

function excerpt(text, length) {
  const line = escapedLine(text.replace(/\s+/g, ' ').trim());
  return line.length > length ? line.slice(0, length) + '\u2026' : line;
}

const promptExcerpt = (run, prompt) => excerpt(plainText(run.completions.prompts[prompt].at(-1)[1]), 50);

// One prompt over the steps: mean reward and completions, and those of the evaluations if it is held out.
function promptCourse(run, prompt) {
  const rows = [], turnsOf = JSON.stringify(run.completions.prompts[prompt]), { questions } = run;
  const line = (where, samples) => {
    const rewards = samples.map(([, reward]) => reward).filter((reward) => reward !== null);
    const some = foldedSamples(samples).sort((a, b) => b.indices.length - a.indices.length).map(({ sample: [text], indices }) => (indices.length > 1 ? indices.length + ' \u00d7 ' : '') + (excerpt(plainText(text), 40) || '(empty)'));
    rows.push([where, numeric(rewards.length ? brief(rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length) : '\u2013'), some.slice(0, 4).join(' \u00b7 ') + (some.length > 4 ? ' \u00b7 \u2026' : '')]);
  };
  const asked = ((questions || {}).rows || []).find(([number]) => JSON.stringify(questions.prompts[number]) === turnsOf);
  if (asked && asked[3].length) line('before training', asked[3]);
  for (const [step, , groups] of run.completions.steps) for (const [number, one, samples] of groups) {
    if (one === prompt) line(element('a', { href: addressOf(run, step, number) }, 'step ' + whole(step) + ', group ' + number), samples);
  }
  if (asked && asked[4].length) line('after training', asked[4]);
  return table(['One prompt', numeric('Mean reward'), 'Completions'], rows, { label: 'One prompt over the steps' });
}

// Equal completions once, with the indices of all of them.
function foldedSamples(samples) {
  const entries = new Map();
  samples.forEach((sample, i) => {
    const key = JSON.stringify(sample.slice(0, 5));
    if (entries.has(key)) entries.get(key).indices.push(i);
    else entries.set(key, { sample, indices: [i] });
  });
  return [...entries.values()];
}

// The completions with the highest and the lowest reward, word by word.
const WORDS_COMPARED = 600;
function bestAndWorst(samples) {
  const scored = samples.filter(([, reward]) => reward !== null);
  if (!scored.length) return null;
  const [best, worst] = [1, -1].map((sign) => scored.reduce((chosen, one) => (sign * one[1] > sign * chosen[1] ? one : chosen)));
  const words = [worst, best].map(([text]) => plainText(text).match(/[\p{L}\p{N}]+\s*|[^\s\p{L}\p{N}]\s*|^\s+/gu) || []);
  if (best[1] === worst[1] || Math.max(...words.map((some) => some.length)) < 4) return null;
  const details = element('details', { class: 'compared', ontoggle: () => {
    if (details.open && details.children.length === 1) details.append(element('p', { class: 'muted note' }, element('del', {}, 'only in the worst'), ' (reward ' + brief(worst[1]) + '), ',
      element('ins', {}, 'only in the best'), ' (reward ' + brief(best[1]) + ')'), element('div', { class: 'text' }, differenceNodes(...words)));
  } }, element('summary', {}, 'Best and worst, word by word'));
  return details;
}

function differenceNodes(old, now) {
  const cut = [old, now].some((words) => words.length > WORDS_COMPARED);
  const nodes = differences(old.slice(0, WORDS_COMPARED), now.slice(0, WORDS_COMPARED)).map(([tag, words]) => (tag ? element(tag, {}, readable(words.join(''))) : readable(words.join(''))));
  return [...nodes, cut ? element('span', { class: 'left-out' }, ' \u2026 the first ' + WORDS_COMPARED + ' words and marks are compared \u2026 ') : ''];
}

// The longest common subsequence as runs `[tag, words]`: '' for words of both, 'del' and 'ins' for those of one. White
// space after a word makes no difference.
function differences(old, now) {
  const equal = (i, j) => old[i].trimEnd() === now[j].trimEnd();
  const width = now.length + 1, lengths = new Uint16Array((old.length + 1) * width);
  for (let i = old.length - 1; i >= 0; i--) for (let j = now.length - 1; j >= 0; j--) {
    lengths[i * width + j] = equal(i, j) ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
  }
  const runs = [];
  const add = (tag, word) => { if (runs.length && runs.at(-1)[0] === tag) runs.at(-1)[1].push(word); else runs.push([tag, [word]]); };
  for (let i = 0, j = 0; i < old.length || j < now.length;) {
    if (i < old.length && j < now.length && equal(i, j)) { add('', old[i++]); j++; }
    else if (j >= now.length || (i < old.length && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) add('del', old[i++]);
    else add('ins', now[j++]);
  }
  return runs;
}

function groupArticle(run, { step, group: [number, prompt, samples], hits }, wanted, follow) {
  const rewards = samples.map(([, reward]) => reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const strongest = Math.max(1e-9, ...samples.map(([, , advantage]) => Math.abs(advantage || 0)));
  const rows = wanted.colouring ? tokenRows(run, step, number) : null;
  const turnsOf = run.completions.prompts[prompt], last = turnsOf[turnsOf.length - 1];
  const others = run.completions.steps.some(([other, , groups]) => groups.some((one) => one[1] === prompt && (other !== step || one[0] !== number)));
  const name = 'Step ' + whole(step) + ', group ' + number, isLinked = wanted.link && wanted.link.step === step && wanted.link.group === number;
  return element('article', { class: isLinked ? 'group linked' : 'group', tabindex: isLinked ? -1 : null },
    element('header', {}, element('h3', {}, name), follow ? element('a', { class: 'address', href: addressOf(run, step, number), 'aria-label': 'Address of ' + name.toLowerCase() }, '#') : null,
      element('span', { class: 'muted' }, rewards.length ? 'mean reward ' + brief(mean) + (samples.some(([, , advantage]) => advantage) ? '' : ' \u00b7 advantages all 0: no signal') : 'not scored'),
      others && follow ? element('button', { type: 'button', class: 'quiet', onclick: () => follow(prompt) }, 'Same prompt at other steps') : null),
    element('div', { class: 'prompt' }, turnsOf.length > SHORT_CHAT
      ? [turns([last], wanted.text), element('details', {}, element('summary', {}, 'Whole prompt (' + turnsOf.length + ' turns)'), turns(turnsOf, wanted.text))]
      : turns(turnsOf, wanted.text)),
    rows ? colouringNote(rows, wanted.colouring) : null,
    element('div', { class: 'samples' }, foldedSamples(samples).map(({ sample, indices }) => sampleCard(run, sample, indices, strongest, hits, wanted, rows))),
    bestAndWorst(samples));
}

// Rewards by function where there are several, and the length.
function aboutSample(names, parts, length) {
  const scored = names.length > 1 ? parts.map((value, i) => (value === null ? null : escapedLine(names[i]) + ' ' + brief(value))) : [];
  return [...scored, length === null ? null : count(length, 'token')].filter(Boolean).join(' \u00b7 ');
}

function sampleCard(run, [text, reward, advantage, parts, wasCut, length], indices, strongest, hits, wanted, rows) {
  const row = rows && rows.find(([sample]) => indices.includes(sample));
  const label = indices.length > 1 ? 'completions ' + indices.map((i) => i + 1).join(', ') : 'completion ' + (indices[0] + 1);
  const tone = advantage === null || advantage === 0 ? '' : advantage > 0 ? 'good' : 'bad';
  const bar = element('span', { class: 'bar ' + tone, 'aria-hidden': 'true' }, element('span', {}));
  bar.firstChild.style.width = advantage === null ? '0' : (50 * Math.abs(advantage) / strongest).toFixed(1) + '%';
  const names = run.completions.rewards;
  return element('div', { class: 'sample ' + tone + (hits && indices.some((i) => hits.has(i)) ? ' hit' : ''), role: 'group', 'aria-label': label },
    element('p', { class: 'scores' }, indices.length > 1 ? element('span', { class: 'times' }, indices.length + '\u202f\u00d7') : null, element('strong', {}, reward === null ? 'no reward' : brief(reward)),
      advantage === null ? null : [bar, element('span', {}, element('span', { class: 'muted' }, 'advantage '), signed(advantage))]),
    row ? tokenBlock(row, wanted.colouring, strongestValue(rows, wanted.colouring), length, label, wanted.text)
      : completionBlock(text, wanted.text, label),
    element('p', { class: 'muted small about' }, aboutSample(names, parts, length), wasCut ? [' ', element('span', { class: 'chip' }, 'cut off')] : ''));
}
