// Package decodelimits bounds what the text of a client may grow into, before it is
// parsed: three bytes of JSON may become a struct of a kilobyte, and an alias of
// YAML any number of values.
package decodelimits

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	yamlnode "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// The limits of one text. Kubernetes bounds requests by their bytes alone: 3 MiB, of which 1.5 MiB can be stored. The
// limits here are beyond what objects of that size hold, and bound the memory and time of a text that is made to grow.
const (
	MaxValues = 1 << 18 // members, items and scalars together: a value takes 6 bytes of 1.5 MiB
	MaxDepth  = 1000    // lists and objects inside of each other
	// MaxMemory bounds what the decoded form of a text takes, by estimate. See Counts.Memory.
	MaxMemory = 48 << 20
	// maxWork bounds the sum of the squares of the sizes of all objects and lists, with a quarter for lists of scalars:
	// the sets in which owners of fields are recorded are sorted by insertion. It permits one object of 16,384 members,
	// one list of as many objects, or one list of 32,768 scalars.
	maxWork = 1 << 28
	// maxNodes bounds what a parser makes of YAML; text in a block scalar counts too.
	maxNodes = 1 << 18
	// MaxBytes is what aliases of YAML may expand to.
	MaxBytes = 3 << 20
)

// ErrTooMuch is in every refusal of a text for what it would grow into.
var ErrTooMuch = errors.New("the text holds too much")

// CheckJSON refuses a text beyond the limits. It does not check that the text is JSON. The text will be decoded into
// the Go value into; nil means maps, lists and scalars.
func CheckJSON(data []byte, into any) error {
	if err := Count(data).Check(into); err != nil {
		return err
	}
	return CheckQuantities(data, into)
}

// Counts is what a JSON text holds, about, and no less.
type Counts struct {
	Values  int // members, items and scalars
	Items   int // items of all lists
	Objects int
	work    int // grows with the square of the size of each object and list
	widest  int // members of the largest object or items of the largest list
	deep    bool

	quantity int  // bytes of the longest quantity of a protobuf message
	exponent bool // a quantity of a protobuf message has an exponent beyond the bound
}

// close counts an object or list of n values that ended.
func (c *Counts) close(n int, ofScalars bool) {
	c.widest = max(c.widest, n)
	if ofScalars {
		n /= 2
	}
	c.work += n * n
}

// Check refuses a text that is nested deeper than MaxDepth, holds more than MaxValues, or takes more than MaxMemory
// when it is decoded into a value of the Go type of into.
func (c Counts) Check(into any) error {
	switch {
	case c.deep:
		return TooDeep()
	case c.Values > MaxValues:
		return fmt.Errorf("%w: about %d values, at most %d are read", ErrTooMuch, c.Values, MaxValues)
	}
	if c.work > maxWork {
		return fmt.Errorf("%w: an object or list of about %d values, at most %d are read, or %d scalars in a list",
			ErrTooMuch, c.widest, 1<<14, 1<<15)
	}
	if m := c.Memory(into); m > MaxMemory {
		return fmt.Errorf("%w: its %d objects and %d list items would take about %d MiB of memory, at most %d MiB are used",
			ErrTooMuch, c.Objects, c.Items, m>>20, MaxMemory>>20)
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
	var size [MaxDepth + 1]int
	var scalars [MaxDepth + 1]bool // a list, in which no list or object was found
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
			list[depth], size[depth] = data[i] == '[', 1
			scalars[depth], scalars[depth-1] = list[depth], false
			c.Values++
			if list[depth] {
				c.Items++
			} else {
				c.Objects++
			}
		case '}', ']':
			c.close(size[depth], scalars[depth])
			depth = max(depth-1, 0)
		case ',':
			c.Values++
			size[depth]++
			if list[depth] {
				c.Items++
			}
		}
	}
	for ; depth > 0; depth-- {
		c.close(size[depth], scalars[depth])
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
	if json.Valid(data) { // a parser of YAML takes a multiple of its time and memory
		return data, CheckJSON(data, nil)
	}
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
			return out, nil, CheckJSON(out, nil)
		}
	}
	if out, err = yaml.YAMLToJSON(data); err != nil {
		return nil, nil, err
	}
	return out, duplicates, CheckJSON(out, nil)
}

// checkYAML bounds the nodes that a parser makes of the text, and what its aliases stand for.
func checkYAML(data []byte) error {
	if json.Valid(data) {
		return CheckJSON(data, nil) // which knows what is inside of a string
	}
	if trimmed := bytes.TrimSpace(data); len(trimmed) > 0 && (trimmed[0] == '{' || trimmed[0] == '[') && Count(trimmed).Deep() {
		return TooDeep()
	}
	// Every node takes one of these characters, or the one before it does. Those
	// inside of a scalar are counted too: to know them apart takes a parser.
	nodes := 1
	for i, c := range data {
		switch c {
		case '\n', '\r', ',', '[', '{':
			nodes++
		case ':', '-', '?': // an indicator only before a space; after a quoted key a comma or brace is counted
			if i+1 == len(data) || data[i+1] == ' ' || data[i+1] == '\t' {
				nodes++
			}
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
