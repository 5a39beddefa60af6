// Charts of metrics by step, time or tokens: uPlot, with zoom, synchronised values, smoothing, keys and touch.
//
// A run here is {name, series: {metric: [steps, values]}, clocks: {time: [steps, seconds], tokens: [steps, tokens so far]},
// marks: [{kind, first, last, number}]}. Other pages use showCurves, chartGrid and growCharts.

const view = { axis: 'step', smooth: 0, range: null };
const drawn = new Set();
const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3], [1, 4], [14, 4]];
let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  colours = { text: value('--muted'), line: value('--line'), bad: value('--bad'), surface: value('--surface'), series: Array.from({ length: 8 }, (_, i) => value('--series-' + (i + 1))) };
}

const colourOf = (number) => colours.series[number % colours.series.length];
const faint = (colour, alpha) => colour + Math.round(255 * alpha).toString(16).padStart(2, '0');

// Horizontal axes: name, label of a tick, and a position in words.
const AXES = {
  step: ['steps', (value) => (Number.isInteger(value) ? whole(value) : ''), (value) => 'step ' + whole(value)],
  time: ['time of training', (value, ticks) => clockText(value, ticks), (value) => duration(value)],
  tokens: ['tokens', (value) => shortCount(value), (value) => shortCount(value) + ' tokens'],
};

// The position of a step of a run on the axis: the step itself, or seconds or tokens up to it.
function placeOf(run, step) {
  if (view.axis === 'step') return step;
  const [steps, passed] = run.clocks[view.axis];
  let low = 0, high = steps.length;
  while (low < high) { const middle = (low + high) >> 1; if (steps[middle] < step) low = middle + 1; else high = middle; }
  if (low === steps.length) return passed.length ? passed[passed.length - 1] : 0;
  if (steps[low] === step) return passed[low];
  const [s0, t0] = low ? [steps[low - 1], passed[low - 1]] : [0, 0];
  return t0 + (passed[low] - t0) * (step - s0) / (steps[low] - s0);
}

// Exponential moving average without the bias of its start.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return sum / total;
  });
}

class ChartView {
  constructor(chart, runs) {
    this.chart = chart;
    this.runs = runs;
    this.several = runs.length > 1;
    this.lines = this.collect();
    this.figure = this.build();
  }

  // The metrics of the chart that each run has.
  collect() {
    const lines = this.runs.flatMap((run, r) => this.chart.series.map((series, s) => ({ run, r, series, s, points: run.series[series.name] })));
    const measured = lines.filter(({ points }) => points && points[0].length).map(({ run, r, series, s, points: [steps, values] }) => ({
      run, r, series, s, steps, values, note: constancy(values, series.rounding),
      // The ranges of several runs would hide each other; standard errors are what their comparison needs.
      ends: this.several && !series.error ? null : ends(run, series),
    }));
    return this.chart.stacked && !this.several ? stack(measured) : measured;
  }

  get unit() { return this.chart.series[0].unit; }

  label(line) {
    const parts = [];
    if (this.several) parts.push(escapedLine(line.run.name));
    if (this.chart.series.length > 1) parts.push(line.series.label);
    return parts.join(' \u00b7 ') || line.series.label;
  }

  number(line) { return this.several ? line.r : line.s; }

  build() {
    const { chart } = this, names = chart.series.map((series) => series.name);
    this.plot = element('div', { class: 'plot', tabindex: 0, role: 'img', 'aria-label': this.inWords() });
    this.values = this.lines.map(() => element('span', { class: 'value' }));
    this.legend = element('ul', { class: 'legend' }, this.lines.map((line, i) => element('li', {},
      this.lines.length > 1 ? [element('span', { class: 'swatch swatch-' + (this.number(line) % 8 + 1) + (this.several && line.s ? ' dashed' : '') }), element('span', {}, this.label(line))] : null,
      this.values[i])), this.bandNote());
    const details = element('details', { class: 'numbers', ontoggle: () => this.fillTable(details) }, element('summary', {}, 'Numbers'));
    this.plot.addEventListener('keydown', (event) => this.key(event));
    return element('figure', { class: 'chart', 'data-names': (chart.title + ' ' + names.join(' ')).toLowerCase() },
      element('figcaption', {}, element('span', { class: 'chart-title' }, escapedLine(chart.title)),
        element('span', { class: 'unit muted' }, this.unit && this.unit !== 'share' && this.unit !== chart.title.toLowerCase() ? this.unit : '')),
      this.legend, this.plot, details);
  }

  bandNote() {
    const series = this.lines.map((line) => line.ends && !line.base && line.series).find(Boolean);
    return series ? element('li', {}, series.error ? 'band: standard error' : 'band: lowest to highest') : null;
  }

  // The chart in one sentence, for readers that cannot see it.
  inWords() {
    const { title, series } = this.chart;
    const about = this.lines.map((line) => {
      const [first, last] = [line.values[0], line.values[line.values.length - 1]].map((value) => inUnit(value, line.series.unit));
      return this.label(line) + (line.note ? ' ' + last + line.note : ' from ' + first + ' to ' + last);
    });
    return (this.lines.some((line) => line.base) ? 'Stacked chart of ' : 'Line chart of ') + escapedLine(title) + (this.unit ? ' in ' + this.unit : '') + ': ' + about.join('; ') +
      '. Arrow keys read values, plus and minus zoom, 0 resets.';
  }

  fillTable(details) {
    if (!details.open || details.querySelector('table')) return;
    const headings = [this.several ? 'run and metric' : 'metric', 'first', 'last', 'lowest', 'highest', 'points'].map((h, i) => (i ? numeric(h) : h));
    const rows = this.lines.map((line) => {
      const { values, series: { unit } } = line;
      const [low, high] = extremes(values);
      const name = (this.several ? escapedLine(line.run.name) + ' ' : '') + line.series.name;
      return [element('code', {}, escapedLine(name)), ...[values[0], values[values.length - 1], low, high].map((value) => numeric(inUnit(value, unit))), numeric(whole(values.length))];
    });
    const meanings = this.chart.series.filter((series) => series.meaning && this.lines.some((line) => line.series === series));
    details.append(element('dl', { class: 'meanings' }, meanings.map((series) =>
      [element('dt', {}, element('code', {}, escapedLine(series.name))), element('dd', {}, series.meaning)])),
      table(headings, rows, { label: 'Numbers of ' + this.chart.title }));
  }

  xs(line) { return view.axis === 'step' ? line.steps : line.steps.map((step) => placeOf(line.run, step)); }

  // One table per line: x, the measured values, the smoothed ones, and the ends of its band.
  data() {
    return uPlot.join(this.lines.map((line) => {
      const values = line.base ? line.ends[1] : line.values, smooth = view.smooth > 0 ? smoothed(values, view.smooth) : values.map(() => null);
      const columns = [dedupe(this.xs(line)), values, smooth];
      if (line.ends) columns.push(...(line.base && view.smooth > 0 ? [smoothed(line.base, view.smooth), smooth] : line.ends));
      return columns;
    }), this.lines.map((line) => (line.ends ? [0, 0, 0, 0, 0] : [0, 0, 0])));
  }

  draw() {
    if (this.u) return;
    const series = [{}], bands = [];
    this.columns = [];
    for (const line of this.lines) {
      const number = this.number(line), dash = this.several ? DASHES[line.s % DASHES.length] : [];
      this.columns.push(series.length);
      const points = { show: (u, i) => this.isSparse(u, i), size: 5, width: 0, fill: () => faint(colourOf(number), view.smooth ? 0.28 : 1) };
      series.push({ stroke: () => faint(colourOf(number), view.smooth ? 0.28 : 1), width: 1.5, dash, spanGaps: true, points });
      series.push({ stroke: () => colourOf(number), width: 2, dash, spanGaps: true, points: { show: false } });
      if (line.ends) {
        const hidden = { stroke: 'transparent', width: 0, spanGaps: true, points: { show: false } };
        series.push({ ...hidden }, { ...hidden });
        bands.push({ series: [series.length - 1, series.length - 2], fill: () => faint(colourOf(number), line.base ? 0.45 : 0.14) });
      }
    }
    const strip = this.runs.some((run) => (run.marks || []).length) ? MARKS_HEIGHT : 0;
    this.u = new uPlot({
      ...this.size(), series, bands, legend: { show: false }, padding: [8, 20, 0, 0],
      scales: { x: { time: false, range: (u, low, high) => this.rangeX(low, high) }, y: { range: (u, low, high) => rangeY(u, low, high, this.chart.series[0].rounding) } },
      axes: [
        { stroke: () => colours.text, grid: { show: false }, ticks: { stroke: () => colours.line, size: 4 }, gap: 5 + strip, size: 28 + strip, font: '11px system-ui, sans-serif',
          values: (u, ticks) => ticks.map((value) => AXES[view.axis][1](value, ticks)) },
        { stroke: () => colours.text, grid: { stroke: () => colours.line, width: 1 }, ticks: { show: false }, size: (u, labels) => axisWidth(labels), font: '11px system-ui, sans-serif',
          splits: ticksY, values: (u, ticks) => ticks.map((value) => axisValue(value, this.unit, ticks)) },
      ],
      cursor: {
        drag: { x: true, y: false, setScale: false }, y: false,
        points: { size: 6, width: 0, show: true },
        sync: { key: 'covey', setSeries: false, scales: ['x', null], filters: { pub: (type) => type === 'mousemove' || type === 'mouseleave' } },
        dataIdx: (u, i, near) => nearest(u.data[i], near),
        bind: { dblclick: () => () => { zoom(null); return null; } },
      },
      hooks: { setCursor: [() => this.showValues()], setSelect: [(u) => this.select(u)], draw: [(u) => drawMarks(u, this.runs)] },
    }, this.data(), this.plot);
    touch(this);
    drawn.add(this);
    this.showValues();
    new ResizeObserver(() => {
      const { width, height } = this.size();
      if (width > 0 && (width !== this.u.width || height !== this.u.height)) this.u.setSize({ width, height });
    }).observe(this.plot);
  }

  size() { return { width: Math.floor(this.plot.clientWidth), height: Math.max(120, Math.floor(this.plot.clientHeight)) }; }

  isSparse(u, i) {
    const values = u.data[i];
    let found = 0;
    for (const value of values) if (value !== undefined && value !== null && ++found > 40) return false;
    return found > 0;
  }

  rangeX(low, high) {
    if (view.range) return view.range;
    const [from, to] = wholeRange();
    return [from, to > from ? to : from + 1];
  }

  select(u) {
    if (u.select.width > 4) {
      const range = [u.posToVal(u.select.left, 'x'), u.posToVal(u.select.left + u.select.width, 'x')];
      zoom(range);
    }
    if (u.select.width) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  // Values at the cursor, or the last ones.
  showValues() {
    if (!this.u) return;
    const at = this.u.cursor.left >= 0;
    this.lines.forEach((line, i) => {
      const column = this.columns[i] + (view.smooth ? 1 : 0);
      const index = at ? this.u.cursor.idxs[column] : null;
      const j = index === null || index === undefined ? lastIndex(this.u.data[column]) : index;
      const value = this.u.data[column][j] - (line.base ? this.u.data[this.columns[i] + 2][j] : 0);
      let text = inUnit(value, line.series.unit);
      if (line.series.error && line.ends && !view.smooth) {
        const high = this.u.data[this.columns[i] + 3][j];
        if (high !== undefined && high !== null) text += ' \u00b1\u202f' + inUnit(high - value, line.series.unit, 2);
      }
      this.values[i].textContent = text + line.note;
    });
    if (at && this.u.cursor.idx !== null && this.u.cursor.event) showPosition(this.u.data[0][this.u.cursor.idx]);
    else if (!at) showPosition(null);
  }

  key(event) {
    const { u } = this;
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = u.scales.x, width = max - min, middle = (min + max) / 2;
    const moves = {
      '+': () => zoom([middle - width / 4, middle + width / 4]), '=': () => zoom([middle - width / 4, middle + width / 4]),
      '-': () => zoom(inside([middle - width, middle + width])), 0: () => zoom(null), Escape: () => zoom(null),
      ArrowLeft: () => (event.shiftKey ? zoom(inside([min - width / 4, max - width / 4])) : this.step(-1)),
      ArrowRight: () => (event.shiftKey ? zoom(inside([min + width / 4, max + width / 4])) : this.step(1)),
      Home: () => this.step(-Infinity), End: () => this.step(Infinity),
    };
    if (moves[event.key]) { moves[event.key](); event.preventDefault(); }
  }

  // Move the cursor of all charts by one point, and say the values.
  step(by) {
    const { u } = this, xs = u.data[0];
    const [first, last] = u.series[0].idxs || [0, xs.length - 1];
    const from = u.cursor.idx === null || u.cursor.idx === undefined || u.cursor.left < 0 ? (by > 0 ? first - 1 : last + 1) : u.cursor.idx;
    const index = Math.min(last, Math.max(first, from + by));
    for (const chart of drawn) chart.u.setCursor({ left: chart.u.valToPos(xs[index], 'x'), top: 10 });
    showPosition(xs[index]);
    say(positionText(xs[index]) + ': ' + this.lines.map((line, i) => this.label(line) + ' ' + this.values[i].textContent).join(', '));
  }

  update() {
    this.lines = this.collect();
    if (!this.u) return;
    this.u.setData(this.data(), true);
    this.showValues();
  }
}

// The ends of the band of a series: from its standard error, or measured.
function ends(run, series) {
  const measured = (name) => { const found = name && run.series[name]; return found ? new Map(found[0].map((step, i) => [step, found[1][i]])) : null; };
  const points = run.series[series.name], error = measured(series.error), low = measured(series.low), high = measured(series.high);
  if (!points) return null;
  const [steps, values] = points;
  if (error) return [steps.map((s, i) => (error.has(s) ? values[i] - error.get(s) : null)), steps.map((s, i) => (error.has(s) ? values[i] + error.get(s) : null))];
  return low && high ? [steps.map((s) => (low.has(s) ? low.get(s) : null)), steps.map((s) => (high.has(s) ? high.get(s) : null))] : null;
}

// Lines on top of each other: `base` is where one begins.
function stack(lines) {
  const tops = new Map();
  return lines.map((line) => {
    const base = line.steps.map((step) => tops.get(step) || 0), top = line.values.map((value, i) => base[i] + value);
    line.steps.forEach((step, i) => tops.set(step, top[i]));
    return { ...line, base, ends: [base, top] };
  });
}

// Ascending x without repetition: two steps may end at the same moment.
function dedupe(xs) {
  let last = -Infinity;
  return xs.map((x) => (last = x > last ? x : last + Math.max(1e-9, Math.abs(last) * 1e-12)));
}

// Room for the longest label of the vertical axis, in pixels: its letters are about 6.2 wide.
const axisWidth = (labels) => Math.max(54, 14 + 6.2 * Math.max(0, ...(labels || []).map((label) => String(label ?? '').length)));

function extremes(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

// Values that are equal but for rounding are drawn as a flat line in the middle: the axis does not magnify it.
const ROUNDING = 1e-5;
const isFlat = (low, high, rounding = 0) => high - low <= Math.max(rounding, ROUNDING * Math.max(Math.abs(low), Math.abs(high)));

// Words for a series whose values are all equal; empty for others.
function constancy(values, rounding) {
  const [low, high] = extremes(values);
  return values.length < 2 || !isFlat(low, high, rounding) ? '' : low === high ? ', constant' : ', constant but for rounding';
}

function rangeY(u, low, high, rounding) {
  u.flat = false;
  if (low === null || high === null || low === undefined) return [0, 1];
  if (isFlat(low, high, rounding)) {
    const middle = (low + high) / 2, isZero = Math.abs(middle) <= (rounding || 0), half = isZero ? 1 : Math.abs(middle);
    u.flat = true;
    return isZero ? [-1, 1] : [middle - half, middle + half];
  }
  const room = (high - low) * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// Points or marks were added to the runs, in place.
function growCharts() {
  everything = null;
  for (const chart of drawn) chart.update();
}

// Forget all charts, before those of other runs are made.
function clearCharts() {
  for (const chart of drawn) chart.u.destroy();
  drawn.clear();
  everything = null;
  view.range = null;
}

// Multiples of the increment; of a flat line its value alone.
function ticksY(u, axis, low, high, increment) {
  if (u.flat) return [(low + high) / 2];
  const first = Math.ceil(low / increment - ROUNDING), count = Math.floor(high / increment + ROUNDING) - first + 1;
  return Array.from({ length: Math.max(0, count) }, (_, i) => (first + i) * increment);
}

// Evaluations and findings in a strip under the plot: a diamond at a step, a numbered bar over a range of steps.
const MARKS_HEIGHT = 14;
function drawMarks(u, runs) {
  const { ctx, bbox: { left, top, width, height } } = u, scale = devicePixelRatio, middle = top + height + (4 + MARKS_HEIGHT / 2) * scale;
  const inside = (x) => Math.min(left + width, Math.max(left, x));
  ctx.save();
  for (const run of runs) for (const { kind, first, last, number } of run.marks || []) {
    const [from, to] = [first, last].map((step) => u.valToPos(placeOf(run, step), 'x', true));
    if (to < left - scale || from > left + width + scale) continue;
    if (kind === 'finding') drawFinding(ctx, inside(from), inside(to), middle, number, scale);
    else drawDiamond(ctx, from, middle, 3.5 * scale);
  }
  ctx.restore();
}

function drawDiamond(ctx, x, y, size) {
  ctx.fillStyle = colours.text;
  ctx.beginPath();
  ctx.moveTo(x, y - size);
  for (const [dx, dy] of [[size, 0], [0, size], [-size, 0]]) ctx.lineTo(x + dx, y + dy);
  ctx.closePath();
  ctx.fill();
}

function drawFinding(ctx, from, to, y, number, scale) {
  const middle = (from + to) / 2;
  ctx.fillStyle = colours.bad;
  ctx.fillRect(from, y - 1.5 * scale, to - from, 3 * scale);
  ctx.beginPath();
  ctx.arc(middle, y, MARKS_HEIGHT / 2 * scale, 0, 2 * Math.PI);
  ctx.fill();
  ctx.fillStyle = colours.surface;
  ctx.font = '600 ' + 10 * scale + 'px system-ui, sans-serif';
  ctx.textAlign = 'center';
  ctx.textBaseline = 'middle';
  ctx.fillText(number, middle, y + 0.5 * scale);
}

let everything = null;
function wholeRange() {
  if (everything && everything.axis === view.axis) return everything.range;
  let low = Infinity, high = -Infinity;
  for (const run of DATA.runs) for (const [steps] of Object.values(run.series)) {
    if (!steps.length) continue;
    const [first, last] = [steps[0], steps[steps.length - 1]].map((step) => placeOf(run, step));
    if (first < low) low = first;
    if (last > high) high = last;
  }
  everything = { axis: view.axis, range: low > high ? [0, 1] : [low, high] };
  return everything.range;
}

function inside([from, to]) {
  const [first, last] = wholeRange(), width = Math.min(to - from, last - first);
  if (width >= last - first) return null;
  const start = Math.min(Math.max(from, first), last - width);
  return [start, start + width];
}

function zoom(range) {
  view.range = range;
  for (const chart of drawn) chart.u.setScale('x', { min: range ? range[0] : wholeRange()[0], max: range ? range[1] : wholeRange()[1] });
  byId('reset-zoom').disabled = !range;
}

function nearest(values, index) {
  for (let away = 0; away < values.length; away++) {
    if (values[index - away] !== undefined && values[index - away] !== null) return index - away;
    if (values[index + away] !== undefined && values[index + away] !== null) return index + away;
  }
  return null;
}

function lastIndex(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== undefined && values[i] !== null) return i;
  return -1;
}

const positionText = (x) => AXES[view.axis][2](x);
const showPosition = (x) => { const shown = byId('position'); if (shown) shown.textContent = x === null ? 'last step' : positionText(x); };

function axisValue(value, unit, splits) {
  if (unit === 'share') return minus((100 * value).toLocaleString('en-US', { maximumFractionDigits: 2 })) + '%';
  const size = Math.max(...splits.map(Math.abs)), step = splits.length > 1 ? Math.abs(splits[1] - splits[0]) : size;
  if (size && (size >= 1e5 || size < 1e-3)) return value === 0 ? '0' : minus(value.toExponential(1).replace('e+', 'e'));
  let digits = 0;
  while (digits < 8 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits++;
  return minus(value.toLocaleString('en-US', { maximumFractionDigits: digits }));
}

function clockText(value, splits) {
  const step = splits.length > 1 ? splits[1] - splits[0] : value;
  const last = splits[splits.length - 1];
  if (last < 120) return brief(value) + ' s';
  return last < 7200 ? brief(Math.round(value / 6) / 10) + ' min' : brief(Math.round(value / 360) / 10) + ' h';
}

// Two fingers zoom, one moves a chart that is zoomed; up and down scrolls the page.
function touch(chart) {
  const { u } = chart, fingers = new Map();
  for (const type of ['pointerup', 'pointercancel', 'pointerleave']) u.over.addEventListener(type, (event) => fingers.delete(event.pointerId));
  u.over.addEventListener('pointerdown', (event) => { if (event.pointerType === 'touch') fingers.set(event.pointerId, event.offsetX); });
  u.over.addEventListener('pointermove', (event) => {
    if (!fingers.has(event.pointerId)) return;
    const places = () => [...fingers.values()].sort((a, b) => a - b), value = (place) => u.posToVal(place, 'x');
    const before = places();
    fingers.set(event.pointerId, event.offsetX);
    const now = places(), { min, max } = u.scales.x;
    if (now.length === 1 && view.range) {
      const by = value(before[0]) - value(now[0]);
      zoom(inside([min + by, max + by]));
    } else if (now.length > 1 && now[1] - now[0] > 10) {
      const factor = (before[1] - before[0]) / (now[1] - now[0]), middle = (value(now[0]) + value(now[1])) / 2;
      zoom(inside([middle - (middle - min) * factor, middle + (max - middle) * factor]));
    }
  });
}

const whenSeen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { whenSeen.unobserve(entry.target); entry.target.chart.draw(); }
}, { rootMargin: '300px' });

function chartGrid(charts, runs) {
  return element('div', { class: 'grid' }, charts.map((chart) => {
    const made = new ChartView(chart, runs);
    made.figure.chart = made;
    whenSeen.observe(made.figure);
    return made.figure;
  }));
}

// All curves: the main ones, then a section that opens for each subject.
function showCurves(body) {
  const runs = DATA.runs;
  if (!DATA.charts.length) return false;
  const smooth = element('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: view.smooth, oninput: (event) => {
    view.smooth = Number(event.target.value);
    for (const chart of drawn) chart.update();
  } });
  const axes = Object.entries(AXES).filter(([name]) => name === 'step' || runs.every((run) => run.clocks[name])).map(([name, [text]]) => [name, text]);
  if (!axes.some(([name]) => name === view.axis)) view.axis = 'step';
  const axis = choice(axes, view.axis, (value) => {
    view.axis = value;
    view.range = null;
    for (const chart of drawn) chart.update();
    zoom(null);
  });
  const search = element('input', { type: 'search', placeholder: 'name of a metric', oninput: () => filterCharts(body, search.value) });
  body.append(element('div', { class: 'tools' }, labelled('Smoothing', smooth), labelled('Along', axis), labelled('Find', search),
    element('button', { type: 'button', id: 'reset-zoom', disabled: true, onclick: () => zoom(null) }, 'Reset zoom'),
    element('span', { class: 'muted position' }, 'Values: ', element('span', { id: 'position' }, 'last step'))));
  body.append(...marksKey(runs), chartGrid(DATA.charts.filter((chart) => chart.main), runs));
  const others = DATA.charts.filter((chart) => !chart.main);
  for (const section of new Set(others.map((chart) => chart.section))) {
    const here = others.filter((chart) => chart.section === section);
    body.append(element('details', { class: 'charts' }, element('summary', {}, element('h3', {}, section),
      element('span', { class: 'muted' }, here.map((chart) => escapedLine(chart.title)).join(' \u00b7 '))), chartGrid(here, runs)));
  }
  body.append(element('p', { class: 'hint muted' }, 'Drag over a chart to zoom, double-click to see all again. With the keyboard: arrows read values, + and \u2212 zoom, 0 resets.'));
  return true;
}

// What the marks on the axis stand for.
function marksKey(runs) {
  const marks = runs.flatMap((run) => (run.marks || [])), findings = new Map(marks.filter(({ kind }) => kind === 'finding').map((mark) => [mark.number, mark]));
  const entries = [...findings.values()].map(({ number, text }) => element('li', {}, element('span', { class: 'mark-number', 'aria-hidden': 'true' }, number), element('a', { href: '#finding-' + number }, readable(text))));
  if (marks.some(({ kind }) => kind === 'evaluation')) entries.push(element('li', {}, element('span', { 'aria-hidden': 'true' }, '\u25c6 '), 'evaluation'));
  return entries.length ? [element('ul', { class: 'marks', 'aria-label': 'Marks on the axis' }, entries)] : [];
}

function filterCharts(body, text) {
  const wanted = text.trim().toLowerCase();
  for (const figure of body.querySelectorAll('figure.chart')) figure.hidden = wanted !== '' && !figure.dataset.names.includes(wanted);
  for (const section of body.querySelectorAll('details.charts')) {
    const found = section.querySelectorAll('figure.chart:not([hidden])').length > 0;
    section.hidden = !found;
    if (wanted) section.open = found;
  }
}

function repaint() {
  readColours();
  for (const chart of drawn) chart.u.redraw(true, true);
}

onTheme.push(repaint);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaint);
