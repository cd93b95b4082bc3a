/** Resolves once the store has a judgement, which arrives after the first paint. */
export function judged(store) {
  if (store.judgement) return Promise.resolve();
  return new Promise((resolve) => {
    const leave = store.on((event) => {
      if (event.type !== "judgement") return;
      leave();
      resolve();
    });
  });
}
