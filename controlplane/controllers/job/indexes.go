package job

import (
	"slices"
	"strconv"
	"strings"
)

// indexes is a set of completion indexes of a Job, as ranges in ascending order that neither
// overlap nor touch.
type indexes []span

type span struct{ from, to int } // span is a range of indexes that includes both from and to.

// parseIndexes parses a set such as "1,3-5,7". It ignores indexes that are not below limit, and
// invalid parts, which validation refuses.
func parseIndexes(text string, limit int) indexes {
	var out indexes
	for part := range strings.SplitSeq(text, ",") {
		a, b, ranged := strings.Cut(part, "-")
		from, err := strconv.Atoi(a)
		if err != nil || from < 0 {
			continue
		}
		to := from
		if ranged {
			if to, err = strconv.Atoi(b); err != nil {
				continue
			}
		}
		if to = min(to, limit-1); from <= to {
			out = out.withSpan(span{from, to})
		}
	}
	return out
}

// withSpan returns the union of x and range s.
func (x indexes) withSpan(s span) indexes {
	var out indexes
	placed := false
	for _, have := range x {
		switch {
		case have.to+1 < s.from:
			out = append(out, have)
		case s.to+1 < have.from:
			if !placed {
				out, placed = append(out, s), true
			}
			out = append(out, have)
		default:
			s = span{min(s.from, have.from), max(s.to, have.to)}
		}
	}
	if !placed {
		out = append(out, s)
	}
	return out
}

func (x indexes) withIndex(i int) indexes { return x.withSpan(span{i, i}) }

func (x indexes) hasIndex(i int) bool {
	_, found := slices.BinarySearchFunc(x, i, func(s span, i int) int {
		switch {
		case s.to < i:
			return -1
		case s.from > i:
			return 1
		}
		return 0
	})
	return found
}

func (x indexes) countIndexes() int {
	n := 0
	for _, s := range x {
		n += s.to - s.from + 1
	}
	return n
}

// String returns the set in the form of a Job's status: "1,3-5,7". A range of two indexes is
// written as two indexes, as in Kubernetes.
func (x indexes) String() string {
	var b strings.Builder
	for i, s := range x {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(s.from))
		switch {
		case s.to == s.from+1:
			b.WriteByte(',')
			b.WriteString(strconv.Itoa(s.to))
		case s.to > s.from:
			b.WriteByte('-')
			b.WriteString(strconv.Itoa(s.to))
		}
	}
	return b.String()
}

// missingIndexes returns the first n indexes that are below limit and in none of the sets.
func missingIndexes(n, limit int, sets ...indexes) []int {
	var out []int
	for i := 0; i < limit && len(out) < n; {
		next := i
		for _, x := range sets {
			for _, s := range x {
				if s.from <= next && next <= s.to {
					next = s.to + 1
				}
			}
		}
		if next == i {
			out = append(out, i)
			next++
		}
		i = next
	}
	return out
}
