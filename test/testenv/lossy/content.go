package lossy

import "slices"

// blockBytes is the unit of allocation.
const blockBytes = 4096

// content is a file's data: the data that readers see (visible), the data that is durable
// (durable), and the changes between the two.
type content struct {
	visible, durable []byte
	waiting          []change       // oldest first
	blocks           map[int64]bool // allocated blocks
}

// change is a write, or a new length if data is nil.
type change struct {
	at   int64 // offset, or the new length
	data []byte
}

// newContent returns a durable file with the content b, which the caller must not use any more.
func newContent(b []byte) *content {
	c := &content{visible: b, durable: slices.Clone(b), blocks: make(map[int64]bool)}
	for at := int64(0); at < int64(len(b)); at += blockBytes {
		c.blocks[at/blockBytes] = true
	}
	return c
}

func (c *content) allocatedBytes() int64 { return int64(len(c.blocks)) * blockBytes }

func (c *content) addWrite(at int64, b []byte) {
	w := change{at, slices.Clone(b)}
	c.visible = w.applyTo(c.visible)
	c.waiting = append(c.waiting, w)
}

func (c *content) addResize(size int64) {
	if size == int64(len(c.visible)) {
		return
	}
	for b := range c.blocks {
		if b*blockBytes >= size {
			delete(c.blocks, b)
		}
	}
	s := change{at: size}
	c.visible = s.applyTo(c.visible)
	c.waiting = append(c.waiting, s)
}

// applyTo applies the change to b and returns the result, which may share memory with b.
func (w change) applyTo(b []byte) []byte {
	if w.data == nil {
		return withLength(b, w.at)
	}
	if end := w.at + int64(len(w.data)); end > int64(len(b)) {
		b = withLength(b, end)
	}
	copy(b[w.at:], w.data)
	return b
}

// withLength returns b with another length, extended by zeros. It may modify b.
func withLength(b []byte, size int64) []byte {
	if grow := size - int64(len(b)); grow > 0 {
		return append(b, make([]byte, grow)...)
	}
	return b[:size]
}

func (c *content) makeDurable() {
	for _, w := range c.waiting {
		c.durable = w.applyTo(c.durable)
	}
	c.waiting = nil
}

// failSync models a failed fsync on Linux. The pages are marked clean, so that no later fsync
// writes them. They stay readable while the kernel has them in its page cache; afterwards readers
// get the durable data.
func (c *content) failSync() {
	c.visible = withLength(slices.Clone(c.durable), int64(len(c.visible)))
	c.waiting = nil
}

// afterCrash returns the content of the file after a power cut.
func (c *content) afterCrash(d *dice) []byte {
	switch d.loss.Data {
	case Kept:
		b := slices.Clone(c.durable)
		for _, w := range c.waiting {
			b = w.applyTo(b)
		}
		return b
	case Torn:
		return c.tornCopy(d)
	}
	return slices.Clone(c.durable)
}

// tornCopy returns the content after a power cut that keeps a part of the changes. For each block
// it keeps a random number of the oldest writes, and likewise for changes of the length. The length
// may be kept without its data.
func (c *content) tornCopy(d *dice) []byte {
	b := slices.Clone(c.durable)
	over := make(map[int64]bool) // blocks that keep no further writes
	fixed := false               // the length keeps no further changes
	unit := int64(d.loss.blockSize())
	for _, w := range c.waiting {
		if w.data == nil {
			if fixed = fixed || !d.keepsChange(); !fixed {
				b = w.applyTo(b)
			}
			continue
		}
		for from := w.at; from < w.at+int64(len(w.data)); {
			block := from / unit
			to := min((block+1)*unit, w.at+int64(len(w.data)))
			if over[block] = over[block] || !d.keepsChange(); !over[block] {
				b = change{from, w.data[from-w.at : to-w.at]}.applyTo(b)
			}
			from = to
		}
	}
	if len(c.waiting) > 0 && !fixed && len(b) < len(c.visible) && d.keepsChange() {
		b = withLength(b, int64(len(c.visible)))
	}
	return b
}
