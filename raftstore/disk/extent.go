package disk

import "slices"

// extent knows roughly how many bytes the entries at the end of a log take,
// without a number for each: it has a mark for every extentStep of them.
type extent struct {
	marks []extentMark // rising
	total int64        // bytes up to and including last
	last  uint64       // index
}

type extentMark struct {
	index uint64
	total int64 // bytes up to and including it
}

const extentStep = 256 << 10

// add notes an entry at the end.
func (e *extent) add(index uint64, bytes int64) {
	if index <= e.last {
		e.cut(index)
	}
	e.total += bytes
	e.last = index
	if n := len(e.marks); n == 0 || e.total-e.marks[n-1].total >= extentStep {
		e.marks = append(e.marks, extentMark{index, e.total})
	}
}

// cut forgets entries from index on. Those between the last mark and the cut
// are counted no more: up to a step more is kept for it.
func (e *extent) cut(index uint64) {
	n := len(e.marks)
	for n > 0 && e.marks[n-1].index >= index {
		n--
	}
	e.marks = e.marks[:n]
	e.last, e.total = index-1, 0
	if n > 0 {
		e.total = e.marks[n-1].total
	}
}

// drop forgets entries up to an index, at the beginning.
func (e *extent) drop(upTo uint64) {
	n := 0
	for n < len(e.marks) && e.marks[n].index <= upTo {
		n++
	}
	e.marks = slices.Delete(e.marks, 0, n)
}

// within is how many entries at the end take about so many bytes; fewer rather than more.
func (e *extent) within(bytes int64) uint64 {
	from := e.total - bytes
	for _, m := range e.marks {
		if m.total >= from {
			return e.last - m.index
		}
	}
	return 0
}
