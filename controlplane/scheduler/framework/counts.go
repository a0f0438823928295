package framework

import "slices"

// counts are numbers by index, most of them zero: a sorted list while few are not, and a slice where that takes little
// more room. Either takes room in proportion to what is counted, and not to what could be.
type counts struct {
	few  []count
	many []int32 // instead of few
	used int     // how many are not zero
}

type count struct{ at, n int32 }

// A slice is right for smallSlice indexes however few are used, and else when one in denseShare is. It is given up when
// fewer than one in sparseShare are.
const (
	smallSlice  = 16
	denseShare  = 32
	sparseShare = 128
)

func (c *counts) get(at int32) int {
	if c.many != nil {
		if int(at) < len(c.many) {
			return int(c.many[at])
		}
		return 0
	}
	if i, ok := c.find(at); ok {
		return int(c.few[i].n)
	}
	return 0
}

func (c *counts) find(at int32) (int, bool) {
	low, high := 0, len(c.few)
	for low < high {
		if middle := (low + high) / 2; c.few[middle].at < at {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low, low < len(c.few) && c.few[low].at == at
}

// add changes one number and returns it.
func (c *counts) add(at int32, by int) int {
	if by == 0 {
		return c.get(at)
	}
	if c.many != nil && int(at) >= len(c.many) {
		if dense(int(at)+1, c.used+1) {
			c.many = append(c.many, make([]int32, int(at)+1-len(c.many))...)
		} else {
			c.toFew()
		}
	}
	if c.many == nil {
		return c.addFew(at, int32(by))
	}
	was := c.many[at]
	now := was + int32(by)
	c.many[at] = now
	switch {
	case was == 0:
		c.used++
	case now == 0:
		if c.used--; c.used == 0 {
			*c = counts{}
		} else if len(c.many) > smallSlice && c.used < len(c.many)/sparseShare {
			c.toFew()
		}
	}
	return int(now)
}

func (c *counts) addFew(at, by int32) int {
	i, ok := c.find(at)
	if !ok {
		c.few = slices.Insert(c.few, i, count{at, by})
		c.used++
		if dense(int(c.few[len(c.few)-1].at)+1, c.used) {
			c.toMany()
		}
		return int(by)
	}
	c.few[i].n += by
	now := c.few[i].n
	if now == 0 {
		c.used--
		if c.few = slices.Delete(c.few, i, i+1); c.used == 0 {
			*c = counts{}
		}
	}
	return int(now)
}

func dense(size, used int) bool { return size <= smallSlice || size <= used*denseShare }

func (c *counts) toMany() {
	c.many = make([]int32, c.few[len(c.few)-1].at+1)
	for _, x := range c.few {
		c.many[x.at] = x.n
	}
	c.few = nil
}

func (c *counts) toFew() {
	c.few = make([]count, 0, c.used+1)
	for at, n := range c.many {
		if n != 0 {
			c.few = append(c.few, count{int32(at), n})
		}
	}
	c.many = nil
}

// each calls f for every number that is not zero.
func (c *counts) each(f func(at int32, n int)) {
	for _, x := range c.few {
		f(x.at, int(x.n))
	}
	for at, n := range c.many {
		if n != 0 {
			f(int32(at), int(n))
		}
	}
}
