// The theme and the sections of a page.

const THEMES = ['auto', 'light', 'dark'];
const onTheme = [];

function setTheme(theme) {
  if (theme === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId('theme').textContent = 'Theme: ' + theme;
  try { localStorage.setItem('covey-theme', theme); } catch { /* storage is off: the choice lasts as long as the page */ }
  onTheme.forEach((repaint) => repaint());
}

function storedTheme() {
  try { return THEMES.includes(localStorage.getItem('covey-theme')) ? localStorage.getItem('covey-theme') : 'auto'; } catch { return 'auto'; }
}

const DATA = JSON.parse(byId('data').textContent);
let theme = storedTheme();
byId('theme').addEventListener('click', () => { theme = THEMES[(THEMES.indexOf(theme) + 1) % 3]; setTheme(theme); });
addEventListener('beforeprint', () => { document.documentElement.dataset.theme = 'light'; });  // on paper everything is light
addEventListener('afterprint', () => setTheme(theme));

// Fill the sections by their functions, which tell whether there is something to show. The page defines SECTIONS.
function showSections() {
  setTheme(theme);
  for (const [id, show] of Object.entries(SECTIONS)) {
    const section = byId(id), heading = section.querySelector('h2');
    section.hidden = !show(section.querySelector('.body'));
    if (!section.hidden) byId('contents').append(element('a', { href: '#' + id }, heading.textContent));
  }
}
