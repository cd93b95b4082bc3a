/**
 * Zoom and pan along a horizontal axis: drag to choose a range, wheel to zoom at the pointer,
 * horizontal wheel or Shift and arrows to scroll, keys + and − and 0.
 *
 * addZoom(node, {left, width(), domain(), whole(), least, show(domain), settle(first, last),
 *   dragging(drag|null), click(x, y), center(), dragPans})
 *   left, width()    CSS pixels in which the axis begins, and where it ends
 *   domain()         {first, last} shown now; whole(): {first, last} of all there is
 *   center()         where keys zoom: null for the middle; left out likewise
 *   least            narrowest domain
 *   show(domain)     draws at once, with what is loaded
 *   settle(f, l)     shortly after the last change; (null, null) for the whole range
 *   dragPans         a drag scrolls instead of choosing a range
 */

const SETTLE_MS = 220;
const CLICK_PX = 4;

export function addZoom(node, axis) {
  let timer = 0;
  let drag = null;

  function settle(domain) {
    clearTimeout(timer);
    const whole = axis.whole();
    const all = domain.first <= whole.first && domain.last >= whole.last;
    timer = setTimeout(() => (all ? axis.settle(null, null) : axis.settle(domain.first, domain.last)),
      SETTLE_MS);
  }

  function change(first, last) {
    const whole = axis.whole();
    const size = Math.min(whole.last - whole.first, Math.max(axis.least, last - first));
    const start = Math.max(whole.first, Math.min(first, whole.last - size));
    const domain = { first: start, last: start + size };
    axis.show(domain);
    settle(domain);
  }

  function by(factor, center) {
    const { first, last } = axis.domain();
    const wanted = center ?? axis.center?.() ?? (first + last) / 2;
    const middle = Math.max(first, Math.min(last, wanted));
    change(middle - (middle - first) * factor, middle + (last - middle) * factor);
  }

  function along(share) {
    const { first, last } = axis.domain();
    const move = share * (last - first);
    change(first + move, last + move);
  }

  const position = (event) => {
    const box = node.getBoundingClientRect();
    return [event.clientX - box.left + node.scrollLeft, event.clientY - box.top + node.scrollTop];
  };
  const valueAt = (x) => {
    const { first, last } = axis.domain();
    return first + ((x - axis.left) / (axis.width() - axis.left)) * (last - first);
  };

  node.addEventListener("wheel", (event) => {
    if (event.ctrlKey || !axis.domain()) return;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!sideways && event.shiftKey) along(Math.sign(event.deltaY) * 0.1);
    else if (sideways) along(event.deltaX / (axis.width() - axis.left));
    else by(event.deltaY > 0 ? 1.25 : 0.8, valueAt(position(event)[0]));
    event.preventDefault();
  }, { passive: false });

  node.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !axis.domain()) return;
    const [x, y] = position(event);
    drag = { from: x, to: x, y, moved: false, start: axis.domain() };
    node.setPointerCapture(event.pointerId);
  });
  node.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const [x] = position(event);
    drag.to = Math.max(axis.left, Math.min(axis.width(), x));
    drag.moved ||= Math.abs(x - drag.from) > CLICK_PX;
    if (!drag.moved) return;
    if (axis.dragPans) {
      const { first, last } = drag.start;
      const move = ((drag.from - x) / (axis.width() - axis.left)) * (last - first);
      change(first + move, last + move);
    } else axis.dragging?.(drag);
  });
  const drop = (event) => {
    if (!drag) return;
    const done = drag;
    drag = null;
    axis.dragging?.(null);
    if (event.type === "pointercancel") return;
    if (!done.moved) axis.click?.(done.from, done.y);
    else if (!axis.dragPans) {
      const ends = [valueAt(done.from), valueAt(done.to)].sort((a, b) => a - b);
      change(...ends);
    }
  };
  node.addEventListener("pointerup", drop);
  node.addEventListener("pointercancel", drop);

  function reset() {
    const { first, last } = axis.whole();
    change(first, last);
  }

  node.addEventListener("keydown", (event) => {
    if (!axis.domain() || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "+" || event.key === "=") by(0.7);
    else if (event.key === "-") by(1 / 0.7);
    else if (event.key === "0" || event.key === "Escape") reset();
    else if (event.shiftKey && event.key === "ArrowLeft") along(-0.2);
    else if (event.shiftKey && event.key === "ArrowRight") along(0.2);
    else return;
    event.preventDefault();
  });
}
