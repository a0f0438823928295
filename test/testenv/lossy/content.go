package lossy

import "slices"

// blockBytes is the unit in which room is taken.
const blockBytes = 4096

// content is a file's data: what readers see, what the platter is sure to
// have, and the changes between the two.
type content struct {
	now, disk []byte
	waiting   []change       // oldest first
	blocks    map[int64]bool // that take room
}

// change is a write, or a new length when data is nil.
type change struct {
	at   int64 // offset, or the length
	data []byte
}

// newContent is a file that is all on the platter. It takes b over.
func newContent(b []byte) *content {
	c := &content{now: b, disk: slices.Clone(b), blocks: make(map[int64]bool)}
	for at := int64(0); at < int64(len(b)); at += blockBytes {
		c.blocks[at/blockBytes] = true
	}
	return c
}

func (c *content) room() int64 { return int64(len(c.blocks)) * blockBytes }

func (c *content) write(at int64, b []byte) {
	w := change{at, slices.Clone(b)}
	c.now = w.take(c.now)
	c.waiting = append(c.waiting, w)
}

func (c *content) resize(size int64) {
	if size == int64(len(c.now)) {
		return
	}
	for b := range c.blocks {
		if b*blockBytes >= size {
			delete(c.blocks, b)
		}
	}
	s := change{at: size}
	c.now = s.take(c.now)
	c.waiting = append(c.waiting, s)
}

// take makes the change in b.
func (w change) take(b []byte) []byte {
	if w.data == nil {
		return resized(b, w.at)
	}
	if end := w.at + int64(len(w.data)); end > int64(len(b)) {
		b = resized(b, end)
	}
	copy(b[w.at:], w.data)
	return b
}

// resized is b with another length; what is new is zero.
func resized(b []byte, size int64) []byte {
	if grow := size - int64(len(b)); grow > 0 {
		return append(b, make([]byte, grow)...)
	}
	return b[:size]
}

func (c *content) sync() {
	for _, w := range c.waiting {
		c.disk = w.take(c.disk)
	}
	c.waiting = nil
}

// forget is what becomes of data when an fsync fails on Linux: the pages count
// as clean, no later fsync brings them to the platter, and they stay readable as
// long as the kernel keeps them in memory. Then the platter shows what it has.
func (c *content) forget() {
	c.now = resized(slices.Clone(c.disk), int64(len(c.now)))
	c.waiting = nil
}

// after is what a power cut leaves of the file.
func (c *content) after(d *dice) []byte {
	switch d.loss.Data {
	case Kept:
		b := slices.Clone(c.disk)
		for _, w := range c.waiting {
			b = w.take(b)
		}
		return b
	case Torn:
		return c.torn(d)
	}
	return slices.Clone(c.disk)
}

// torn keeps of every block some first part of what was written to it, and of
// the lengths some first part of those that were set. A length may get there without its data.
func (c *content) torn(d *dice) []byte {
	b := slices.Clone(c.disk)
	over := make(map[int64]bool) // blocks that get nothing more
	fixed := false               // the length does not
	unit := int64(d.loss.block())
	for _, w := range c.waiting {
		if w.data == nil {
			if fixed = fixed || !d.keep(); !fixed {
				b = w.take(b)
			}
			continue
		}
		for from := w.at; from < w.at+int64(len(w.data)); {
			block := from / unit
			to := min((block+1)*unit, w.at+int64(len(w.data)))
			if over[block] = over[block] || !d.keep(); !over[block] {
				b = change{from, w.data[from-w.at : to-w.at]}.take(b)
			}
			from = to
		}
	}
	if len(c.waiting) > 0 && !fixed && len(b) < len(c.now) && d.keep() {
		b = resized(b, int64(len(c.now)))
	}
	return b
}
