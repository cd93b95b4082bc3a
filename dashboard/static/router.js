/**
 * The part after #: which view is shown and with what.
 *
 * VIEWS                 [id, title] of every view, in the order of the tabs.
 * route()               {id: "samples", params: URLSearchParams}; id is "" when there is none.
 * go(id, params)        shows a view: go("samples", {first: 7, last: 7}).
 * noteParams(id, params) updates the address to what a view shows, without showing it again.
 */

export const VIEWS = [
  ["breakdown", "Breakdown"], ["timeline", "Timeline"], ["learning", "Learning"], ["trust", "Trust"],
  ["samples", "Samples"], ["fleet", "Fleet"], ["what_if", "What if"], ["alerts", "Alerts"],
];

export function route() {
  const [id, query] = location.hash.slice(1).split("?");
  return { id, params: new URLSearchParams(query ?? "") };
}

function hashOf(id, params) {
  const kept = Object.entries(params ?? {}).filter(([, item]) => item !== null && item !== undefined);
  const query = new URLSearchParams(kept).toString();
  return query ? `#${id}?${query}` : `#${id}`;
}

export function go(id, params) {
  location.hash = hashOf(id, params);
}

export function noteParams(id, params) {
  const now = route().id; // a view that was left while it loaded must not change the address
  if (now === id || now === "") history.replaceState(null, "", hashOf(id, params));
}
