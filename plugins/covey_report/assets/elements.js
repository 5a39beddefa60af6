// Elements and text. Every text goes into the page as a text node; markup is never parsed.

// Make an element: attributes by name, `on...` as listeners; strings among the children become text nodes.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== ''));
  return made;
}

// Characters that cannot be seen, or change the direction of text: they are shown as escapes.
const HIDDEN = new RegExp(
  '[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u115f\\u1160\\u180e\\u200b-\\u200f\\u2028-\\u202e' +
    '\\u2060-\\u206f\\u3164\\ufeff\\ufff0-\\ufffb\\ud800-\\udfff]+|[\\u{e0000}-\\u{e007f}]+', 'gu');

const escaped = (text) => Array.from(text, (c) => {
  const code = c.codePointAt(0);
  return code < 0x100 ? '\\x' + code.toString(16).padStart(2, '0')
    : code < 0x10000 ? '\\u' + code.toString(16).padStart(4, '0') : '\\u{' + code.toString(16) + '}';
}).join('');

// Return a text as nodes: hidden characters as escapes in spans, and occurrences of `wanted` marked.
function readable(text, wanted) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(HIDDEN)) {
    nodes.push(...marked(text.slice(from, found.index), wanted));
    nodes.push(element('span', { class: 'hidden-character', title: 'characters that cannot be seen' }, escaped(found[0])));
    from = found.index + found[0].length;
  }
  nodes.push(...marked(text.slice(from), wanted));
  return nodes;
}

function marked(text, wanted) {
  if (!wanted) return [text];
  const nodes = [], lower = text.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(wanted); at >= 0 && nodes.length < 400; at = lower.indexOf(wanted, from)) {
    nodes.push(text.slice(from, at), element('mark', {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  nodes.push(text.slice(from));
  return nodes;
}

// A text of a run: a string, or [head, number of characters left out, tail].
function textNodes(text, wanted) {
  if (typeof text === 'string') {
    return text.trim() ? readable(text, wanted) : [element('span', { class: 'muted' }, text ? '(white space)' : '(empty)')];
  }
  const note = ' … ' + whole(text[1]) + ' characters are left out of this page … ';
  return [...readable(text[0], wanted), element('span', { class: 'left-out' }, note), ...readable(text[2], wanted)];
}

const plainText = (text) => (typeof text === 'string' ? text : text.turns ? text.turns.map(([, said]) => plainText(said)).join('\n') : text[0] + '\n' + text[2]);
const textLength = (text) => (typeof text === 'string' ? text.length : text[0].length + text[2].length);

// A block of text; a long one scrolls, and can be reached by keyboard for that.
function textBlock(text, wanted, label) {
  const long = textLength(text) > 700;
  const attributes = long ? { class: 'text long', tabindex: 0, role: 'group', 'aria-label': label } : { class: 'text' };
  return element('div', attributes, textNodes(text, wanted));
}

function turns(prompt, wanted) {
  return element('div', { class: 'turns' }, prompt.map(([role, text]) =>
    element('div', { class: 'turn' }, role ? element('span', { class: 'role' }, readable(String(role))) : null,
      textBlock(text, wanted, role ? 'message of ' + escapedLine(String(role)) : 'prompt'))));
}

// A completion: its text, or the turns of its episode, each with its role, and those of the model with reward and tokens.
function completionBlock(text, wanted, label) {
  if (!text.turns) return textBlock(text, wanted, label);
  const known = (value) => value !== null && value !== undefined;
  const measured = text.turns.some(([, , , tokens]) => known(tokens));
  return element('div', { class: 'conversation', role: 'group', 'aria-label': label }, text.turns.map(([role, said, reward, tokens], i) => {
    // What is inserted before a turn of the model belongs to the last message before it; a last message is not inserted.
    const next = text.turns[i + 1], inserted = role === 'assistant' || !next ? null : next[4];
    const notes = [
      known(reward) ? 'reward ' + brief(reward) : null,
      known(tokens) ? count(tokens, 'token') : inserted > 0 ? count(inserted, 'token') : null,
      measured && !next && role !== 'assistant' ? 'not shown to the model' : null,
    ].filter(Boolean).join(' \u00b7 ');
    return element('div', { class: 'message' + (role === 'assistant' ? ' own' : '') },
      element('p', { class: 'role' }, element('strong', {}, readable(String(role))), notes ? ' \u00b7 ' + notes : ''),
      textBlock(said, wanted, 'message of ' + escapedLine(String(role))));
  }));
}

const escapedLine = (text) => text.replace(HIDDEN, escaped);

function table(headings, rows, attributes) {
  const cell = (tag, content, extra) => {
    const numeric = content && content.number !== undefined;
    return element(tag, { class: numeric ? 'number' : null, ...extra }, numeric ? content.number : content);
  };
  return element('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': (attributes || {}).label || 'table' },
    element('table', {},
      element('thead', {}, element('tr', {}, headings.map((heading) => cell('th', heading, { scope: 'col' })))),
      element('tbody', {}, rows.map((row) => element('tr', {}, row.map((one, i) =>
        i ? cell('td', one) : cell('th', one, { scope: 'row' })))))));
}

const numeric = (text) => ({ number: text });
const byId = (id) => document.getElementById(id);
const say = (text) => { byId('spoken').textContent = text; };

let labels = 0;
// A control with its label in front of it.
function labelled(text, control) {
  control.id = control.id || 'control-' + ++labels;
  return element('span', { class: 'control' }, element('label', { for: control.id }, text), control);
}

function choice(options, chosen, onchange) {
  return element('select', { onchange: (event) => onchange(event.target.value) }, options.map(([value, text]) =>
    element('option', { value, selected: String(value) === String(chosen) }, text)));
}

// Show `items` by `draw`, `size` at a time: a button adds more.
function paged(items, size, draw, what) {
  const list = element('div', { class: 'paged' }), foot = element('div', { class: 'more' });
  let shown = 0;
  const more = () => {
    const from = shown;
    shown = Math.min(items.length, shown + size);
    const made = items.slice(from, shown).map(draw);
    list.append(...made);
    foot.replaceChildren();
    if (shown < items.length) {
      const text = 'Show ' + whole(Math.min(size, items.length - shown)) + ' more of ' + whole(items.length - shown) + ' ' + what;
      foot.append(element('button', { type: 'button', onclick: () => {
        more();
        const next = list.children[from + size];
        if (next) { next.tabIndex = -1; next.focus({ preventScroll: true }); }
      } }, text));
    }
  };
  more();
  return [list, foot];
}
