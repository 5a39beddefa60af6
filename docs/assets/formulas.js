// Draws the formulas of a page, as MathML, by KaTeX: a page without formulas does not load it.
(() => {
  const katexFile = new URL("katex-0.19.1.min.js", document.currentScript.src).href
  let katexLoaded

  function loadKatex() {
    katexLoaded ??= new Promise((resolve, reject) => {
      const script = document.createElement("script")
      script.src = katexFile
      script.onload = resolve
      script.onerror = reject
      document.head.append(script)
    })
    return katexLoaded
  }

  async function drawFormulas() {
    const formulas = [...document.querySelectorAll(".arithmatex:not([data-drawn])")]
    if (!formulas.length) return
    await loadKatex()
    for (const element of formulas) {
      element.dataset.drawn = ""
      const tex = element.textContent.trim().slice(2, -2) // without \( \) or \[ \]
      katex.render(tex, element, { displayMode: element.tagName === "DIV", output: "mathml", throwOnError: false })
    }
  }

  if (typeof document$ === "undefined") document.addEventListener("DOMContentLoaded", drawFormulas)
  else document$.subscribe(drawFormulas)
})()
