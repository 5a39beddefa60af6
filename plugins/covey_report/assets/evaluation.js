// Held-out prompts before and after training: the figures, and each question.

function showEvaluation(body) {
  const runs = DATA.runs.filter((run) => run.figures.length);
  if (!runs.length) return false;
  body.append(...figuresTable(runs));
  const asked = runs.filter((run) => run.questions.total);
  if (!asked.length) return true;
  const box = element('div', {});
  const pick = (name) => box.replaceChildren(...questionBrowser(asked[Number(name)]));
  body.append(element('h3', {}, 'Question by question'));
  if (asked.length > 1) body.append(element('div', { class: 'tools' }, labelled('Run', choice(asked.map((run, i) => [i, escapedLine(run.name)]), 0, pick))));
  body.append(box);
  pick(0);
  return true;
}

function figuresTable(runs) {
  const several = runs.length > 1, names = [...new Set(runs.flatMap((run) => run.figures.map((figure) => figure.name)))];
  const columns = several ? runs.map((run) => numeric(escapedLine(run.name))) : ['Before', 'After', 'Change'].map(numeric);
  const rows = names.map((name) => {
    const found = runs.map((run) => run.figures.find((figure) => figure.name === name));
    const known = found.find(Boolean);
    const cells = several
      ? found.map((figure) => numeric(figure ? [element('div', {}, fromTo(figure)), ...changes(figure)] : '\u2013'))
      : [withError(known, runs[0], 0), withError(known, runs[0], 1), changeNodes(known.change, known.unit, known.better)].map(numeric);
    return [[element('span', { title: known.meaning }, escapedLine(name.replaceAll('_', ' ')))], ...cells];
  });
  const notes = runs.map((run) => {
    const [samples, examples] = ['samples', 'examples'].map((name) => run.counts[name]);
    const text = [[samples, 'completion'], [examples, 'example']].filter(([both]) => both[0] || both[1])
      .map(([both, noun]) => (both[0] === both[1] || both[1] === null ? count(both[0], noun) : both[0] === null ? count(both[1], noun)
        : count(both[0], noun) + ' before and ' + whole(both[1]) + ' after')).join(', ');
    return (several ? escapedLine(run.name) + ': ' : '') + text;
  });
  return [table(['Held-out prompts', ...columns], rows, { label: 'Figures before and after training' }),
    element('p', { class: 'muted note' }, 'Measured on ' + notes.join('; ') + '. \u00b1 is the standard error over prompts; that of a change is of the differences of each prompt.')];
}

// The change by training and, of all runs but the first, the difference to that one after training.
function changes(figure) {
  const against = figure.against_first ? element('div', { class: 'small' }, 'against ' + escapedLine(DATA.runs[0].name) + ' ', changeNodes(figure.against_first, figure.unit, figure.better)) : null;
  return [element('div', { class: 'small' }, changeNodes(figure.change, figure.unit, figure.better)), against];
}

function withError(figure, run, which) {
  const value = which ? figure.after : figure.before, error = run.counts.error && run.counts.error[which];
  return inUnit(value, figure.unit) + (figure.name === 'accuracy' && error && value !== null ? ' \u00b1\u202f' + inUnit(error, 'share', 2) : '');
}

const changeText = ([was, now]) => (was ? (was === now ? 'still ' + was : was + ' \u2192 ' + now) : now);

// Questions that changed come first.
const isSame = ([, was, now]) => Number(was === now || now === 'equal');

function questionBrowser(run) {
  const { questions } = run, results = element('div', {});
  const buttons = questions.changes.map(([was, now, number]) => element('button', { type: 'button', class: 'filter', 'aria-pressed': 'false',
    onclick: (event) => toggle(event.currentTarget, [was, now]) }, changeText([was, now]) + ' ', element('strong', {}, whole(number))));
  const inOrder = [...questions.rows].sort((a, b) => isSame(a) - isSame(b));
  let chosen = null;
  const search = element('input', { type: 'search', placeholder: 'prompt or completion', oninput: () => show() });
  const texts = (row) => [...questions.prompts[row[0]].map(([, text]) => text), ...row[3].map(([text]) => text), ...row[4].map(([text]) => text)];
  const toggle = (button, change) => {
    chosen = chosen && chosen.join() === change.join() ? null : change;
    for (const other of buttons) other.setAttribute('aria-pressed', String(chosen !== null && other === button));
    show();
  };
  const show = () => {
    const wanted = search.value.toLowerCase();
    const rows = inOrder.filter((row) => (!chosen || (row[1] === chosen[0] && row[2] === chosen[1])) && (!wanted || texts(row).some((text) => plainText(text).toLowerCase().includes(wanted))));
    const kept = questions.rows.length < questions.total ? ' The text of ' + whole(questions.rows.length) + ' of ' + count(questions.total, 'question') + ' is on this page; the counts are of all.' : '';
    results.replaceChildren(element('p', { class: 'muted note', role: 'status' }, count(rows.length, 'question') + ' shown.' + kept +
      (questions.judged ? '' : ' The run did not record which completions are right, so rewards are compared.')), ...paged(rows, 12, (row) => question(row, questions), 'questions'));
  };
  show();
  return [element('div', { class: 'tools' }, element('div', { class: 'tools', role: 'group', 'aria-label': 'Questions by change' }, buttons), labelled('Search', search)), results];
}

function question([prompt, was, now, before, after], questions) {
  const tone = now === 'right' || now === 'better' ? (was === 'right' ? '' : 'good') : (was === 'right' || now === 'worse') ? 'bad' : '';
  const side = (title, some) => element('div', {}, element('h5', {}, title), some.length ? foldedSamples(some).map(({ sample: [text, reward, right], indices }) => element('div', { class: 'answer' },
    completionBlock(text, '', 'completion ' + title), element('p', { class: 'muted' },
      [indices.length > 1 ? indices.length + ' \u00d7' : null, right === null ? null : right ? 'right' : 'wrong', reward === null ? null : 'reward ' + brief(reward)].filter(Boolean).join(' \u00b7 ')))) : element('p', { class: 'muted' }, 'not asked'));
  const turnsOf = questions.prompts[prompt], last = turnsOf[turnsOf.length - 1];
  return element('article', { class: 'question' }, element('div', {}, element('h4', {}, element('span', { class: 'change ' + tone }, changeText([was, now]))),
    textBlock(last[1], '', 'question'), turnsOf.length > 1 ? element('details', {}, element('summary', {}, 'whole prompt'), turns(turnsOf)) : null), side('before', before), side('after', after));
}
