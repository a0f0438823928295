package disk

import "slices"

// logSizes estimates the total size of the newest entries of a log. It does not store the size of
// each entry. Instead it stores a mark for one entry in every markInterval bytes: the entry's index
// and the total size up to this entry.
type logSizes struct {
	marks []sizeMark // in ascending order of index
	total int64      // size of all entries up to and including last, in bytes
	last  uint64     // index of the last entry
}

type sizeMark struct {
	index uint64
	total int64 // size of all entries up to and including index, in bytes
}

const markInterval = 256 << 10

// addEntry adds an entry with the given index and size at the end of the log. If the log already
// has entries with this or a greater index, they are removed first.
func (e *logSizes) addEntry(index uint64, bytes int64) {
	if index <= e.last {
		e.truncateFrom(index)
	}
	e.total += bytes
	e.last = index
	if n := len(e.marks); n == 0 || e.total-e.marks[n-1].total >= markInterval {
		e.marks = append(e.marks, sizeMark{index, e.total})
	}
}

// truncateFrom removes the entries with the given or a greater index. The sizes of the entries
// between the last remaining mark and index are lost. Until the log has grown by as many bytes,
// countWithin may therefore count more entries than fit.
func (e *logSizes) truncateFrom(index uint64) {
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

// dropThrough removes the entries up to and including index from the start of the log.
func (e *logSizes) dropThrough(index uint64) {
	n := 0
	for n < len(e.marks) && e.marks[n].index <= index {
		n++
	}
	e.marks = slices.Delete(e.marks, 0, n)
}

// countWithin returns how many of the newest entries have a total size of about the given number of
// bytes. It returns too few entries rather than too many, except after truncateFrom.
func (e *logSizes) countWithin(bytes int64) uint64 {
	from := e.total - bytes
	for _, m := range e.marks {
		if m.total >= from {
			return e.last - m.index
		}
	}
	return 0
}
