// A term with its explanation, which is shown when the mouse or the keyboard's focus is on it. Escape hides it.
let made = 0; // for ids

export default {
  template: `
    <span class="term">
      <button type="button" :aria-describedby="id" @mouseenter="open = true" @mouseleave="open = false" @focus="open = true"
        @blur="open = false" @click="open = true" @keydown.escape="open = false">{{ name }}</button>
      <span :id="id" class="hidden">{{ text }}</span>
      <q-tooltip v-model="open" no-parent-event anchor="bottom left" self="top left" max-width="18rem" class="explained">{{ text }}</q-tooltip>
    </span>`,
  props: { name: { type: String, required: true }, text: { type: String, required: true } },
  data: () => ({ open: false, id: "term-" + ++made }),
};
