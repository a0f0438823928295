// Package input bounds what the text of a client may grow into, before it is
// parsed: three bytes of JSON may become a struct of a kilobyte, and an alias of
// YAML any number of values.
package input

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	yamlnode "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// The limits of one text. They are far from what objects below the size limit of
// the store have in practice.
const (
	MaxValues = 1 << 15 // members, items and scalars together
	MaxItems  = 1 << 14 // items of all lists: each may become a large struct
	MaxDepth  = 1000    // lists and objects inside of each other
	// MaxPatched is how many values a patch may hold or add: the owner of each
	// field is worked out, which costs more than the value. For an apply it is half as many.
	MaxPatched = 1 << 13
	// maxNodes bounds what a parser makes of YAML; text in a block scalar counts too.
	maxNodes = 1 << 17
	// MaxBytes is what aliases of YAML may expand to.
	MaxBytes = 3 << 20
)

// ErrTooMuch is in every refusal of a text for what it would grow into.
var ErrTooMuch = errors.New("the text holds too much")

// CheckJSON refuses a text beyond the limits. It does not check that the text is JSON.
func CheckJSON(data []byte) error { return Count(data).Check(MaxValues, MaxItems) }

// Counts is what a JSON text holds, about, and no less.
type Counts struct {
	Values, Items int
	deep          bool
}

// Check refuses what is deeper than MaxDepth, or more than the limits.
func (c Counts) Check(values, items int) error {
	switch {
	case c.deep:
		return TooDeep()
	case c.Values > values:
		return fmt.Errorf("%w: about %d values, at most %d are read", ErrTooMuch, c.Values, values)
	case c.Items > items:
		return fmt.Errorf("%w: its lists have about %d items together, at most %d are read", ErrTooMuch, c.Items, items)
	}
	return nil
}

// Deep says that lists and objects are nested more than MaxDepth deep.
func (c Counts) Deep() bool { return c.deep }

// TooDeep is the refusal of such a text.
func TooDeep() error {
	return fmt.Errorf("%w: lists and objects are nested more than %d deep", ErrTooMuch, MaxDepth)
}

// Count looks through a text until it ends or is nested too deep.
func Count(data []byte) Counts {
	var list [MaxDepth + 1]bool // what is open at each depth: a list or an object
	depth, c := 0, Counts{Values: 1}
	for i := 0; i < len(data); i++ {
		switch data[i] {
		case '"':
			i = endOfString(data, i)
		case '{', '[':
			if depth++; depth > MaxDepth {
				c.deep = true
				return c
			}
			list[depth] = data[i] == '['
			c.Values++
			if list[depth] {
				c.Items++
			}
		case '}', ']':
			depth = max(depth-1, 0)
		case ',':
			c.Values++
			if list[depth] {
				c.Items++
			}
		}
	}
	return c
}

// endOfString returns the index of the quote that ends the string which begins at i.
func endOfString(data []byte, i int) int {
	for i++; i < len(data); i++ {
		switch data[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return i
}

// FromYAML turns YAML, which JSON is too, into JSON within the limits.
func FromYAML(data []byte) ([]byte, error) {
	out, _, err := fromYAML(data, false)
	return out, err
}

// FromYAMLStrict does so too; duplicates says which keys were there twice.
func FromYAMLStrict(data []byte) (out []byte, duplicates, err error) { return fromYAML(data, true) }

func fromYAML(data []byte, strict bool) (out []byte, duplicates, err error) {
	if err := checkYAML(data); err != nil {
		return nil, nil, err
	}
	if strict {
		if out, duplicates = yaml.YAMLToJSONStrict(data); duplicates == nil {
			return out, nil, CheckJSON(out)
		}
	}
	if out, err = yaml.YAMLToJSON(data); err != nil {
		return nil, nil, err
	}
	return out, duplicates, CheckJSON(out)
}

// checkYAML bounds the nodes that a parser makes of the text, and what its aliases stand for.
func checkYAML(data []byte) error {
	if json.Valid(data) {
		return CheckJSON(data) // which knows what is inside of a string
	}
	// Every node takes one of these characters, or the one before it does. Those
	// inside of a scalar are counted too: to know them apart takes a parser.
	nodes := 1
	for _, c := range data {
		switch c {
		case '\n', '\r', ',', ':', '-', '?', '[', '{':
			nodes++
		}
	}
	if nodes > maxNodes {
		return fmt.Errorf("%w: YAML with about %d separators, at most %d are read; sent as JSON it may pass", ErrTooMuch, nodes, maxNodes)
	}
	if err := checkSingle(data); err != nil {
		return err
	}
	if !bytes.ContainsRune(data, '*') || !bytes.ContainsRune(data, '&') {
		return nil
	}
	var doc yamlnode.Node
	if err := yamlnode.Unmarshal(data, &doc); err != nil {
		return fmt.Errorf("yaml: %w", err)
	}
	e := expansion{sizes: map[*yamlnode.Node]size{}}
	return e.check(e.of(&doc))
}

// checkSingle refuses a text of several documents, of which a parser would read the first and leave the others.
func checkSingle(data []byte) error {
	if !bytes.Contains(data, []byte("\n---")) && !bytes.Contains(data, []byte("\n...")) {
		return nil
	}
	d := yamlnode.NewDecoder(bytes.NewReader(data))
	for documents := 0; ; {
		var doc yamlnode.Node
		err := d.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("yaml: %w", err)
		}
		if empty(&doc) {
			continue
		}
		if documents++; documents > 1 {
			return errSeveral
		}
	}
}

var errSeveral = errors.New("yaml: the text holds several documents: send each in a request of its own")

// empty says whether a document holds nothing, as that behind a last "---" does.
func empty(doc *yamlnode.Node) bool {
	return len(doc.Content) == 0 || len(doc.Content) == 1 && doc.Content[0].Tag == "!!null"
}

// size is what a node stands for when every alias is written out.
type size struct{ values, bytes int }

// expansion measures nodes, each once.
type expansion struct {
	sizes map[*yamlnode.Node]size
	over  error
}

func (e *expansion) check(s size) error {
	switch {
	case e.over != nil:
		return e.over
	case s.values > MaxValues:
		return fmt.Errorf("%w: its aliases stand for about %d values, at most %d are read", ErrTooMuch, s.values, MaxValues)
	case s.bytes > MaxBytes:
		return fmt.Errorf("%w: its aliases stand for about %d bytes, at most %d are read", ErrTooMuch, s.bytes, MaxBytes)
	}
	return nil
}

func (e *expansion) of(n *yamlnode.Node) size {
	if n == nil || e.over != nil {
		return size{}
	}
	if n.Kind == yamlnode.AliasNode {
		n = n.Alias
	}
	if s, ok := e.sizes[n]; ok {
		if s.values == 0 {
			e.over = fmt.Errorf("%w: an alias stands for what it is in", ErrTooMuch)
		}
		return s
	}
	e.sizes[n] = size{} // being measured
	s := size{1, len(n.Value) + 4}
	for _, c := range n.Content {
		in := e.of(c)
		s.values, s.bytes = s.values+in.values, s.bytes+in.bytes
		if e.over = e.check(s); e.over != nil {
			break
		}
	}
	e.sizes[n] = s
	return s
}
