// Differences between two texts, word by word. Pure: takes and returns strings.

/** Beyond this many cells of the table of common words two texts are not compared. */
const MOST_CELLS = 4_000_000;

/** Cuts a text into words, single marks and runs of white space; joined they give it back. */
function words(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

/**
 * Compares two texts.
 *
 * @returns {{before: [string, boolean][], after: [string, boolean][], same: number} | null}
 *   the pieces of either text with whether the other one lacks them, and the share of words of
 *   the longer one that both have (0 to 1); null if the texts are too long to be compared.
 */
export function diff(before, after) {
  const a = words(before);
  const b = words(after);
  const least = Math.min(a.length, b.length);
  let head = 0;
  while (head < least && a[head] === b[head]) head += 1;
  let tail = 0;
  while (tail < least - head && a.at(-1 - tail) === b.at(-1 - tail)) tail += 1;
  const middleA = a.slice(head, a.length - tail);
  const middleB = b.slice(head, b.length - tail);
  if (middleA.length * middleB.length > MOST_CELLS) return null;
  const [keptA, keptB, common] = commonWords(middleA, middleB);
  const longer = Math.max(a.length, b.length);
  return {
    before: pieces(a, head, tail, keptA),
    after: pieces(b, head, tail, keptB),
    same: longer === 0 ? 1 : (head + tail + common) / longer,
  };
}

/** Which words of either list belong to their longest common subsequence, and its length. */
function commonWords(a, b) {
  const width = b.length + 1;
  const length = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      const here = i * width + j;
      length[here] =
        a[i] === b[j] ? length[here + width + 1] + 1 : Math.max(length[here + width], length[here + 1]);
    }
  }
  const keptA = new Uint8Array(a.length);
  const keptB = new Uint8Array(b.length);
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) {
      keptA[i] = keptB[j] = 1;
      i += 1;
      j += 1;
    } else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) {
      i += 1;
    } else {
      j += 1;
    }
  }
  return [keptA, keptB, length[0]];
}

/** Joins neighbours of the same kind. */
function pieces(all, head, tail, kept) {
  const found = [];
  all.forEach((word, i) => {
    const inMiddle = i >= head && i < all.length - tail;
    const lone = inMiddle && !kept[i - head];
    if (found.length && found.at(-1)[1] === lone) found.at(-1)[0] += word;
    else found.push([word, lone]);
  });
  return found;
}
