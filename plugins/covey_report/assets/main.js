// Put the report together.

DATA.runs.forEach((run, i) => Object.assign(run, JSON.parse(byId('texts-' + i).textContent)));

// On paper every chart that is in an open section is drawn.
addEventListener('beforeprint', () => {
  readColours();
  for (const figure of document.querySelectorAll('figure.chart')) if (figure.offsetParent) figure.chart.draw();
  repaint();
});

showTop();
showSections();
addEventListener('hashchange', openAddress);
openAddress();
