package framework

import "slices"

// sparseCounts stores a count for each index from 0, most of which are zero. It uses either a
// sorted list of the nonzero counts or a dense slice of all counts. In both cases, the memory is
// proportional to the number of nonzero counts.
type sparseCounts struct {
	sorted []count
	dense  []int32 // all counts; if it is not nil, sorted is not used
	used   int     // number of nonzero counts
}

type count struct{ at, n int32 }

// Limits that decide whether sparseCounts uses a dense slice or a sorted list. A dense slice is
// used for up to smallSlice indexes, and for more if at least one in denseShare counts is nonzero.
// It is replaced by a sorted list if fewer than one in sparseShare counts are nonzero.
const (
	smallSlice  = 16
	denseShare  = 32
	sparseShare = 128
)

func (c *sparseCounts) value(at int32) int {
	if c.dense != nil {
		if int(at) < len(c.dense) {
			return int(c.dense[at])
		}
		return 0
	}
	if i, ok := c.findIndex(at); ok {
		return int(c.sorted[i].n)
	}
	return 0
}

func (c *sparseCounts) findIndex(at int32) (int, bool) {
	low, high := 0, len(c.sorted)
	for low < high {
		if middle := (low + high) / 2; c.sorted[middle].at < at {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low, low < len(c.sorted) && c.sorted[low].at == at
}

// addTo adds delta to the count at the given index and returns the sum.
func (c *sparseCounts) addTo(index int32, delta int) int {
	if delta == 0 {
		return c.value(index)
	}
	if c.dense != nil && int(index) >= len(c.dense) {
		if isDense(int(index)+1, c.used+1) {
			c.dense = append(c.dense, make([]int32, int(index)+1-len(c.dense))...)
		} else {
			c.toSorted()
		}
	}
	if c.dense == nil {
		return c.addToSorted(index, int32(delta))
	}
	was := c.dense[index]
	now := was + int32(delta)
	c.dense[index] = now
	switch {
	case was == 0:
		c.used++
	case now == 0:
		if c.used--; c.used == 0 {
			*c = sparseCounts{}
		} else if len(c.dense) > smallSlice && c.used < len(c.dense)/sparseShare {
			c.toSorted()
		}
	}
	return int(now)
}

func (c *sparseCounts) addToSorted(at, by int32) int {
	i, ok := c.findIndex(at)
	if !ok {
		c.sorted = slices.Insert(c.sorted, i, count{at, by})
		c.used++
		if isDense(int(c.sorted[len(c.sorted)-1].at)+1, c.used) {
			c.toDense()
		}
		return int(by)
	}
	c.sorted[i].n += by
	now := c.sorted[i].n
	if now == 0 {
		c.used--
		if c.sorted = slices.Delete(c.sorted, i, i+1); c.used == 0 {
			*c = sparseCounts{}
		}
	}
	return int(now)
}

func isDense(size, used int) bool { return size <= smallSlice || size <= used*denseShare }

func (c *sparseCounts) toDense() {
	c.dense = make([]int32, c.sorted[len(c.sorted)-1].at+1)
	for _, x := range c.sorted {
		c.dense[x.at] = x.n
	}
	c.sorted = nil
}

func (c *sparseCounts) toSorted() {
	c.sorted = make([]count, 0, c.used+1)
	for at, n := range c.dense {
		if n != 0 {
			c.sorted = append(c.sorted, count{int32(at), n})
		}
	}
	c.dense = nil
}

// forEach calls f with the index and the value of every nonzero count.
func (c *sparseCounts) forEach(f func(index int32, n int)) {
	for _, x := range c.sorted {
		f(x.at, int(x.n))
	}
	for index, n := range c.dense {
		if n != 0 {
			f(int32(index), int(n))
		}
	}
}
