/**
 * Numbers as text, the same everywhere on the page. Absent is "–".
 *
 * value(x)            a JSON number of the API: null stays null, "NaN" and "Infinity" become floats.
 * isFiniteNumber(x)   true for a finite float.
 * number(x, digits)   about `digits` significant figures (3); 1.2e-5 where plain would be long.
 * count(x)            whole, with thousands: 12,345.
 * percent(x, digits)  of a fraction: 41 %; below 10 % one decimal.
 * seconds(x)          340 ms, 4.65 s, 3 min 20 s, 1 h 04 min.
 * remaining(x)        "about 12 min left".
 * bytes(x, step)      1.4 GB (powers of ten); on an axis as many decimals as ticks `step` apart need.
 * decimals(step)      of numbers that are `step` apart, so that they differ: 0 to 6.
 * clock(unix_s)       14:03:20 of the viewer's day; with the date when it is another day.
 * span(first, last)   "step 7" or "steps 7–23".
 * withUnit(x, unit)   by a unit of the catalog: "s", "fraction", "bytes", "tokens", "1", ...
 * sentence(text)      with a capital first letter, unless it begins with a name such as rollout.slots.
 * plural(n, one, many) "1 step", "3 steps".
 */

const NONE = "–";

export function value(x) {
  if (typeof x === "string") return x === "NaN" ? NaN : x === "-Infinity" ? -Infinity : Infinity;
  return x ?? null;
}

export function isFiniteNumber(x) {
  return typeof x === "number" && Number.isFinite(x);
}

/** The text of an absent or non-finite number, or null if it is finite. */
function odd(x) {
  if (x === null || x === undefined) return NONE;
  if (Number.isNaN(x)) return "NaN";
  if (x === Infinity) return "∞";
  return x === -Infinity ? "−∞" : null;
}

const minus = (text) => text.replace(/-/g, "−");

export function number(raw, digits = 3) {
  const x = value(raw);
  const special = odd(x);
  if (special) return special;
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-3) {
    const [mantissa, exponent] = x.toExponential(Math.max(digits - 2, 0)).split("e");
    return minus(`${mantissa}e${Number(exponent)}`);
  }
  if (size >= 1000) return minus(Math.round(x).toLocaleString("en-US"));
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return minus(x.toFixed(Number.isInteger(x) ? 0 : Math.min(decimals, digits + 1)));
}

export function count(raw) {
  const x = value(raw);
  return odd(x) ?? minus(Math.round(x).toLocaleString("en-US"));
}

export function percent(raw, digits) {
  const x = value(raw);
  const special = odd(x);
  if (special) return special;
  const decimals = digits ?? (Math.abs(x) < 0.0995 && x !== 0 ? 1 : 0);
  if (x > 0 && x < 0.0005 && digits === undefined) return "<0.1 %";
  return `${minus((100 * x).toFixed(decimals))} %`;
}

export function seconds(raw) {
  const x = value(raw);
  const special = odd(x);
  if (special) return special;
  const size = Math.abs(x);
  if (size === 0) return "0 s";
  if (size < 1e-4) return `${minus(String(Math.round(1e6 * x)))} µs`;
  if (size < 0.001) return `${minus((1e3 * x).toFixed(1))} ms`;
  if (size < 0.9995) return `${minus(String(Math.round(1e3 * x)))} ms`;
  if (size < 9.995) return `${minus(x.toFixed(2))} s`;
  if (size < 99.95) return `${minus(x.toFixed(1))} s`;
  const whole = Math.round(size);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  if (whole >= 48 * 3600) return `${Math.floor(h / 24)} d ${h % 24} h`;
  return h ? `${h} h ${two(m)} min` : `${m} min ${two(s)} s`;
}

export function remaining(raw) {
  const x = value(raw);
  if (!isFiniteNumber(x)) return "";
  if (x < 90) return `about ${Math.max(1, Math.round(x))} s left`;
  if (x < 5400) return `about ${Math.round(x / 60)} min left`;
  return `about ${seconds(Math.round(x / 60) * 60)} left`;
}

export function decimals(step) {
  const whole = (n) => Math.abs(step * 10 ** n - Math.round(step * 10 ** n)) < 1e-6;
  return [0, 1, 2, 3, 4, 5].find((n) => step * 10 ** n > 0.5 && whole(n)) ?? 6;
}

export function bytes(raw, step) {
  const x = value(raw);
  const special = odd(x);
  if (special) return special;
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, x < 1 ? 0 : Math.floor(Math.log10(x) / 3 + 1e-9));
  const size = x / 1000 ** power;
  const usual = size >= 100 || power === 0 ? 0 : 1;
  return `${size.toFixed(step ? decimals(step / 1000 ** power) : usual)} ${units[power]}`;
}

export function clock(unixSeconds) {
  const at = value(unixSeconds);
  if (!isFiniteNumber(at)) return NONE;
  const date = new Date(at * 1000);
  const time = date.toLocaleTimeString("en-GB");
  const today = date.toDateString() === new Date().toDateString();
  return today ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}

export function span(first, last) {
  return first === last ? `step ${first}` : `steps ${first}–${last}`;
}

export function withUnit(raw, unit) {
  if (unit === "s" || unit === "seconds") return seconds(raw);
  if (unit === "fraction" || unit === "share") return percent(raw);
  if (unit === "bytes") return bytes(raw);
  if (unit === "tokens" || unit === "count") {
    const x = value(raw);
    return Number.isInteger(x) ? count(x) : number(x);
  }
  const text = number(raw);
  return !unit || unit === "1" || text === NONE ? text : `${text} ${unit}`;
}

export function plural(n, one, many) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

export function sentence(text) {
  return /^[a-z]+[\s,'’-]/.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
}
