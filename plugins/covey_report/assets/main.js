// Put the report together.

function repaint() {
  readColours();
  for (const chart of drawn) chart.u.redraw(true, true);
}

DATA.runs.forEach((run, i) => Object.assign(run, JSON.parse(byId('texts-' + i).textContent)));
onTheme.push(repaint);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaint);

// On paper every chart that is in an open section is drawn.
addEventListener('beforeprint', () => {
  readColours();
  for (const figure of document.querySelectorAll('figure.chart')) if (figure.offsetParent) figure.chart.draw();
  repaint();
});

showTop();
showSections({ overview: showOverview, curves: showCurves, diagnosis: showDiagnosis, evaluation: showEvaluation,
  completions: showCompletions, recipe: showRecipe, commands: showCommands, record: showRecord });
addEventListener('hashchange', openAddress);
openAddress();
