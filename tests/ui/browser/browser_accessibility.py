"""Scripts that look for what some people could not read or name."""

# Texts whose contrast with what lies behind them is below WCAG AA; disabled controls may be faint.
FAINT = """() => {
  const part = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    paint.clearRect(0, 0, 1, 1); paint.fillStyle = text; paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([red, green, blue]) => 0.2126 * part(red) + 0.7152 * part(green) + 0.0722 * part(blue);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] > 250) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    const style = getComputedStyle(element);
    const faded = element.closest("svg, :disabled, .off, .hidden, .skip, option, .u-off");
    if (faded || !texts.currentNode.data.trim() || !element.getClientRects().length) continue;
    const [one, other] = [luminance(rgba(style.color)), luminance(behind(element))].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700);
    const contrast = (one + 0.05) / (other + 0.05);
    const words = texts.currentNode.data.trim().slice(0, 40);
    if (contrast < (large ? 3 : 4.5)) found.push(`${contrast.toFixed(2)}: ${words}`);
  }
  return [...new Set(found)];
}"""
# Controls and pictures that a screen reader could not name.
NAMELESS = """() => {
  const all = document.querySelectorAll("a, button, input, select, canvas[role], svg[role], meter, progress");
  const name = (one) => one.getAttribute("aria-label") || one.textContent || one.title || one.labels?.[0]?.textContent;
  return [...all].filter((one) => one.getClientRects().length && !name(one)?.trim()).map((one) => one.outerHTML);
}"""
