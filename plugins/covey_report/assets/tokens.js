// Completions token by token, coloured by a value of each token. Colours repeat what the line below says in words.

const COLOURINGS = [
  ['change', 'advantage \u00d7 probability change', 'Green: the update moved the probability of the token in the direction of its advantage; red: against it.'],
  ['entropy', 'entropy', 'The stronger the colour, the less certain the policy was at the token.'],
  ['kl', 'KL to the reference', 'The stronger the colour, the further the policy was from the reference at the token.'],
];
const TOKEN_PARTS = { texts: 1, advantage: 2, logps: 3, change: 4, entropy: 5, kl: 6, inserted: 7 };
const STRONGEST = 0.95; // quantile of the values of a group that gets the full colour: one outlier does not pale the others

const tokenRows = (run, step, number) => run.tokens.groups[step + '-' + number] || null;
const tokenSteps = (run) => [...new Set(Object.keys(run.tokens.groups).map((key) => Number(key.split('-')[0])))].sort((a, b) => a - b);
const tokenPart = (row, name) => row[TOKEN_PARTS[name]];
const advantageAt = (row, i) => (Array.isArray(tokenPart(row, 'advantage')) ? tokenPart(row, 'advantage')[i] : tokenPart(row, 'advantage'));

function colourings(run) {
  const rows = Object.values(run.tokens.groups).flat();
  return COLOURINGS.filter(([name]) => rows.some((row) => tokenPart(row, name)));
}

// The value of a token by which it is coloured; null where there is none.
function tokenValue(row, colouring, i) {
  const values = tokenPart(row, colouring);
  if (!values || values[i] === null || tokenPart(row, 'inserted').includes(i)) return null;
  const advantage = advantageAt(row, i);
  return colouring === 'change' ? (advantage === null ? null : advantage * Math.expm1(values[i])) : Math.abs(values[i]);
}

function strongestValue(rows, colouring) {
  const sizes = rows.flatMap((row) => tokenPart(row, 'texts').map((_, i) => Math.abs(tokenValue(row, colouring, i) || 0))).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor(STRONGEST * (sizes.length - 1))] || sizes[sizes.length - 1] : 0;
}

function colouringNote(rows, colouring) {
  const [, name, meaning] = COLOURINGS.find(([one]) => one === colouring);
  return element('p', { class: 'muted note' }, meaning + ' Full colour: ' + brief(strongestValue(rows, colouring)) + (colouring === 'change' ? '' : ' nats') +
    ' or more of ' + name + '.' + (rows.some((row) => tokenPart(row, 'inserted').length) ? ' Underlined tokens are not the model\u2019s own.' : ''));
}

// What is known about a token, in words.
function tokenText(row, i) {
  const text = tokenPart(row, 'texts')[i], said = text === '' ? 'part of a character' : '\u201c' + escapedLine(text.replaceAll('\n', '\u23ce')) + '\u201d';
  if (tokenPart(row, 'inserted').includes(i)) return said + ': inserted, not by the model';
  const at = (name) => (tokenPart(row, name) ? tokenPart(row, name)[i] : null);
  const chance = at('logps') === null ? null : Math.exp(at('logps')), factor = at('change') === null ? null : Math.exp(at('change'));
  const advantage = advantageAt(row, i);
  return said + ': ' + [
    chance === null ? null : 'probability ' + percent(chance) + (factor === null ? '' : ' \u2192 ' + percent(Math.min(1, chance * factor))),
    factor === null ? null : signed(at('change')) + ' in log-prob',
    advantage === null ? null : 'advantage ' + signed(advantage),
    at('entropy') === null ? null : 'entropy ' + brief(at('entropy')) + ' nats',
    at('kl') === null ? null : 'KL ' + brief(at('kl')) + ' nats',
  ].filter(Boolean).join(' \u00b7 ');
}

const percent = (share) => (100 * share).toLocaleString('en-US', { maximumSignificantDigits: 3 }) + '\u202f%';

// The tokens of a completion as one block: the pointer or the arrow keys choose a token, and the line below describes it.
function tokenBlock(row, colouring, strongest, length, label, wanted) {
  const texts = tokenPart(row, 'texts'), about = element('p', { class: 'muted small token-values' }, 'Point at a token, or use the arrow keys.');
  const spans = texts.map((text, i) => {
    const value = tokenValue(row, colouring, i), tone = value === null ? '' : colouring === 'change' ? (value < 0 ? 'against' : 'along') : 'plain';
    const span = element('span', { class: 'token ' + tone + (tokenPart(row, 'inserted').includes(i) ? ' inserted' : '') }, text === '' ? '\u00b7' : readable(text, wanted));
    if (value !== null && strongest > 0) span.style.setProperty('--heat', (100 * Math.min(1, Math.abs(value) / strongest)).toFixed(0) + '%');
    return span;
  });
  let current = -1;
  const choose = (i) => {
    if (current >= 0) spans[current].classList.remove('current');
    current = i;
    spans[i].classList.add('current');
    about.textContent = tokenText(row, i);
  };
  const keys = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    choose(Math.min(texts.length - 1, Math.max(0, current + by)));
    say(about.textContent);
  };
  const point = (event) => {
    const i = spans.indexOf(event.target.closest('.token'));
    if (i >= 0) choose(i);
  };
  const rest = length !== null && length > texts.length ? element('span', { class: 'left-out' }, ' \u2026 ' + count(length - texts.length, 'token') + ' more \u2026') : null;
  const block = element('div', { class: 'text long tokens', tabindex: 0, role: 'group', 'aria-label': label + ', token by token: arrow keys read the values', onkeydown: keys, onpointerover: point }, spans, rest);
  return [block, about];
}
