/**
 * The HTTP side of the page. Cookies carry the view token; the control token is kept in memory only.
 *
 * getJSON(path, params)      GET /api/...; params: plain object, null and "" are left out.
 * keepJSON(path, params)     GETs and keeps an answer for getJSON after the server has ended; a promise.
 * setGoneMessage(text)          message of an ApiError after the server has ended; null: the default.
 * samplePath(id)             path of one completion.
 * postJSON(path, body)       POST with the control token that setControlToken was given.
 * setControlToken(t) / hasControlToken()
 * ApiError                   .status (0: no connection), .message: the server's message.
 * openStream({event, state}) follows /api/stream until .close(): event(type, data) per event,
 *                            state({state: "connecting"|"live"|"waiting"|"refused", retryInMs}) on
 *                            each change. Reconnects with backoff; .retry() tries now, .leave()
 *                            ends this connection, and the next one is tried after a pause.
 */

const DEADLINE_MS = 30_000;
const SILENCE_MS = 30_000; // the server sends at least a comment every 10 s
const NO_CONNECTION = "no connection to the dashboard";
const BACKOFF_MS = [500, 1000, 2000, 4000, 8000, 15_000];

let controlToken = "";
let gone = NO_CONNECTION;
const kept = new Map();

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setControlToken(token) {
  controlToken = token.trim();
}

export function hasControlToken() {
  return controlToken !== "";
}

async function request(url, options) {
  let answer;
  try {
    answer = await fetch(url, { ...options, signal: AbortSignal.timeout(DEADLINE_MS) });
  } catch (error) {
    const late = error.name === "TimeoutError";
    throw new ApiError(0, late
      ? `the dashboard did not answer ${url} within ${DEADLINE_MS / 1000} s` : gone);
  }
  let body = null;
  try {
    body = await answer.json();
  } catch {
    if (answer.ok) throw new ApiError(answer.status, `the dashboard's answer to ${url} is not JSON`);
  }
  if (!answer.ok) throw new ApiError(answer.status, body?.error ?? `HTTP ${answer.status}`);
  return body;
}

function urlOf(path, params) {
  const query = new URLSearchParams();
  for (const [name, item] of Object.entries(params)) {
    if (item !== null && item !== undefined && item !== "") query.set(name, item);
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

export async function getJSON(path, params = {}) {
  const url = urlOf(path, params);
  try {
    return await request(url, { headers: { accept: "application/json" } });
  } catch (error) {
    if (error.status === 0 && kept.has(url)) return kept.get(url);
    throw error;
  }
}

export async function keepJSON(path, params = {}) {
  const answer = await getJSON(path, params);
  kept.set(urlOf(path, params), answer);
  return answer;
}

export function samplePath(id) {
  return `/api/samples/${encodeURIComponent(id)}`;
}

export function setGoneMessage(text) {
  gone = text ?? NO_CONNECTION;
}

export function postJSON(path, body) {
  return request(path, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${controlToken}` },
    body: JSON.stringify(body),
  });
}

export function openStream({ event, state }) {
  let closed = false;
  let failures = 0;
  let wake = () => {};
  let controller = null;
  const report = (name, retryInMs = 0) => closed || state({ state: name, retryInMs });

  async function once() {
    controller = new AbortController();
    let alarm = 0;
    const rearm = () => {
      clearTimeout(alarm);
      alarm = setTimeout(() => controller.abort(), SILENCE_MS);
    };
    try {
      rearm();
      const answer = await fetch("/api/stream", {
        signal: controller.signal, headers: { accept: "text/event-stream" }, cache: "no-store",
      });
      if (!answer.ok) return answer.status;
      report("live");
      failures = 0;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      const parse = eventParser(event);
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return 0;
        rearm();
        try {
          parse(value);
        } catch (error) {
          reportError(error); // a bug, reported in the console; the next connection starts afresh
          return 0;
        }
      }
    } catch {
      return 0;
    } finally {
      clearTimeout(alarm);
      controller.abort();
    }
  }

  async function follow() {
    while (!closed) {
      report("connecting");
      const status = await once();
      if (status === 401) {
        report("refused");
        return;
      }
      const steps = BACKOFF_MS[Math.min(failures++, BACKOFF_MS.length - 1)];
      const pause = steps * (0.75 + Math.random() / 2); // viewers of one run do not reconnect all at once
      report("waiting", pause);
      await new Promise((resolve) => {
        wake = resolve;
        setTimeout(resolve, pause);
      });
    }
  }
  follow();
  return {
    retry() {
      failures = 0;
      wake();
    },
    leave() {
      failures = 0;
      controller?.abort();
    },
    close() {
      closed = true;
      controller?.abort();
      wake();
    },
  };
}

/** Takes chunks of a text/event-stream and calls event(type, data) for each whole event. */
function eventParser(event) {
  let rest = "";
  return (chunk) => {
    const lines = (rest + chunk).split(/\r?\n/);
    rest = lines.pop();
    // The lines of an unfinished event are kept for the next chunk.
    let type = "message";
    let data = [];
    let held = [];
    for (const line of lines) {
      held.push(line);
      if (line === "") {
        if (data.length) event(type, JSON.parse(data.join("\n")));
        [type, data, held] = ["message", [], []];
      } else if (line.startsWith("event:")) type = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    }
    if (held.length) rest = `${held.join("\n")}\n${rest}`;
  };
}
