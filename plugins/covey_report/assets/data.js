// The data of a recipe before a run: rows by token and role, lengths, duplicates and columns.

function showSummary(body) {
  const { lengths, limit, duplicates } = DATA, [, exact, folded] = duplicates;
  const tile = (label, value, of) => element('div', { class: 'tile' }, element('dt', {}, label),
    element('dd', {}, element('strong', {}, value), of ? element('span', { class: 'was' }, ' ' + of) : null));
  body.append(element('dl', { class: 'tiles' },
    tile('Training rows', whole(DATA.train), DATA.used < DATA.train ? whole(DATA.used) + ' used' : ''),
    tile('Distinct training rows', whole(folded.distinct), exact.distinct > folded.distinct ? whole(exact.distinct) + ' with case and white space' : ''),
    tile('Held-out rows', whole(DATA.held_out), folded.held_out ? whole(folded.held_out) + ' are training rows' : 'none is a training row'),
    lengths ? tile('Tokens, median and longest', brief(lengths.median) + ' · ' + whole(lengths.longest), 'of ' + whole(limit.tokens)) : null));
  if (!DATA.findings.length) body.append(element('p', { class: 'note' }, 'Nothing wrong was found.'));
  return true;
}

// The tokens of a segment, each in an element of its own; line breaks are marked.
function tokens(texts) {
  return texts.map((text) => element('span', {}, readable(text.replaceAll('\n', '↵\n'))));
}

function showRows(body) {
  body.append(...DATA.shown.map((row) => {
    const counts = new Map();
    for (const { role, count: number } of row.segments) counts.set(role, (counts.get(role) || 0) + number);
    const total = row.segments.reduce((sum, segment) => sum + segment.count, 0);
    const parts = [...counts].map(([role, number]) => whole(number) + ' ' + escapedLine(role)).join(', ');
    return element('article', { class: 'group' },
      element('header', {}, element('h3', {}, readable(row.title)), element('span', { class: 'muted' }, count(total, 'token') + ': ' + parts)),
      element('div', { class: 'turns' }, row.segments.map(({ role, count: number, texts, tail }) =>
        element('div', { class: 'turn segment' + (role === 'template' ? ' template' : role === 'completion' ? ' learnt' : '') },
          element('span', { class: 'role' }, readable(role), ' ' + whole(number)),
          element('div', number > 300 ? { class: 'text pieces long', tabindex: 0, role: 'group', 'aria-label': 'tokens of ' + escapedLine(role) } : { class: 'text pieces' }, tokens(texts),
            tail.length ? element('em', { class: 'left-out' }, ' … ' + count(number - texts.length - tail.length, 'token') + ' left out … ') : null, tokens(tail))))));
  }));
  return DATA.shown.length > 0;
}

function showLengths(body) {
  const { lengths, limit, every } = DATA;
  if (!lengths) return false;
  const most = Math.max(...lengths.bars.map((bar) => bar.rows));
  const bar = ({ rows, over }) => {
    const made = element('span', { class: 'count' }, element('span', { class: 'fits' }), element('span', { class: 'over' }));
    made.style.setProperty('--fits', 100 * (rows - over) / most + '%');
    made.style.setProperty('--over', 100 * over / most + '%');
    return made;
  };
  const rows = lengths.bars.map((one) => [whole(one.first) + '–' + whole(one.last), numeric(whole(one.rows)), bar(one)]);
  const of = every > 1 ? 'Of one row in ' + every + ', ' + count(lengths.measured, 'row') + ': ' : '';
  body.append(
    element('p', {}, of + 'mean ' + brief(lengths.mean) + ', median ' + brief(lengths.median) + ', 99 % of the rows up to ' + brief(lengths.p99) +
      ', longest ' + whole(lengths.longest) + '. ', element('code', {}, limit.setting), ' is ' + whole(limit.tokens) + ': ' + count(lengths.over, 'row') + ' longer.'),
    table(['Tokens', numeric('Rows'), 'Share'], rows, { label: 'Lengths of the training rows' }));
  return true;
}

function showDuplicates(body) {
  body.append(table(['Equal in', numeric('Distinct'), numeric('Repeated'), numeric('Most often'), numeric('Held out and trained on')],
    DATA.duplicates.map((one) => [one.equal_in, ...[one.distinct, one.repeated, one.most, one.held_out].map((value) => numeric(whole(value)))]),
    { label: 'Duplicates' }));
  return true;
}

function showColumns(body) {
  const reader = ({ name, read_by }) => read_by.length ? escapedLine(read_by.join(', ')) : name === 'prompt' || name === 'completion' ? 'the model' : element('span', { class: 'muted' }, 'nothing');
  body.append(table(['Column', numeric('Rows'), numeric('None'), 'Read by'], DATA.columns.map((column) =>
    [element('code', {}, readable(column.name)), numeric(whole(column.filled)), numeric(whole(column.lacking)), reader(column)]), { label: 'Columns' }));
  return DATA.columns.length > 0;
}
