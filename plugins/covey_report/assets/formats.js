// Numbers, units and times as text.

const whole = (value) => Math.round(value).toLocaleString('en-US');

const minus = (text) => text.replaceAll('-', '\u2212');

// A number with at most `digits` significant digits.
function brief(value, digits = 4) {
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-4 && size > 0)) return minus(value.toExponential(Math.min(2, digits - 1)).replace('e+', 'e'));
  const rounded = size >= 1000 ? Math.round(value) : Number(value.toPrecision(digits));
  return minus(rounded.toLocaleString('en-US', { maximumFractionDigits: 9 }));
}

// A large number in three digits: 12.3k, 4.56M.
function shortCount(value) {
  const [factor, suffix] = value < 1e3 ? [1, ''] : value < 1e6 ? [1e3, 'k'] : value < 1e9 ? [1e6, 'M'] : [1e9, 'G'];
  return brief(value / factor, 3) + suffix;
}

// A value of a metric in its unit.
function inUnit(value, unit, digits) {
  if (value === null || value === undefined || Number.isNaN(value)) return '\u2013';
  if (unit === 'share') return brief(100 * value, digits || 3) + '\u202f%';
  if (unit === 's') return brief(value, digits) + '\u202fs';
  return brief(value, digits);
}

const signed = (value) => (value > 0 ? '+' : '') + brief(value);

function duration(seconds) {
  if (seconds < 60) return brief(Math.round(seconds * 10) / 10) + ' s';
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return minutes + ' min ' + Math.round(seconds % 60) + ' s';
  return Math.floor(minutes / 60) + ' h ' + (minutes % 60) + ' min';
}

const count = (number, noun) => whole(number) + ' ' + noun + (number === 1 ? '' : 's');
