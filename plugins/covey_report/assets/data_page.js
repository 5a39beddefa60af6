// Put the page of a recipe's data together.

byId('subtitle').replaceChildren(...readable([DATA.source, DATA.model, brief(DATA.seconds) + ' s'].join(' · ')));
showSections();
