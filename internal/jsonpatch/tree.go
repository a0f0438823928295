package jsonpatch

import (
	"encoding/json"
	"fmt"
	"strings"
)

// node is a JSON value: either its text, or a list or object in decoded form.
type node struct {
	text       string
	collection *collection
}

// collection is a decoded list or object. The keys of an object's members are quoted strings as
// canonicalString returns them.
type collection struct {
	list    bool
	members map[string]node
	items   []node
	bytes   int // length of the text without whitespace
}

// textSize returns the length of the value's text without encoding it.
func (n node) textSize() int {
	if n.collection != nil {
		return n.collection.bytes
	}
	return len(n.text)
}

func (n node) isObject() bool {
	if n.collection != nil {
		return !n.collection.list
	}
	return strings.HasPrefix(n.text, "{")
}

// tree is a JSON document to which a patch is being applied. Lists and objects are decoded one
// level at a time, and only where an operation requires it. All other values remain texts, which
// copies of a value share.
type tree struct {
	root     node
	bytes    int // length of the document's text
	maxBytes int // upper limit of bytes
	nodes    int // number of decoded or copied values
	work     int // number of scanned bytes, plus the cost of other work in the same unit
}

func newTree(doc []byte, maxBytes int) *tree {
	text := strings.TrimSpace(string(doc))
	return &tree{root: node{text: text}, bytes: len(text), maxBytes: max(maxBytes, len(text))}
}

func (t *tree) chargeWork(work, nodes int) error {
	t.work += work
	t.nodes += nodes
	switch {
	case t.work > maxWork:
		return fmt.Errorf("%w: the operations scan the document too often: use fewer operations, or operations that "+
			"replace larger parts", ErrTooLarge)
	case t.nodes > maxNodes:
		return fmt.Errorf("%w: the operations decode lists and objects with more than %d values in total",
			ErrTooLarge, maxNodes)
	}
	return nil
}

// growBy adds delta to the counted length of the document. If the result would exceed maxBytes, it
// returns an error and changes nothing. It must be called before the document is changed.
func (t *tree) growBy(delta int) error {
	if t.bytes+delta > t.maxBytes {
		return fmt.Errorf("%w: the result would have %d bytes, the limit is %d", ErrTooLarge, t.bytes+delta, t.maxBytes)
	}
	t.bytes += delta
	return nil
}

// openNode decodes one level of a list or object and returns it. It returns nil for any other
// value. It does not modify the node.
func (t *tree) openNode(n node) (*collection, error) {
	if n.collection != nil {
		return n.collection, nil
	}
	if err := t.chargeWork(len(n.text), 0); err != nil {
		return nil, err
	}
	switch {
	case strings.HasPrefix(n.text, "{"):
		return t.openObject(n.text)
	case strings.HasPrefix(n.text, "["):
		return t.openList(n.text)
	}
	return nil, nil
}

func (t *tree) openObject(text string) (*collection, error) {
	b := &collection{bytes: 2}
	s := scanner{text: text, at: 1}
	for s.hasMore() {
		key := canonicalString(s.nextValue())
		s.skipSeparators() // skip the colon
		if err := t.chargeWork(0, 1); err != nil {
			return nil, err
		}
		if b.members == nil {
			b.members = make(map[string]node)
		}
		v := node{text: s.nextValue()}
		if old, twice := b.members[key]; twice {
			b.bytes -= old.textSize() + len(key) + 2
		}
		b.members[key] = v
		b.bytes += len(key) + 2 + v.textSize()
	}
	if len(b.members) > 0 {
		b.bytes-- // one comma less than members
	}
	return b, nil
}

func (t *tree) openList(text string) (*collection, error) {
	b := &collection{list: true, bytes: 2}
	s := scanner{text: text, at: 1}
	for s.hasMore() {
		if err := t.chargeWork(0, 1); err != nil {
			return nil, err
		}
		v := node{text: s.nextValue()}
		b.items = append(b.items, v)
		b.bytes += v.textSize() + 1
	}
	if len(b.items) > 0 {
		b.bytes--
	}
	return b, nil
}

// copyNode returns a deep copy of a value. The copy shares only texts with the original.
func (t *tree) copyNode(n node) (node, error) {
	if n.collection == nil {
		return n, nil
	}
	count := len(n.collection.items) + len(n.collection.members)
	if err := t.chargeWork(cloneWork*count, count); err != nil {
		return node{}, err
	}
	out := &collection{list: n.collection.list, bytes: n.collection.bytes}
	var err error
	if n.collection.list {
		out.items = make([]node, len(n.collection.items))
		for i, c := range n.collection.items {
			if out.items[i], err = t.copyNode(c); err != nil {
				return node{}, err
			}
		}
		return node{collection: out}, nil
	}
	out.members = make(map[string]node, len(n.collection.members))
	for k, c := range n.collection.members {
		if out.members[k], err = t.copyNode(c); err != nil {
			return node{}, err
		}
	}
	return node{collection: out}, nil
}

// appendText appends the JSON text of the value.
func (n node) appendText(to []byte) []byte {
	if n.collection == nil {
		return append(to, n.text...)
	}
	if n.collection.list {
		to = append(to, '[')
		for i, c := range n.collection.items {
			if i > 0 {
				to = append(to, ',')
			}
			to = c.appendText(to)
		}
		return append(to, ']')
	}
	to = append(to, '{')
	first := true
	for k, c := range n.collection.members {
		if !first {
			to = append(to, ',')
		}
		first = false
		to = append(to, k...)
		to = append(to, ':')
		to = c.appendText(to)
	}
	return append(to, '}')
}

// equalValues reports whether two JSON values are equal. The order of members is ignored, and
// numbers are compared by value.
func (t *tree) equalValues(a, b node) (bool, error) {
	if a.collection == nil && b.collection == nil && a.text == b.text {
		return true, nil
	}
	left, err := t.openNode(a)
	if err != nil {
		return false, err
	}
	right, err := t.openNode(b)
	if err != nil {
		return false, err
	}
	switch {
	case left == nil && right == nil:
		return equalScalars(a.text, b.text), nil
	case left == nil || right == nil || left.list != right.list || len(left.items) != len(right.items) ||
		len(left.members) != len(right.members):
		return false, nil
	}
	for i := range left.items {
		if same, err := t.equalValues(left.items[i], right.items[i]); err != nil || !same {
			return false, err
		}
	}
	for k, v := range left.members {
		other, ok := right.members[k]
		if !ok {
			return false, nil
		}
		if same, err := t.equalValues(v, other); err != nil || !same {
			return false, err
		}
	}
	return true, nil
}

func equalScalars(a, b string) bool {
	if a == b || a == "" || b == "" {
		return a == b
	}
	if a[0] == '"' || b[0] == '"' {
		return a[0] == b[0] && canonicalString(a) == canonicalString(b)
	}
	var x, y any
	if json.Unmarshal([]byte(a), &x) != nil || json.Unmarshal([]byte(b), &y) != nil {
		return false
	}
	if !strings.ContainsAny(a+b, ".eE") {
		return false // integers, null and booleans have only one spelling
	}
	return x == y
}

// canonicalString returns a quoted JSON string in canonical form, in which only characters that
// require it are escaped.
func canonicalString(text string) string {
	if !strings.Contains(text, `\`) {
		return text
	}
	var s string
	if json.Unmarshal([]byte(text), &s) != nil {
		return text
	}
	return quoteString(s)
}

const hex = "0123456789abcdef"

func quoteString(s string) string {
	var b strings.Builder
	b.Grow(len(s) + 2)
	b.WriteByte('"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteByte(c)
		case c < 0x20:
			b.WriteString(`\u00`)
			b.WriteByte(hex[c>>4])
			b.WriteByte(hex[c&15])
		default:
			b.WriteByte(c)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// scanner iterates over the values in the text of a list or object. The text must be valid JSON.
type scanner struct {
	text string
	at   int
}

// skipSeparators skips whitespace, commas and colons.
func (s *scanner) skipSeparators() {
	for ; s.at < len(s.text); s.at++ {
		switch s.text[s.at] {
		case ' ', '\t', '\r', '\n', ',', ':':
		default:
			return
		}
	}
}

// hasMore reports whether another value follows.
func (s *scanner) hasMore() bool {
	s.skipSeparators()
	return s.at < len(s.text) && s.text[s.at] != '}' && s.text[s.at] != ']'
}

// nextValue returns the text of the next value and moves behind it.
func (s *scanner) nextValue() string {
	from, depth := s.at, 0
	for s.at < len(s.text) {
		switch s.text[s.at] {
		case '"':
			s.skipString()
			if depth == 0 {
				return s.text[from:s.at]
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return s.text[from:s.at]
			}
			if depth--; depth == 0 {
				s.at++
				return s.text[from:s.at]
			}
		case ',', ' ', '\t', '\r', '\n':
			if depth == 0 {
				return s.text[from:s.at]
			}
		}
		s.at++
	}
	return s.text[from:]
}

func (s *scanner) skipString() {
	for s.at++; s.at < len(s.text); s.at++ {
		switch s.text[s.at] {
		case '\\':
			s.at++
		case '"':
			s.at++
			return
		}
	}
}
