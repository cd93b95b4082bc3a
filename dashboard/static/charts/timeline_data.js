/**
 * The timeline, joined from several answers. Times are seconds after `.start` (Unix).
 *
 * new Timeline(json)      of GET /api/timeline; .steps, .tracks, .gauges, .staleness, .phases.
 * .duration               seconds from the first step's start to the last one's end
 * .join(json, keep_s)     appends later steps, drops those that ended more than keep_s ago;
 *                         returns by how many seconds the old times moved
 * .spanAt(track, t)        index of the span of a track at t, or -1
 * .stepAt(t)              {step, start, end} or null
 * .gaugeAt(t)             {waiting, out, policy_version} as of t, or null
 * .firstStep, .lastStep   null while there is none
 * .crowded                true if a track has so many spans that the server should thin them
 * .thinned                true if a track has the server's maximum number of spans
 */

const MOST_SPANS = 4000;

export class Timeline {
  constructor(json) {
    this.start = json.start ?? 0;
    this.phases = json.phases ?? [];
    this.steps = json.steps ?? [];
    this.tracks = json.lanes ?? [];
    this.gauges = json.gauges ?? { t: [], waiting: [], out: [], policy_version: [] };
    this.staleness = json.staleness ?? [];
  }

  get duration() {
    return this.steps.at(-1)?.end ?? 0;
  }

  get firstStep() {
    return this.steps[0]?.step ?? null;
  }

  get lastStep() {
    return this.steps.at(-1)?.step ?? null;
  }

  get thinned() {
    return this.tracks.some((track) => track.spans.length >= MOST_SPANS);
  }

  get crowded() {
    return this.tracks.some((track) => track.spans.length > 2 * MOST_SPANS);
  }

  join(json, keep_s) {
    if (!json.steps?.length) return 0;
    const later = json.start - this.start;
    const end = json.steps.at(-1).end + later;
    const kept = this.steps.filter((s) => s.end > end - keep_s);
    const from = kept.length ? kept[0].start : later;
    const at = (t) => t - from;
    const fresh = (t) => t + later - from;
    const spans = (list, shift) => list.map(([p, t, d]) => [p, shift(t), d]).filter(([, t, d]) => t + d > 0);
    const pairs = (list, shift) => list.map(([t, x]) => [shift(t), x]).filter(([t]) => t >= 0);
    const names = [...new Set([...this.tracks, ...json.lanes].map((track) => track.process))];
    const trackOf = (tracks, name) => tracks.find((track) => track.process === name) ?? { spans: [], marks: [] };
    this.tracks = names.map((process) => {
      const [old, add] = [trackOf(this.tracks, process), trackOf(json.lanes, process)];
      return { process, spans: [...spans(old.spans, at), ...spans(add.spans, fresh)],
        marks: [...pairs(old.marks, at), ...pairs(add.marks, fresh)] };
    }).filter((track) => track.spans.length || track.marks.length);
    const moved = (list, shift) => list.map((s) => ({ ...s, start: shift(s.start), end: shift(s.end) }));
    this.steps = [...moved(kept, at), ...moved(json.steps, fresh)];
    this.staleness = [...pairs(this.staleness, at), ...pairs(json.staleness ?? [], fresh)];
    this._joinGauges(json.gauges, at, fresh);
    this.start += from;
    return from;
  }

  _joinGauges(add, at, fresh) {
    const times = [...this.gauges.t.map(at), ...add.t.map(fresh)];
    const first = times.findIndex((t) => t >= 0);
    const cut = (list) => (first < 0 ? [] : list.slice(first));
    const both = (name) => cut([...this.gauges[name], ...add[name]]);
    this.gauges = { t: cut(times), waiting: both("waiting"), out: both("out"),
      policy_version: both("policy_version") };
  }

  spanAt(track, t) {
    const i = before(track.spans.length, (k) => track.spans[k][1] <= t);
    return i >= 0 && t <= track.spans[i][1] + track.spans[i][2] ? i : -1;
  }

  stepAt(t) {
    return this.steps.find((s) => t >= s.start && t < s.end) ?? null;
  }

  gaugeAt(t) {
    const { t: times, waiting, out, policy_version } = this.gauges;
    const i = before(times.length, (k) => times[k] <= t);
    return i < 0 ? null : { waiting: waiting[i], out: out[i], policy_version: policy_version[i] };
  }
}

/** The last index below n for which holds(i) is true, or -1; holds is true up to some index. */
export function before(n, holds) {
  let [low, high] = [-1, n - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (holds(middle)) low = middle;
    else high = middle - 1;
  }
  return low;
}
