// Put the page together.

const THEMES = ['auto', 'light', 'dark'];

function setTheme(theme) {
  if (theme === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId('theme').textContent = 'Theme: ' + theme;
  try { localStorage.setItem('covey-theme', theme); } catch { /* storage is off: the choice lasts as long as the page */ }
  repaint();
}

function storedTheme() {
  try { return THEMES.includes(localStorage.getItem('covey-theme')) ? localStorage.getItem('covey-theme') : 'auto'; } catch { return 'auto'; }
}

function repaint() {
  readColours();
  for (const chart of drawn) chart.u.redraw(true, true);
}

const DATA = JSON.parse(byId('data').textContent);
DATA.runs.forEach((run, i) => Object.assign(run, JSON.parse(byId('texts-' + i).textContent)));
let theme = storedTheme();
byId('theme').addEventListener('click', () => { theme = THEMES[(THEMES.indexOf(theme) + 1) % 3]; setTheme(theme); });
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaint);

// On paper everything is light, and every chart that is in an open section is drawn.
addEventListener('beforeprint', () => {
  document.documentElement.dataset.theme = 'light';
  readColours();
  for (const figure of document.querySelectorAll('figure.chart')) if (figure.offsetParent) figure.chart.draw();
  repaint();
});
addEventListener('afterprint', () => setTheme(theme));

setTheme(theme);
showTop();
const SECTIONS = { diagnosis: showDiagnosis, overview: showOverview, curves: showCurves, evaluation: showEvaluation,
  completions: showCompletions, recipe: showRecipe, record: showRecord };
for (const [id, show] of Object.entries(SECTIONS)) {
  const section = byId(id), heading = section.querySelector('h2');
  section.hidden = !show(section.querySelector('.body'));
  if (!section.hidden) byId('contents').append(element('a', { href: '#' + id }, heading.textContent));
}
